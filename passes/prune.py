"""Structured pruning: remove whole channels, attention heads, hidden widths and layers that matter least.

Dependencies follow Fang et al., "DepGraph: Towards Any Structural Pruning" (2023). Masks (single weights, N:M) can be
laid over what is left. Fine-tuning after it can learn from the model as it was (α of the loss, as in distillation).
"""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from edgec.errors import ConversionError, Reason
from edgec.registry import Options, register_pass, suggest

from .training_options import TrainingOptions

if TYPE_CHECKING:
    import torch
    from torch import nn

    from edgec.context import Context
    from edgec.model import Model

    from .prune_channels import Row

TIMED_RUNS = 30  # of the model before and after, in turns; the median is steady from some 20 on


class MaskOptions(Options):
    """Zeros over what is left: either a share, or N of every M."""

    sparsity: float | None = Field(None, gt=0, lt=1, description="share of all weights that becomes zero")
    pattern: str | None = Field(None, pattern=r"^\d+:\d+$", description="N:M, N of every M weights kept, as in 2:4")

    @model_validator(mode="after")
    def _one(self) -> MaskOptions:
        if (self.sparsity is None) == (self.pattern is None):
            raise ValueError("give either `sparsity` or `pattern`")
        if self.pattern is not None and not 0 < self.n_of_m[0] < self.n_of_m[1]:
            raise ValueError("in `pattern: N:M`, N is at least 1 and less than M")
        return self

    @property
    def n_of_m(self) -> tuple[int, int]:
        n, m = (self.pattern or "0:0").split(":")
        return int(n), int(m)


class FineTuneOptions(TrainingOptions):
    """Training after pruning."""

    epochs: int = Field(2, ge=1, description="passes over the training data")
    lr: float = Field(1e-3, gt=0, description="the greatest learning rate")
    alpha: float = Field(0.0, ge=0, le=1, description="share of the model as it was before in the loss, as its teacher")
    temperature: float = Field(4.0, gt=0, description="of that teacher")


class PruneOptions(Options):
    """What to remove, and how much of it."""

    channels: float = Field(0.5, ge=0, lt=1, description="share of the channels of convolutions")
    mlp: float = Field(0.0, ge=0, lt=1, description="share of the hidden widths of linear layers")
    heads: float = Field(0.0, ge=0, lt=1, description="share of the attention heads (of key-value heads with GQA)")
    layers: int = Field(0, ge=0, description="how many layers that keep their input's shape")
    criterion: Literal["magnitude", "taylor"] = Field("magnitude", description="what makes a channel or head matter")
    taylor_batches: int = Field(8, ge=1, description="training batches that the Taylor criterion's gradients come from")
    round_to: int = Field(8, ge=1, description="widths become multiples of this, which the kernels want")
    exclude: list[str] = Field(default_factory=list, description="modules whose outputs stay as wide as they are")
    mask: MaskOptions | None = Field(None, description="zeros over the weights that are left")
    fine_tune: FineTuneOptions | None = Field(None, description="training afterwards")


@register_pass("prune", distributed=True)
def prune(model: Model, options: PruneOptions, context: Context) -> Model:
    """Raises ConversionError when nothing can be removed, or when the model doesn't run any more afterwards."""
    import torch

    from .prune_channels import ChannelPlan, last_layer, prune_channels
    from .prune_heads import attentions, prune_heads, prune_layers
    from .prune_masks import applier, make_masks
    from .training import require_float

    require_float(model, "prune")
    module = model.module.eval()
    before = copy.deepcopy(module)
    example = model.task.example(model.task.signatures(module)[0])
    with torch.no_grad():
        shapes = _shapes(module(*example))
    rows: list[Row] = []
    if options.layers:
        batches = list(itertools.islice(model.task.calibration(), options.taylor_batches))
        rows += prune_layers(module, batches, options.layers)
    if options.criterion == "taylor":
        _gather_gradients(model, options.taylor_batches, context)
    keep = [_find(module, path) for path in options.exclude]
    keep += [m for m in [last_layer(module, example)] if m is not None]
    if options.heads:
        rows += prune_heads(module, options.heads, options.criterion)
    if options.channels or options.mlp:
        plan = ChannelPlan(options.channels, options.mlp, options.criterion, options.round_to)
        inside = [layer for _, part, _ in attentions(module) for layer in part.children()]
        rows += prune_channels(module, example, plan, [*keep, *inside])
    masks: dict[str, torch.Tensor] = {}
    if options.mask:
        pattern = options.mask.n_of_m if options.mask.pattern else None
        masks, more = make_masks(module, options.mask.sparsity, pattern, options.criterion, {id(m) for m in keep})
        rows += more
    module.zero_grad(set_to_none=True)
    remask = applier(module, masks)
    remask()
    _check(module, example, shapes)
    context.table("Pruned groups", ("kind", "group", "before", "after", "why"), rows)
    if not any(after < width for _, _, width, after, _ in rows):
        context.unchanged("nothing could be removed: see the table of groups")
        return model
    _report(before, module, example, rows, context)
    if options.fine_tune:
        _fine_tune(model, before, options.fine_tune, remask, context)
    return model


def _find(module: nn.Module, path: str) -> nn.Module:
    known = dict(module.named_modules())
    if path not in known:
        raise ConversionError(
            f"prune: the model has no module `{path}`{suggest(path, known)}",
            hint="`exclude` takes the paths of modules",
            reason=Reason.BAD_OPTION,
        )
    found: nn.Module = known[path]
    return found


def _shapes(outputs: Any) -> list[tuple[int, ...]]:
    return [tuple(o.shape) for o in (outputs if isinstance(outputs, tuple | list) else (outputs,))]


def _gather_gradients(model: Model, batches: int, context: Context) -> None:
    """Sum the gradients of the task's loss over some training batches; BatchNorm and dropout as in use."""
    from .training import forward

    learns = [p.requires_grad for p in model.module.parameters()]
    model.module.requires_grad_(True)
    for i, (inputs, labels) in enumerate(itertools.islice(model.task.training(0), batches)):
        model.task.loss(forward(model.module, inputs), labels).backward()  # type: ignore[no-untyped-call]
        context.progress(i + 1, batches, "gradients for the Taylor criterion")
    for parameter, learnt in zip(model.module.parameters(), learns, strict=True):
        parameter.requires_grad_(learnt)


def _check(module: nn.Module, example: tuple[torch.Tensor, ...], shapes: list[tuple[int, ...]]) -> None:
    import torch

    try:
        with torch.no_grad():
            got = _shapes(module.eval()(*example))
    except Exception as cause:
        raise ConversionError(
            f"prune: the pruned model doesn't run: {str(cause).splitlines()[0]}",
            hint="its forward counts on a width or a layer that was removed; `exclude` that module",
            reason=Reason.INVARIANT_BROKEN,
        ) from cause
    if got != shapes:
        raise ConversionError(
            f"prune: the model's outputs were {shapes} and are {got} now",
            hint="`exclude` the layers that make the outputs",
            reason=Reason.INVARIANT_BROKEN,
        )


def _report(
    before: nn.Module, after: nn.Module, example: tuple[torch.Tensor, ...], rows: list[Row], context: Context
) -> None:
    from edgec.graphs import count_parameters

    for kind, name, width, left, why in rows:
        if left < width:
            context.note(f"{kind} of {name}: {width} → {left} ({why})")
    old, new = _latency(before, after, example)
    a, b = count_parameters(before), count_parameters(after)
    context.metric("latency_before_ms", old)
    context.metric("latency_after_ms", new)
    context.note(f"{a:,} → {b:,} parameters; {old:.2f} → {new:.2f} ms in PyTorch here, medians of {TIMED_RUNS} runs")
    if new > old:
        context.warn("the pruned model is not faster here; measure it on its targets (see their latency)")


def _latency(before: nn.Module, after: nn.Module, example: tuple[torch.Tensor, ...]) -> tuple[float, float]:
    """Median milliseconds of both, timed in turns so that a busy machine disturbs both alike."""
    import torch

    times: tuple[list[float], list[float]] = ([], [])
    with torch.no_grad():
        for i in range(TIMED_RUNS + 3):
            for module, taken in zip((before, after), times, strict=True):
                start = time.perf_counter()
                module(*example)
                if i >= 3:
                    taken.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[0]), statistics.median(times[1])


def _fine_tune(model: Model, before: nn.Module, options: FineTuneOptions, remask: Any, context: Context) -> None:
    from .distill import distillation_loss, frozen
    from .training import train

    loss = None
    if options.alpha > 0:
        loss = distillation_loss(frozen(before), model.task, temperature=options.temperature, alpha=options.alpha)
    history = train(
        model.module,
        model.task,
        loss=loss,
        context=context,
        name="fine-tune",
        after_step=remask,
        **options.arguments(),
    )
    context.note(f"fine-tuned {options.epochs} epochs; mean loss {history.losses[0]:.3f} → {history.losses[-1]:.3f}")
