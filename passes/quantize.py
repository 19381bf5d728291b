"""Quantise a model to INT8: static W8A8 after training or with training in the loop, or weights only.

Scales and zero points are fixed here, once, and travel with the model as nodes and buffers of its graph. Targets
encode them and never calibrate again, so that an INT8 model is the same on every engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from edgec.golden import TorchRunner
from edgec.model import LayerScheme, Quantization
from edgec.registry import Options, register_pass

from .quantize_observers import Calibrator

if TYPE_CHECKING:
    import torch

    from edgec.context import Context
    from edgec.model import Model

    from .quantize_static import Calibrated


class QatOptions(Options):
    """Training with quantisation in the loop."""

    epochs: int = Field(2, ge=1, description="passes over the training data")
    lr: float = Field(1e-4, gt=0, description="the greatest learning rate; a tenth to a hundredth of the training's")
    freeze_batchnorm: int = Field(1, ge=0, description="last epochs in which BatchNorm's statistics no longer change")
    freeze_ranges: int = Field(1, ge=0, description="last epochs in which the ranges of activations no longer change")


class QuantizeOptions(Options):
    """What becomes INT8, and how its ranges are found."""

    scheme: Literal["static", "weight-only"] = Field(
        "static", description="static: weights and activations (convolutional networks); weight-only: language models"
    )
    calibrator: Calibrator = Field("mse", description="how an activation's range follows from what was seen of it")
    percentile: float = Field(99.99, gt=50, le=100, description="percent of the values that `percentile` keeps")
    exclude: tuple[str, ...] = Field((), description="layers left in float: globs of layer or module names")
    exclude_types: tuple[str, ...] = Field((), description="layers left in float: operators or module classes")
    embeddings: bool = Field(True, description="weight-only: embeddings become INT8, too; a tied head shares the table")
    extreme_constants: Literal["clip", "refuse"] = Field(
        "clip", description="constants like -1e38 in masks: clip them and name them, or refuse the model"
    )
    sensitivity: bool = Field(True, description="measure what each layer's quantisation costs")
    sensitivity_batches: int = Field(4, ge=1, description="calibration batches that sensitivity is measured on")
    max_drop: float | None = Field(
        None, ge=0, description="largest loss of the task's metric; sensitive layers are left in float until it holds"
    )
    max_trials: int = Field(8, ge=1, description="evaluations that the search for `max_drop` may take")
    samples: int | None = Field(None, ge=1, description="evaluation samples for `max_drop` and QAT; all by default")
    qat: QatOptions | None = Field(None, description="train with quantisation in the loop; PTQ is reported beside it")

    @model_validator(mode="after")
    def _consistent(self) -> QuantizeOptions:
        if self.qat is not None and self.scheme != "static":
            raise ValueError("`qat` needs `scheme: static`")
        return self


@register_pass("quantize")
def quantize(model: Model, options: QuantizeOptions, context: Context) -> Model:
    """Static INT8 or INT8 weights, as the options say."""
    if options.scheme == "weight-only":
        return _weight_only(model, options, context)
    return _static(model, options, context)


class _Metric:
    """The task's metric of candidate models against the float model's."""

    def __init__(self, model: Model, options: QuantizeOptions) -> None:
        self.task, self.samples = model.task, options.samples
        self.reference: Any = self.task.reference(self._runner(model.module)) or None
        self.float_value = self(model.module)

    def _runner(self, module: torch.nn.Module) -> TorchRunner:
        signatures = self.task.signatures(module)
        return TorchRunner({s.name: self.task.bind(module, s) for s in signatures}, signatures)

    def __call__(self, module: torch.nn.Module) -> float:
        return self.task.evaluate(self._runner(module), self.reference, limit=self.samples)[self.task.metric]

    def drop(self, module: torch.nn.Module) -> float:
        """How much worse than the float model, in the metric's own unit; negative when better."""
        sign = 1 if self.task.higher_is_better else -1
        return sign * (self.float_value - self(module))


def _static(model: Model, options: QuantizeOptions, context: Context) -> Model:
    from .quantize_layers import excluded_layers
    from .quantize_size import compare_size, predicted_bytes, state_bytes
    from .quantize_static import calibrate, folded_bytes, single_signature, weight_shapes

    signature = single_signature(model.task, model.module)
    float_bytes = state_bytes(model.module)
    calibrated = calibrate(
        model.module,
        model.task,
        context,
        calibrator=options.calibrator,
        percentile=options.percentile,
        extreme=options.extreme_constants,
    )
    excluded = excluded_layers(calibrated.layers, options.exclude, options.exclude_types, calibrated.other_ops)
    metric = _Metric(model, options) if options.max_drop is not None or options.qat else None
    sensitivity = _sensitivity(calibrated, model, options, context)
    if options.max_drop is not None and metric is not None:
        order = sorted((x for x in sensitivity if x not in excluded), key=lambda x: sensitivity[x])
        drop = lambda names: metric.drop(calibrated.without({**excluded, **_why(names)}))  # noqa: E731
        excluded |= _why(_search(order, drop, options, context))
    module = calibrated.without(excluded)
    if options.qat is not None and metric is not None:
        from .quantize_qat import train_quantized

        context.metric(f"float_{model.task.metric}", metric.float_value)
        context.metric(f"ptq_{model.task.metric}", metric(module))
        calibrated = train_quantized(model, calibrated, excluded, options.qat, context)
        module = calibrated.without(excluded)
        context.metric(f"qat_{model.task.metric}", metric(module))
    quantization = calibrated.quantization(excluded, signature, module)
    _table(quantization, sensitivity, context)
    predicted = predicted_bytes(float_bytes, weight_shapes(module))
    compare_size(float_bytes, predicted, folded_bytes(module), context)
    return replace(model, module=module, quantization=quantization, metrics={})


def _sensitivity(calibrated: Calibrated, model: Model, options: QuantizeOptions, context: Context) -> dict[str, float]:
    """SQNR in dB by layer; empty when nobody asked."""
    from .quantize_sensitivity import layer_sqnr

    if not options.sensitivity and options.max_drop is None:
        return {}
    batches = list(islice(model.task.calibration(), options.sensitivity_batches))
    candidates = [x for x in calibrated.layers if x.name not in calibrated.float_layers]
    return layer_sqnr(calibrated.module, candidates, batches, context)


def _why(names: Sequence[str]) -> dict[str, str]:
    return dict.fromkeys(names, "max_drop")


def _search(order: list[str], drop: Any, options: QuantizeOptions, context: Context) -> list[str]:
    from .quantize_sensitivity import search

    assert options.max_drop is not None
    left, trials = search(order, drop, max_drop=options.max_drop, max_trials=options.max_trials, context=context)
    context.table("Search for max_drop", ("layers in float", "drop"), [(t.float_layers, t.drop) for t in trials])
    best = next(t.drop for t in trials if t.float_layers == len(left))
    if best > options.max_drop:
        context.warn(
            f"max_drop {options.max_drop:g} was not reached in {len(trials)} trials: "
            f"the drop is {best:.4g} with {len(left)} layers in float"
        )
    elif left:
        context.note(f"{len(left)} of {len(order)} layers stay in float for a drop of {best:.4g}")
    return left


def _table(quantization: Quantization, sensitivity: dict[str, float], context: Context) -> None:
    rows = [
        (x.name, x.op, x.dtype if x.dtype == "int8" else f"float ({x.reason})", round(sensitivity[x.name], 1))
        for x in quantization.layers
        if x.name in sensitivity
    ]
    if rows:
        rows.sort(key=lambda row: row[3])
        context.table("Sensitivity: output SQNR with only that layer in INT8", ("layer", "op", "as", "dB"), rows)
    floats = sum(x.dtype != "int8" for x in quantization.layers)
    context.note(f"{len(quantization.layers) - floats} layers in INT8, {floats} left in float")


def _weight_only(model: Model, options: QuantizeOptions, context: Context) -> Model:
    import copy

    from .quantize_layers import Layer, excluded_layers
    from .quantize_size import compare_size, predicted_bytes, state_bytes
    from .quantize_weights import quantizable, quantize_layers, shapes_once, weight_sqnr

    candidates = quantizable(model.module, embeddings=options.embeddings)
    layers = [
        Layer(name, type(m).__name__.lower(), frozenset({type(m).__name__.lower()})) for name, m in candidates.items()
    ]
    excluded = excluded_layers(layers, options.exclude, options.exclude_types)
    sensitivity = weight_sqnr(candidates) if options.sensitivity or options.max_drop is not None else {}

    def without(names: dict[str, str]) -> torch.nn.Module:
        module = copy.deepcopy(model.module)
        quantize_layers(module, [name for name in candidates if name not in names])
        return module

    if options.max_drop is not None:
        metric = _Metric(model, options)
        order = sorted((x for x in sensitivity if x not in excluded), key=lambda x: sensitivity[x])
        drop = lambda names: metric.drop(without({**excluded, **_why(names)}))  # noqa: E731
        excluded |= _why(_search(order, drop, options, context))
    module = without(excluded)
    schemes = tuple(
        LayerScheme(x.name, x.op, "float32", None, excluded[x.name])
        if x.name in excluded
        else LayerScheme(x.name, x.op, "int8", 0)
        for x in layers
    )
    quantization = Quantization("weight-only", schemes)
    _table(quantization, sensitivity, context)
    predicted = predicted_bytes(state_bytes(model.module), shapes_once(candidates, excluded))
    compare_size(state_bytes(model.module), predicted, state_bytes(module), context)
    return replace(model, module=module, quantization=quantization, metrics={})
