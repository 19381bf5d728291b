"""Which tensors are quantised, and how: litert-torch's PT2E annotation, per channel, with activations fused.

litert-torch's `PT2EQuantizer` gives the one set of parameters that PyTorch, ONNX, TFLite and TVM all compute alike. Two
things are added to it: ranges come from our streaming observers, and a ReLU6 (or any clamp) after a convolution is
quantised *with* it. Left alone, the convolution's output before the clamp gets a range of its own, which the clamp's
output shares: a range of −20…30 for values of 0…6 costs three of the eight bits.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from .quantize_observers import LEAST_STEP, Calibrator, range_observer

if TYPE_CHECKING:
    import torch
    from torch.fx import Node


@cache
def _activations() -> frozenset[Any]:
    import torch

    aten = torch.ops.aten
    return frozenset(
        {
            aten.relu.default,
            aten.relu_.default,
            aten.hardtanh.default,
            aten.hardtanh_.default,
            aten.relu6.default,
            aten.clamp.default,
            aten.clamp_.default,
        }
    )


def is_activation(node: Node) -> bool:
    """Whether a node is a clamp that an engine computes as part of the operator before it."""
    return node.op == "call_function" and node.target in _activations()


def quantizer(*, calibrator: Calibrator, percentile: float, qat: bool) -> Any:
    """A PT2E quantizer: activations per tensor (affine), weights per output channel (symmetric), static."""
    import torch
    from litert_torch.quantize.pt2e_quantizer import PT2EQuantizer, QuantizationConfig
    from torchao.quantization.pt2e.fake_quantize import FusedMovingAvgObsFakeQuantize
    from torchao.quantization.pt2e.observer import (
        MovingAverageMinMaxObserver,
        MovingAveragePerChannelMinMaxObserver,
        PerChannelMinMaxObserver,
    )
    from torchao.quantization.pt2e.quantizer import FixedQParamsQuantizationSpec, QuantizationSpec

    if qat:
        activation = FusedMovingAvgObsFakeQuantize.with_args(observer=MovingAverageMinMaxObserver, eps=LEAST_STEP)
        weight = FusedMovingAvgObsFakeQuantize.with_args(observer=MovingAveragePerChannelMinMaxObserver, eps=LEAST_STEP)
    else:
        activation = range_observer().with_args(  # type: ignore[attr-defined]
            calibrator=calibrator, percentile=percentile, eps=LEAST_STEP
        )
        weight = PerChannelMinMaxObserver.with_args(eps=LEAST_STEP)
    activation_spec = QuantizationSpec(
        dtype=torch.int8,
        quant_min=-128,
        quant_max=127,
        qscheme=torch.per_tensor_affine,
        observer_or_fake_quant_ctr=activation,
    )
    weight_spec = QuantizationSpec(
        dtype=torch.int8,
        quant_min=-127,
        quant_max=127,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
        observer_or_fake_quant_ctr=weight,
    )
    # TFLite's kernels of the logistic function and of softmax have this scale and zero point built in.
    fixed = FixedQParamsQuantizationSpec(
        dtype=torch.int8,
        scale=1 / 256,
        zero_point=-128,
        quant_min=-128,
        quant_max=127,
        qscheme=torch.per_tensor_affine,
    )
    config = QuantizationConfig(activation_spec, activation_spec, weight_spec, None, fixed, qat, False)
    return _fusing_quantizer(PT2EQuantizer)().set_global(config)


@cache
def _fusing_quantizer(base: type[Any]) -> type[Any]:
    from litert_torch.quantize.pt2e_quantizer_utils import propagate_annotation

    class FusingQuantizer(base):  # type: ignore[misc]
        """The base's annotations, then `fuse_activations`, then the sharing of parameters along reshapes."""

        STATIC_QAT_ONLY_OPS: tuple[str, ...] = ()  # convolution with BatchNorm: `annotate_batchnorm` does it

        def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
            if self.global_config.is_qat:
                annotate_batchnorm(model, self.global_config)
            self._annotate_for_static_quantization_config(model)
            fuse_activations(model)
            propagate_annotation(model)
            return model

    return FusingQuantizer


def annotate_batchnorm(model: torch.fx.GraphModule, config: Any) -> None:
    """Convolution → BatchNorm as one operator: only the BatchNorm's output is quantised (QAT; PTQ folds it before)."""
    from torchao.quantization.pt2e.quantizer import QuantizationAnnotation

    for norm in model.graph.nodes:
        if norm.op != "call_function" or "batch_norm" not in str(norm.target):
            continue
        conv = norm.args[0]
        if "aten.conv" not in str(conv.target) or len(conv.users) > 1:
            continue
        conv.meta["quantization_annotation"] = QuantizationAnnotation(
            input_qspec_map={conv.args[0]: config.input_activation, conv.args[1]: config.weight}, _annotated=True
        )
        norm.meta["quantization_annotation"] = QuantizationAnnotation(
            output_qspec=config.output_activation, _annotated=True
        )


def fuse_activations(model: torch.fx.GraphModule) -> None:
    """Move the output parameters of an annotated operator behind the clamp that is its only reader."""
    from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec

    for node in model.graph.nodes:
        if not is_activation(node):
            continue
        producer = node.args[0]
        annotation = producer.meta.get("quantization_annotation")
        if annotation is None or not isinstance(annotation.output_qspec, QuantizationSpec) or len(producer.users) > 1:
            continue
        node.meta["quantization_annotation"] = QuantizationAnnotation(
            output_qspec=annotation.output_qspec, _annotated=True
        )
        annotation.output_qspec = None
