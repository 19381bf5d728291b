"""Attention heads and whole layers.

Heads: Michel, Levy and Neubig, "Are Sixteen Heads Really Better than One?" (2019). With grouped-query attention a
key-value head goes together with the query heads that share it. Layers: Men et al., "ShortGPT" (2024): a layer whose
output is nearly its input matters least (block influence, 1 − cosine).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from edgec.errors import ConversionError

from .prune_channels import Row

if TYPE_CHECKING:
    import torch
    from torch import nn

OUTPUTS = ("o_proj", "out_proj", "proj")
HEADS = ("heads", "num_heads", "num_attention_heads", "n_heads")
KV_HEADS = ("kv_heads", "num_kv_heads", "num_key_value_heads", "n_kv_heads")


def attentions(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """`(name, attention, name of its output layer)` of modules with q_proj, k_proj, v_proj and one of OUTPUTS."""
    from torch import nn

    for name, part in module.named_modules():
        children = dict(part.named_children())
        output = next((o for o in OUTPUTS if isinstance(children.get(o), nn.Linear)), None)
        if output and all(isinstance(children.get(p), nn.Linear) for p in ("q_proj", "k_proj", "v_proj")):
            yield name, part, output


def prune_heads(module: nn.Module, share: float, criterion: str) -> list[Row]:
    """Remove the `share` least important key-value heads of each attention, and the query heads that use them.

    Raises:
        ConversionError: there is no attention that is known how to cut.
    """
    import torch_pruning as tp

    rows: list[Row] = []
    for name, part, output in attentions(module):
        q, k, v, o = (cast("nn.Linear", part.get_submodule(p)) for p in ("q_proj", "k_proj", "v_proj", output))
        heads, groups = _head_counts(name, part, q, k)
        width = q.out_features // heads  # head_dim
        per_group = heads // groups
        values = [
            _score(q, slice(g * per_group * width, (g + 1) * per_group * width), 0, criterion)
            + _score(k, slice(g * width, (g + 1) * width), 0, criterion)
            + _score(v, slice(g * width, (g + 1) * width), 0, criterion)
            + _score(o, slice(g * per_group * width, (g + 1) * per_group * width), 1, criterion)
            for g in range(groups)
        ]
        count = min(groups - 1, round(groups * share))
        if count == 0:
            rows.append(("heads", name, heads, heads, f"{groups} key-value heads: {share:.0%} is less than one"))
            continue
        out = sorted(sorted(range(groups), key=lambda g: (values[g], g))[:count])
        queries = [i for g in out for i in range(g * per_group * width, (g + 1) * per_group * width)]
        keys = [i for g in out for i in range(g * width, (g + 1) * width)]
        tp.prune_linear_out_channels(q, queries)
        tp.prune_linear_out_channels(k, keys)
        tp.prune_linear_out_channels(v, keys)
        tp.prune_linear_in_channels(o, queries)
        _set_first(part, HEADS, (groups - count) * per_group)
        _set_first(part, KV_HEADS, groups - count)
        gone, kept = ([values[g] for g in range(groups) if (g in out) is side] for side in (True, False))
        why = f"{criterion} {sum(gone) / len(gone):.3g} where those kept have {sum(kept) / len(kept):.3g}"
        rows.append(("heads", name, heads, (groups - count) * per_group, why))
    if not rows:
        raise ConversionError(
            "prune: `heads` is set, and the model has no attention with q_proj, k_proj, v_proj and an output layer",
            hint="leave `heads` out; channels and hidden widths can be pruned in any model",
        )
    return rows


def _head_counts(name: str, part: Any, q: Any, k: Any) -> tuple[int, int]:
    """(query heads, key-value heads), from the module's own numbers."""
    heads = next((getattr(part, a) for a in HEADS if isinstance(getattr(part, a, None), int)), None)
    if heads is None and isinstance(getattr(part, "head_dim", None), int):
        heads = q.out_features // part.head_dim
    if heads is None:
        raise ConversionError(
            f"prune: `{name}` doesn't say how many heads it has", hint=f"give it one of {', '.join(HEADS)}, or head_dim"
        )
    return heads, heads * k.out_features // q.out_features


def _set_first(part: nn.Module, names: tuple[str, ...], value: int) -> None:
    for name in names:
        if isinstance(getattr(part, name, None), int):
            setattr(part, name, value)


def _score(layer: Any, index: slice, axis: int, criterion: str) -> float:
    weight: torch.Tensor = layer.weight.detach()
    values = weight.abs() if criterion == "magnitude" or layer.weight.grad is None else weight * layer.weight.grad
    part = values[index] if axis == 0 else values[:, index]
    return float(part.abs().mean())


def prune_layers(module: nn.Module, batches: list[tuple[torch.Tensor, ...]], count: int) -> list[Row]:
    """Remove the `count` layers that change their input least, of the numbered ones that keep its shape.

    Raises:
        ConversionError: there are not that many.
    """
    influence = _influence(module, batches)
    if len(influence) <= count:
        raise ConversionError(
            f"prune: `layers: {count}`, and {len(influence)} layers keep the shape of their input",
            hint="fewer, and at least one has to stay",
        )
    chosen = sorted(influence, key=lambda name: (influence[name], name))[:count]
    rest = [influence[name] for name in influence if name not in chosen]
    why = f"where the least of those kept has {min(rest):.3g}"
    rows: list[Row] = [("layer", name, 1, 0, f"block influence {influence[name]:.3g} {why}") for name in chosen]
    # From the last to the first, so that earlier ones keep their numbers.
    for name in sorted(chosen, key=lambda n: (n.rpartition(".")[0], int(n.rpartition(".")[2])), reverse=True):
        parent, _, index = name.rpartition(".")
        container = cast("nn.ModuleList", module.get_submodule(parent))
        del container[int(index)]
    return rows


def _influence(module: nn.Module, batches: list[tuple[torch.Tensor, ...]]) -> dict[str, float]:
    """1 − cosine between input and output of every removable layer, the mean over the batches."""
    import torch
    from torch import nn

    seen: dict[str, list[float]] = {}

    def watch(name: str) -> Any:
        def hook(_layer: nn.Module, inputs: Any, output: Any) -> None:
            x, y = inputs[0] if inputs else None, output[0] if isinstance(output, tuple) else output
            if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and x.shape == y.shape:
                cosine = nn.functional.cosine_similarity(x.flatten(1), y.flatten(1)).mean()
                seen.setdefault(name, []).append(1.0 - float(cosine))

        return hook

    handles = []
    for name, part in module.named_modules():
        if isinstance(part, nn.ModuleList | nn.Sequential):
            for index, layer in part.named_children():
                # Activations and norms keep the shape, too; a layer worth the name holds several parts.
                if index.isdigit() and len(list(layer.modules())) > 2:
                    path = f"{name}.{index}" if name else index
                    handles.append(layer.register_forward_hook(watch(path)))
    try:
        with torch.no_grad():
            for batch in batches:
                module(*batch)
    finally:
        for handle in handles:
            handle.remove()
    return {name: sum(values) / len(values) for name, values in seen.items()}
