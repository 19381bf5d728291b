"""The bundle's tensors against the reference's weights: the cheapest check, and the one that names the layer.

A native artefact has q (out, in) INT8 and a scale for each row; the reference has W = scale · q in float32. Both come
from one Program by different ways, so they are equal to the last bit. Where they aren't, the ratio of the two, row by
row, tells a scale that is wrong from numbers that are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgec.validation.findings import Finding, judged

if TYPE_CHECKING:
    from edgec.architectures.llama import Llama

_EQUAL = 1e-6  # relative: a few units in the last place of float32
_SAME_RATIO = 1e-4  # rows with ratios this near each other have one cause


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the reference's; `text` says how, for people."""

    name: str
    relative: float
    text: str


def check_weights(folder: Path, model: Llama, reference: str) -> tuple[Finding, list[Difference]]:
    """Compare all tensors of a native artefact; the finding's value is how many differ."""
    found = list(differences(folder, model))
    if not found:
        return judged("weights", 0, 0, "every tensor is the reference's", reference), []
    worst = max(found, key=lambda d: d.relative)
    more = f" (and {len(found) - 1} more tensors differ)" if len(found) > 1 else ""
    return judged("weights", len(found), 0, f"{worst.text}{more}", reference), found


def differences(folder: Path, model: Llama) -> Iterator[Difference]:
    """Each tensor of `model.safetensors` that is not the reference's."""
    from safetensors import safe_open

    from edgec.architectures.rope import inverse_frequencies

    config = model.config
    frequencies, _ = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    expected = {name: p.detach().float().cpu().numpy() for name, p in model.named_parameters()}
    expected["rope.frequencies"] = frequencies.numpy()
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        names = set(file.keys())
        for name in sorted(names):
            if name.endswith(".scale"):
                continue
            if name not in expected:
                yield Difference(name, float("inf"), f"{name}: the reference has no such tensor")
                continue
            layer, scale = name.removesuffix(".weight"), None
            if f"{layer}.scale" in names:
                scale = file.get_tensor(f"{layer}.scale").astype(np.float32)
            if (one := _compare(layer, file.get_tensor(name), scale, expected[name])) is not None:
                yield one
        for name in sorted(set(expected) - names):
            yield Difference(name, float("inf"), f"{name.removesuffix('.weight')}: the bundle has no such tensor")


def _compare(
    name: str, stored: NDArray[np.float32], scale: NDArray[np.float32] | None, expected: NDArray[np.float32]
) -> Difference | None:
    if stored.shape != expected.shape:
        return Difference(name, float("inf"), f"{name}: its shape is {stored.shape}, the reference's {expected.shape}")
    ours = stored.astype(np.float32) if scale is None else stored.astype(np.float32) * scale[:, None]
    size = float(np.abs(expected).max()) or 1.0
    relative = float(np.abs(ours - expected).max()) / size
    if relative <= _EQUAL:
        return None
    return Difference(name, relative, f"{name}: {_how(ours, expected, scale is not None)}")


def _how(ours: NDArray[np.float32], expected: NDArray[np.float32], quantised: bool) -> str:
    """What is different, in words."""
    what = "scales" if quantised else "values"
    a, b = ours.reshape(len(ours), -1).astype(np.float64), expected.reshape(len(ours), -1).astype(np.float64)
    if ours.ndim == 1:
        a, b = a.T, b.T  # one row: a norm's weight, the frequencies of RoPE
    norm = (b * b).sum(-1)
    ratios = np.where(norm > 0, (a * b).sum(-1) / np.maximum(norm, 1e-300), 1.0)
    residue = np.abs(a - ratios[:, None] * b).max(-1)
    proportional = residue <= 1e-5 * np.maximum(np.abs(a).max(-1), 1e-30)
    wrong = np.abs(a - b).max(-1) > _EQUAL * max(np.abs(b).max(), 1e-30)
    rows = "" if wrong.all() else f" in {int(wrong.sum())} of {len(wrong)} rows"
    if not proportional[wrong].all():
        unlike = np.abs(a - b) > _EQUAL * max(np.abs(b).max(), 1e-30)
        return f"{int(unlike.sum()):,} of {unlike.size:,} weights are not the reference's"
    bad = ratios[wrong]
    if np.ptp(bad) <= _SAME_RATIO * np.abs(bad).max():
        return f"its {what} are {bad.mean():.4g}× the reference's{rows}"
    return f"its {what} are between {bad.min():.4g}× and {bad.max():.4g}× the reference's{rows}"
