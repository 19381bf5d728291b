"""How much each layer's quantisation costs, and which layers to leave in float until a budget is met.

Sensitivity is the SQNR (dB) of the outputs when only that layer is quantised, on a few calibration batches: one pass
over the graph per layer, no data labels, no reconversion. The search then leaves the most sensitive layers in float,
doubling their number until the drop is within the budget, and halving back to the smallest number that still is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from .quantize_layers import Layer, is_dequantize, is_quantize

if TYPE_CHECKING:
    import torch
    from torch.fx import GraphModule, Node

    from edgec.context import Context


def sqnr(reference: torch.Tensor, value: torch.Tensor) -> float:
    """Signal to quantisation noise in dB; infinite for equal tensors."""
    noise = float(((reference - value).double() ** 2).sum())
    signal = float((reference.double() ** 2).sum())
    if noise == 0:
        return math.inf
    return 10 * math.log10(max(signal, 1e-300) / noise)


@cache
def _interpreter() -> type[Any]:
    import torch

    class Switched(torch.fx.Interpreter):
        """Runs a converted graph with only the edges in `on` quantised."""

        def __init__(self, module: GraphModule) -> None:
            super().__init__(module)
            self.on: set[str] = set()

        def run_node(self, node: Node) -> Any:
            if is_quantize(node) and node.name not in self.on:
                return self.fetch_args_kwargs_from_env(node)[0][0]
            if is_dequantize(node) and node.all_input_nodes[0].name not in self.on:
                return self.fetch_args_kwargs_from_env(node)[0][0]
            return super().run_node(node)

    return Switched


def layer_sqnr(
    module: GraphModule, layers: Sequence[Layer], batches: Sequence[tuple[torch.Tensor, ...]], context: Context
) -> dict[str, float]:
    """SQNR in dB of the graph's outputs with only one layer quantised, for each layer."""
    import torch

    switched = _interpreter()(module)

    def outputs(on: set[str]) -> torch.Tensor:
        switched.on = on
        with torch.no_grad():
            results = [switched.run(*batch) for batch in batches]
        flat = [t for r in results for t in (r if isinstance(r, tuple | list) else (r,)) if t.is_floating_point()]
        return torch.cat([t.flatten() for t in flat])

    reference = outputs(set())
    result = {}
    for i, layer in enumerate(layers):
        result[layer.name] = sqnr(reference, outputs(layer.edges))
        context.progress(i + 1, len(layers), f"sensitivity of {layer.name}")
    return result


@dataclass(frozen=True)
class Trial:
    """One try of the search: how many layers were left in float, and the drop of the metric that it gave."""

    float_layers: int
    drop: float


def search(
    order: Sequence[str],
    drop_of: Callable[[Sequence[str]], float],
    *,
    max_drop: float,
    max_trials: int,
    context: Context,
) -> tuple[list[str], list[Trial]]:
    """The fewest layers of `order` (most sensitive first) to leave in float for a drop of at most `max_drop`.

    Stops when the number can't be made smaller, or after `max_trials` evaluations; then gives the best so far: the
    fewest layers within the budget, else those with the least drop.
    """
    trials: list[Trial] = []
    started = time.monotonic()

    def attempt(count: int) -> bool:
        drop = drop_of(order[:count])
        trials.append(Trial(count, drop))
        left = (time.monotonic() - started) / len(trials) * (max_trials - len(trials))
        what = (
            f"{count} of {len(order)} layers in float: drop {drop:.4g} (goal {max_drop:.4g}), at most {left:.0f} s left"
        )
        context.progress(len(trials), max_trials, what)
        return drop <= max_drop

    if attempt(0):
        return [], trials
    too_few, enough = 0, None
    while enough is None and len(trials) < max_trials and too_few < len(order):
        count = min(max(1, 2 * too_few), len(order))
        if attempt(count):
            enough = count
        else:
            too_few = count
    while enough is not None and enough - too_few > 1 and len(trials) < max_trials:
        middle = (too_few + enough) // 2
        if attempt(middle):
            enough = middle
        else:
            too_few = middle
    best = enough if enough is not None else min(trials, key=lambda t: (t.drop, t.float_layers)).float_layers
    return list(order[:best]), trials
