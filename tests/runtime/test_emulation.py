"""The engine's logits against the same INT8 arithmetic written in PyTorch, and against the float model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from edgec.targets.native_model import ACTIVATION_GROUP
from safetensors.torch import load_file
from torch.nn import functional

from edgec.architectures.llama import Llama, LlamaConfig
from edgec.runtime.abi import KvType
from edgec.runtime.engine import Engine, EngineOptions
from tests import tiny_bundle
from tests.tiny_bundle import write_tiny_bundle

pytestmark = pytest.mark.slow  # the core has to be compiled

TOKENS = np.arange(80, dtype=np.int32) * 37 % 250


def fake_quantize(x: torch.Tensor) -> torch.Tensor:
    """What the engine makes of activations: symmetric INT8, one scale per row and group, half to even."""
    width = x.shape[-1]
    padded = functional.pad(x, (0, -width % ACTIVATION_GROUP))
    groups = padded.unflatten(-1, (-1, ACTIVATION_GROUP))
    greatest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(greatest > 0, 127 / greatest, torch.zeros(()))
    return ((groups * inverse).round() * (greatest / 127)).flatten(-2)[..., :width]


def load(bundle: Path, *, quantize: bool) -> Llama:
    """The bundle's model in PyTorch; with `quantize`, every product sees quantised activations."""
    config = LlamaConfig(
        vocab_size=tiny_bundle.VOCABULARY,
        hidden_size=tiny_bundle.HIDDEN,
        intermediate_size=tiny_bundle.INNER,
        layers=tiny_bundle.LAYERS,
        heads=tiny_bundle.HEADS,
        kv_heads=tiny_bundle.KV_HEADS,
        head_dim=tiny_bundle.HEAD,
        max_positions=512,
    )
    model = Llama(config).eval()
    stored = load_file(bundle / "bundle/native/model.safetensors")
    state = {
        name: value.float() * stored[name.removesuffix("weight") + "scale"][:, None]
        if value.dtype == torch.int8
        else value
        for name, value in stored.items()
        if name.endswith(".weight")
    }
    model.load_state_dict({**state, "lm_head.weight": state["embed_tokens.weight"]})
    if quantize:
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_pre_hook(lambda _, given: (fake_quantize(given[0]),))
    return model


def engine_logits(bundle: Path, kv: KvType) -> np.ndarray:
    count = len(TOKENS)
    positions = np.arange(count, dtype=np.int32)
    table = np.array([[3, 1, 7, 2, 5]], np.int32)
    slots = table[0, positions // 16] * 16 + positions % 16
    with Engine(bundle, EngineOptions(kv=kv)) as engine:
        logits, _ = engine.forward(TOKENS, positions, slots, np.zeros(count, np.int32), table)
    return logits


def divergence(p: np.ndarray, q: np.ndarray) -> float:
    a, b = (torch.from_numpy(x).double().log_softmax(-1) for x in (p, q))
    return float((a.exp() * (a - b)).sum(-1).mean())


def test_logits_equal_the_emulation_to_rounding(tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path)
    with torch.no_grad():
        expected = load(bundle, quantize=True)(torch.from_numpy(TOKENS[None]).long())[0].numpy()
        floats = load(bundle, quantize=False)(torch.from_numpy(TOKENS[None]).long())[0].numpy()
    got = engine_logits(bundle, KvType.FP32)
    scale = np.abs(expected).max()
    error, unlike = (np.abs(x - expected).max(-1)[:8] / scale for x in (got, floats))  # of the first positions
    # To the last digits of float32, where the float model is a thousand times as far. A sum in another order turns a
    # rounding over now and then, and every later position sees that, so the first ones are looked at.
    assert (error < 2e-6).sum() >= 6
    assert (unlike > 1e-3).all()
    assert divergence(expected, got) < 1e-3
    assert (expected.argmax(-1) == got.argmax(-1)).mean() > 0.9


def test_logits_are_near_the_float_model(tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path)
    with torch.no_grad():
        floats = load(bundle, quantize=False)(torch.from_numpy(TOKENS[None]).long())[0].numpy()
    got = engine_logits(bundle, KvType.INT8)
    assert divergence(floats, got) < 0.02
    assert (floats.argmax(-1) == got.argmax(-1)).mean() > 0.85
