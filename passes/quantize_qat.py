"""Quantisation-aware training: the forward pass rounds as the INT8 model will, gradients pass straight through.

Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference" (2018).
A convolution's weight is rounded as it will be once BatchNorm is folded into it, with BatchNorm's running statistics,
so that what is trained is what is converted. Statistics, then ranges, stand still in the last epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

from edgec.graphs import capture_batch

from .quantize_constants import clip_extreme
from .quantize_layers import edges_left_out, is_observer, layers_of
from .quantize_quantizer import quantizer
from .quantize_static import Calibrated, describe, single_signature

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from edgec.context import Context
    from edgec.model import Model

    from .quantize import QatOptions

PATTERN_EPS = 1e-5
"""The ε that torchao's BatchNorm patterns are written with, and convert with, whatever the model's own."""

FIRST_BATCHES = 8  # that set the ranges before training starts


def train_quantized(
    model: Model, ptq: Calibrated, excluded: dict[str, str], options: QatOptions, context: Context
) -> Calibrated:
    """Train a copy of `model` with its quantisation in the loop, and convert it. `model` itself is left alone.

    Args:
        ptq: the same model after post-training quantisation: says which layers must stay float.
        excluded: layers that the recipe leaves in float; they train in float.
    """
    import copy

    import torch
    from torchao.quantization.pt2e import disable_observer, enable_fake_quant, enable_observer
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e

    from .training import train

    signature = single_signature(model.task, model.module)
    module = copy.deepcopy(model.module).train()
    graph = capture_batch(model.task.bind(module, signature), model.task.example(signature), signature).module(
        check_guards=False
    )
    if ptq.clipped:  # they were reported when PTQ found them
        clip_extreme(graph)
    epsilons: dict[str, Any] = {str(n.args[4]): n.args[7] for n in _batchnorms(graph)}  # by running variance
    with _patterns_of(graph):
        prepared = prepare_qat_pt2e(graph, quantizer(calibrator="min-max", percentile=100, qat=True))
    _set_epsilon(prepared, epsilons)
    out = _fake_quantizers(prepared, edges_left_out(layers_of(prepared), {**excluded, **ptq.float_layers}))

    def rounding(on: bool) -> None:
        if on:
            prepared.apply(enable_fake_quant)
            for name in out:
                prepared.get_submodule(name).disable_fake_quant()
        else:
            for fake in map(prepared.get_submodule, _fake_quantizers(prepared)):
                fake.disable_fake_quant()

    _set_training(prepared, batchnorm=False, dropout=False)
    rounding(on=False)
    with torch.no_grad():
        for batch in islice(model.task.calibration(), FIRST_BATCHES):
            prepared(*batch)
    rounding(on=True)

    def before_epoch(epoch: int) -> None:
        batchnorm = epoch < options.epochs - options.freeze_batchnorm
        _set_training(prepared, batchnorm=batchnorm, dropout=True)
        prepared.apply(enable_observer if epoch < options.epochs - options.freeze_ranges else disable_observer)
        _observe_weights(prepared)

    history = train(
        prepared,
        model.task,
        epochs=options.epochs,
        lr=options.lr,
        context=context,
        name="qat",
        before_epoch=before_epoch,
        train_mode=lambda _: None,
        eval_mode=lambda _: _set_training(prepared, batchnorm=False, dropout=False),
    )
    context.note(f"QAT: loss {history.losses[0]:.4g} → {history.losses[-1]:.4g} over {len(history.losses)} epochs")
    prepared.apply(disable_observer)
    _observe_weights(prepared)
    with torch.no_grad():  # ranges of the weights as the last step left them
        prepared(*next(iter(model.task.calibration())))
    _absorb_epsilon(prepared, epsilons)
    with _patterns_of(prepared):
        converted = convert_pt2e(prepared, fold_quantize=False)
    return describe(converted, ptq.float_layers, clipped=ptq.clipped)


@contextmanager
def _patterns_of(module: GraphModule) -> Iterator[None]:
    """Make torchao look only for the kinds of convolution that the graph has.

    It captures over a hundred patterns for all four kinds, which takes longer than many a fine-tuning.
    """
    from torchao.quantization.pt2e import qat_utils

    kinds = {str(n.target).removeprefix("aten.").split(".")[0] for n in module.graph.nodes}
    names = ("_fold_conv_bn_qat_helper", "_fuse_conv_bn_qat_helper")
    originals = {name: getattr(qat_utils, name) for name in names}

    def only_used(original: Callable[..., Any]) -> Callable[..., Any]:
        def helper(graph: GraphModule, conv: Any, example: Any, is_cuda: bool) -> Any:
            return original(graph, conv, example, is_cuda=is_cuda) if conv.__name__ in kinds else graph

        return helper

    try:
        for name, original in originals.items():
            setattr(qat_utils, name, only_used(original))
        yield
    finally:
        for name, original in originals.items():
            setattr(qat_utils, name, original)


def _batchnorms(module: GraphModule) -> Iterator[Node]:
    import torch

    # args: input, weight, bias, running mean, running variance, training, momentum, ε, cuDNN
    return (n for n in module.graph.nodes if n.target == torch.ops.aten.batch_norm.default)


def _set_training(module: GraphModule, *, batchnorm: bool, dropout: bool) -> None:
    """Choose between batch and running statistics, and whether dropout drops: captured graphs have no `train()`."""
    import torch

    for node in _batchnorms(module):
        node.args = (*node.args[:5], batchnorm, *node.args[6:])
    for node in module.graph.nodes:
        if node.target in (torch.ops.aten.dropout.default, torch.ops.aten.dropout_.default):
            node.args = (*node.args[:2], dropout)
    module.recompile()


def _set_epsilon(module: GraphModule, epsilons: dict[str, Any]) -> None:
    """Give fused BatchNorms their own ε back, in the normalisation and in the factor on the weight."""
    import torch

    for node in _batchnorms(module):
        variance = node.args[4]
        node.args = (*node.args[:7], epsilons[str(variance)], *node.args[8:])
        for user in variance.users:  # type: ignore[union-attr]
            if user.target == torch.ops.aten.add.Tensor and user.args[1] == PATTERN_EPS:
                user.args = (variance, epsilons[str(variance)])
    module.recompile()


def _absorb_epsilon(module: GraphModule, epsilons: dict[str, Any]) -> None:
    """Move what an ε is above the pattern's into the running variance: conversion folds with the pattern's."""
    import torch

    with torch.no_grad():
        for node in _batchnorms(module):
            name = str(node.args[4].target)  # type: ignore[union-attr]
            module.get_buffer(name).add_(epsilons[str(node.args[4])] - PATTERN_EPS)


def _fake_quantizers(module: GraphModule, nodes: set[str] | None = None) -> list[str]:
    """Names of the fake-quantise modules at these observer nodes; at all of them by default."""
    return [str(n.target) for n in module.graph.nodes if is_observer(n) and (nodes is None or n.name in nodes)]


def _observe_weights(module: GraphModule) -> None:
    """Weights keep observing when activations no longer do: their range is a fact, not an estimate."""
    from torchao.quantization.pt2e.fake_quantize import FakeQuantizeBase

    for fake in module.modules():
        if isinstance(fake, FakeQuantizeBase) and fake.is_per_channel:
            fake.enable_observer()
