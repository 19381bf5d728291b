"""Whole channels and hidden widths, with all that depends on them.

Fang et al., "DepGraph: Towards Any Structural Pruning" (2023) finds what must be removed together; torch-pruning is the
authors' implementation. A group's score per channel is the mean over its members of the norm of the channel's weights
("magnitude"), or of |weight · gradient| ("taylor": Molchanov et al., "Importance Estimation for Neural Network
Pruning", 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgec.errors import ConversionError, Reason

if TYPE_CHECKING:
    import torch
    from torch import nn

Row = tuple[str, str, int, int, str]  # kind, name, before, after, why


@dataclass(frozen=True)
class ChannelPlan:
    """What to remove: shares of the channels of convolutions and of the hidden widths of linear layers."""

    channels: float
    mlp: float
    criterion: str
    round_to: int


def prune_channels(
    module: nn.Module, example: tuple[torch.Tensor, ...], plan: ChannelPlan, keep: Sequence[nn.Module]
) -> list[Row]:
    """Cut `module` in place; the output channels of the layers in `keep` stay.

    For the Taylor criterion the gradients must be there already.

    Raises:
        ConversionError: a score is not finite.
    """
    import torch
    import torch_pruning as tp
    from torch import nn

    names = {id(part): name for name, part in module.named_modules()}
    learns = [p.requires_grad for p in module.parameters()]
    module.requires_grad_(True)  # dependencies are traced through autograd
    gradients = {id(p): p.grad for p in module.parameters()}
    graph = tp.DependencyGraph().build_dependency(module, example_inputs=list(example), verbose=False)
    for parameter in module.parameters():
        parameter.grad = gradients[id(parameter)]
    criteria = {"taylor": tp.importance.GroupTaylorImportance, "magnitude": tp.importance.GroupMagnitudeImportance}
    score = criteria[plan.criterion]()
    rows: list[Row] = []
    roots = (nn.modules.conv._ConvNd, nn.Linear)
    for group in graph.get_all_groups(ignored_layers=list(keep), root_module_types=roots):
        root, function = group[0].dep.target.module, group[0].dep.handler
        members = [dep.target.module for dep, _ in group]
        width = len(group[0].idxs)
        share = plan.mlp if isinstance(root, nn.Linear) else plan.channels
        kind = "hidden width" if isinstance(root, nn.Linear) else "channels"
        if share == 0:
            continue
        if (why := _untouchable(members, isinstance(root, nn.Linear))) is not None:
            rows.append((kind, names[id(root)], width, width, why))
            continue
        after = kept_width(width, share, plan.round_to)
        if after >= width:
            rows.append((kind, names[id(root)], width, width, f"already a multiple of {plan.round_to} or less"))
            continue
        values = score(group)  # (width,)
        if not torch.isfinite(values).all():
            raise ConversionError(
                f"prune: the {plan.criterion} scores of `{names[id(root)]}` are not finite",
                hint="its weights, or for the Taylor criterion its gradients, are all zero or not finite",
                reason=Reason.NOT_FINITE,
            )
        # Ties by index: argsort must not depend on the sorting algorithm.
        order = sorted(range(width), key=lambda i: (float(values[i]), i))
        out, left = order[: width - after], order[width - after :]
        others = sorted({names[id(m)] for m in members if id(m) in names and m is not root and _has_weights(m)})
        reason = (
            f"{plan.criterion} {_mean(values, out):.3g} where those kept have {_mean(values, left):.3g}; "
            f"with {', '.join(others[:4])}{' …' if len(others) > 4 else ''}"
        )
        graph.get_pruning_group(root, function, sorted(out)).prune()
        rows.append((kind, names[id(root)], width, after, reason))
    for parameter, learnt in zip(module.parameters(), learns, strict=True):
        parameter.requires_grad_(learnt)
    return rows


def kept_width(width: int, share: float, round_to: int) -> int:
    """Width after removing `share`: the nearest multiple of `round_to`, at least one of them, never above `width`."""
    wanted = width * (1 - share)
    return min(width, max(round_to, int(wanted / round_to + 0.5) * round_to))


def _untouchable(members: list[Any], linear: bool) -> str | None:
    """Why a group stays as it is, or None."""
    from torch import nn

    for member in members:
        if isinstance(member, nn.modules.conv._ConvNd) and member.groups not in (1, member.out_channels):
            return "a grouped convolution depends on it"
        if isinstance(member, nn.Embedding):
            return "it is the width of the embedding"
        if linear and not isinstance(member, nn.Module):
            return "a parameter outside of layers depends on it"
        if linear and isinstance(member, nn.LayerNorm):
            return "it is the width between the blocks"
    return None


def _has_weights(member: Any) -> bool:
    from torch import nn

    return isinstance(member, nn.Module) and any(True for _ in member.parameters(recurse=False))


def _mean(values: torch.Tensor, index: list[int]) -> float:
    return float(values[index].mean())


def last_layer(module: nn.Module, example: tuple[torch.Tensor, ...]) -> nn.Module | None:
    """The convolution or linear layer that is called last: its channels are the model's outputs."""
    import torch
    from torch import nn

    called: list[nn.Module] = []
    handles = [
        part.register_forward_hook(lambda part, *_: called.append(part))
        for part in module.modules()
        if isinstance(part, nn.modules.conv._ConvNd | nn.Linear)
    ]
    try:
        with torch.no_grad():
            module(*example)
    finally:
        for handle in handles:
            handle.remove()
    return called[-1] if called else None
