"""Zeros instead of narrower layers: single weights, or N of every M.

N:M as in Mishra et al., "Accelerating Sparse Deep Neural Networks" (2021): of every M consecutive weights along the
input channels, the M − N least important become zero. A file doesn't get smaller by zeros, only its zip does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .prune_channels import Row

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn


def make_masks(
    module: nn.Module, sparsity: float | None, pattern: tuple[int, int] | None, criterion: str, keep: set[int]
) -> tuple[dict[str, torch.Tensor], list[Row]]:
    """Masks (1: kept) of the weights of convolutions and linear layers, by name, and what each layer loses.

    Args:
        sparsity: share of all these weights together that becomes zero; or
        pattern: (n, m), n of every m kept.
        keep: ids of layers that stay dense.
    """
    import torch
    from torch import nn

    layers = {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, nn.modules.conv._ConvNd | nn.Linear) and id(part) not in keep
    }
    scores = {name: _scores(part, criterion) for name, part in layers.items()}
    masks: dict[str, torch.Tensor] = {}
    rows: list[Row] = []
    if sparsity is not None:
        values = torch.cat([s.flatten() for s in scores.values()])
        order = torch.argsort(values, stable=True)
        flat = torch.ones_like(values, dtype=torch.bool)
        flat[order[: int(len(values) * sparsity)]] = False
        start = 0
        for name, score in scores.items():
            masks[name] = flat[start : start + score.numel()].view_as(score)
            start += score.numel()
    else:
        assert pattern is not None
        n, m = pattern
        for name, score in scores.items():
            if score.shape[1] % m:
                rows.append(
                    ("mask", name, score.numel(), score.numel(), f"{score.shape[1]} inputs are no multiple of {m}")
                )
                continue
            masks[name] = _n_of_m(score, n, m)
    for name, mask in masks.items():
        how = f"{pattern[0]}:{pattern[1]}" if pattern else f"{criterion}, the least of all layers"
        rows.append(("mask", name, mask.numel(), int(mask.sum()), how))
    return masks, rows


def _scores(layer: Any, criterion: str) -> torch.Tensor:
    weight = layer.weight.detach()
    scores: torch.Tensor = (weight * layer.weight.grad).abs() if criterion == "taylor" else weight.abs()
    return scores


def _n_of_m(score: torch.Tensor, n: int, m: int) -> torch.Tensor:
    """(out, in, …) → a mask that keeps the n greatest of every m along `in`; ties go to the first."""
    import torch

    last = score.movedim(1, -1)  # (out, …, in)
    groups = last.reshape(-1, m)
    kept = torch.argsort(groups, dim=1, descending=True, stable=True)[:, :n]
    mask = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, kept, True)
    return mask.view(last.shape).movedim(-1, 1)


def applier(module: nn.Module, masks: dict[str, torch.Tensor]) -> Callable[[], None]:
    """A function that zeroes what the masks remove; called after every step of training."""
    import torch

    pairs = [(module.get_submodule(name), mask) for name, mask in masks.items()]

    def apply() -> None:
        with torch.no_grad():
            for layer, mask in pairs:
                layer.weight.mul_(mask)  # type: ignore[operator]

    return apply
