"""INT8 activations, keys and values, as rounding: the numbers that the native engine's integers stand for, in float.

Symmetric: q = round(x · 127 / amax), half to even, and x ≈ q · amax / 127. The native engine multiplies the q as
integers, exactly, and scales the sums; in float the same products differ from that only by float32's own rounding. A
deep network makes much of that: exact.py computes what can be compared.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.nn import functional

from edgec.architectures.llama import Llama
from edgec.runtime.abi import Status
from edgec.runtime.failures import EngineError

GROUP = 32  # activations that share a scale, along a row


def round_to_int8(x: torch.Tensor) -> torch.Tensor:
    """x (…, D), each row of D rounded to the nearest of 255 equidistant numbers: so are a head's keys and values."""
    greatest = x.abs().amax(-1, keepdim=True)
    # A tensor of 127: of a number over a tensor PyTorch makes 127 times the reciprocal, which rounds twice.
    inverse = torch.where(greatest > 0, torch.full_like(greatest, 127.0) / greatest, 0.0)
    return (x * inverse).round() * (greatest / 127.0)


def round_activations(x: torch.Tensor) -> torch.Tensor:
    """x (…, width), every group of 32 of a row by its own scale; the last group may be shorter."""
    width = x.shape[-1]
    groups = functional.pad(x.float(), (0, -width % GROUP)).view(*x.shape[:-1], -1, GROUP)
    return round_to_int8(groups).flatten(-2)[..., :width].to(x.dtype)


def round_inputs_of(model: Llama, layers: Collection[str]) -> None:
    """Let the named linear layers see rounded activations.

    Raises:
        EngineError: the model has no linear layer of a name.
    """
    for name in sorted(layers):
        try:
            layer = model.get_submodule(name)
        except AttributeError:
            layer = None
        if not isinstance(layer, nn.Linear):
            raise EngineError(Status.INVALID_ARGUMENT, f"{name} is no linear layer of the model")
        layer.register_forward_pre_hook(_round_input)


def _round_input(_: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (round_activations(inputs[0]),)
