"""Post-training static INT8 (W8A8): capture, calibrate, convert. Scales and zero points are fixed here, once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgec.blame import source_line
from edgec.errors import ConversionError, Reason, SourceError
from edgec.graphs import capture_batch, settle
from edgec.model import LayerScheme, Quantization

from . import quantize_constants as constants
from .quantize_layers import Layer, edges_left_out, is_quantize, layers_of, output_steps, remove_edges
from .quantize_observers import Calibrator
from .quantize_quantizer import quantizer

if TYPE_CHECKING:
    import torch
    from torch.fx import GraphModule

    from edgec.context import Context
    from edgec.model import Signature
    from edgec.tasks.base import Task


@dataclass
class Calibrated:
    """A converted graph with every edge quantised, and what is known about it.

    Attributes:
        module: quantize and dequantize nodes around every layer; `without` gives a copy with some left out.
        layers: its layers.
        float_layers: layers that must stay float whatever the recipe says, with the reason.
        other_ops: operators of the graph that are not quantised at all.
        clipped: whether extreme constants were clipped.
    """

    module: GraphModule
    layers: list[Layer]
    float_layers: dict[str, str]
    other_ops: frozenset[str]
    clipped: bool

    def without(self, excluded: dict[str, str]) -> GraphModule:
        """A copy in which the excluded layers compute in float."""
        import copy

        module = copy.deepcopy(self.module)
        remove_edges(module, edges_left_out(self.layers, {**excluded, **self.float_layers}))
        module.graph.eliminate_dead_code()
        module.recompile()
        return settle(module)

    def quantization(self, excluded: dict[str, str], signature: Signature, module: GraphModule) -> Quantization:
        """What the Program says about this model."""
        reasons = {**excluded, **self.float_layers}
        schemes = tuple(
            LayerScheme(x.name, x.op, "float32", None, reasons[x.name])
            if x.name in reasons
            else LayerScheme(x.name, x.op, "int8", 0 if x.weight else None)
            for x in self.layers
        )
        return Quantization("static", schemes, output_steps(module, [t.name for t in signature.outputs]))


def single_signature(task: Task, module: torch.nn.Module) -> Signature:
    """The task's only signature.

    Raises:
        ConversionError: there are several, or one carries state: static INT8 fixes the ranges of one graph.
    """
    signatures = task.signatures(module)
    if len(signatures) != 1 or signatures[0].state:
        raise ConversionError(
            f"task `{task.kind}` has {len(signatures)} signatures or state: static INT8 needs one graph without state",
            hint="use `quantize: {scheme: weight-only}`",
            reason=Reason.UNSUPPORTED_SCHEME,
        )
    return signatures[0]


def calibrate(
    module: torch.nn.Module,
    task: Task,
    context: Context,
    *,
    calibrator: Calibrator,
    percentile: float,
    extreme: str,
) -> Calibrated:
    """Run the task's calibration data through observers and convert.

    Raises:
        SourceError: there is no calibration data (`empty-data`).
        ConversionError: extreme constants, when they are to be refused; NaN in an activation.
    """
    import torch
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    signature = single_signature(task, module)
    graph = capture_batch(task.bind(module, signature), task.example(signature), signature).module(check_guards=False)
    found = handle_constants(graph, context, extreme)
    prepared = prepare_pt2e(graph, quantizer(calibrator=calibrator, percentile=percentile, qat=False))
    count, started = 0, time.monotonic()
    with torch.no_grad():
        for batch in task.calibration():
            prepared(*batch)
            count += 1
            context.progress(count, 0, f"calibrating: {count / (time.monotonic() - started):.1f} batches/s")
    if count == 0:
        raise SourceError(
            "quantize: the calibration set is empty", hint="give the task calibration data", reason=Reason.EMPTY_DATA
        )
    context.note(f"calibrated ({calibrator}) on {count} batches")
    extremes = check_ranges(prepared)
    converted = convert_pt2e(prepared, fold_quantize=False)
    carrying = {n.name for n in converted.graph.nodes if is_quantize(n) and n.all_input_nodes[0].name in extremes}
    float_layers = {x.name: "carries an extreme constant" for x in layers_of(converted) if x.edges & carrying}
    for name in float_layers:
        context.warn(f"`{name}` is left in float: it carries values beyond ±{constants.LIMIT:g}")
    return describe(converted, float_layers, clipped=bool(found))


def describe(module: GraphModule, float_layers: dict[str, str], *, clipped: bool) -> Calibrated:
    """What `Calibrated` says about a converted graph."""
    ops = {str(n.target).removeprefix("aten.").split(".")[0] for n in module.graph.nodes if n.op == "call_function"}
    return Calibrated(module, layers_of(module), float_layers, frozenset(ops), clipped)


def handle_constants(graph: GraphModule, context: Context, extreme: str) -> list[constants.ExtremeConstant]:
    """Find extreme constants, and clip or refuse them."""
    found = constants.find_extreme(graph)
    if found and extreme == "refuse":
        constants.refuse(found)
    for c in found:
        context.warn(f"constant {c.value:g} at {c.where or c.name} was clipped to ±{constants.LIMIT:g}")
    if found:
        constants.clip_extreme(graph)
    return found


def check_ranges(prepared: Any) -> set[str]:
    """Names of the nodes whose values reach ±LIMIT.

    Raises:
        ConversionError: an activation is NaN or infinite.
    """
    extremes = set()
    modules = dict(prepared.named_modules())
    for node in prepared.graph.nodes:
        observer = modules.get(str(node.target)) if node.op == "call_module" else None
        if observer is None or not hasattr(observer, "greatest"):
            continue
        source = node.all_input_nodes[0]
        if not observer.finite:
            raise ConversionError(
                f"quantize: `{source.name}` ({source_line(source)}) is NaN or infinite on calibration data",
                hint="look for a division by zero in the model, or for NaN in the data",
                reason=Reason.NOT_FINITE,
            )
        if max(-observer.least, observer.greatest) >= constants.LIMIT:
            extremes.add(source.name)
    return extremes


def weight_shapes(module: GraphModule) -> list[tuple[int, ...]]:
    """Shapes of the weights of a converted graph that will be INT8 constants."""
    weights = [n.all_input_nodes[0] for n in module.graph.nodes if is_quantize(n)]
    return [tuple(_tensor(module, str(w.target)).shape) for w in weights if w.op == "get_attr"]


def folded_bytes(module: GraphModule) -> int:
    """Bytes of a converted graph's constants once `weight → quantize` is folded to INT8."""
    weights = {str(n.all_input_nodes[0].target) for n in module.graph.nodes if is_quantize(n)}
    used = {str(n.target) for n in module.graph.nodes if n.op == "get_attr"}
    tensors = {name: _tensor(module, name) for name in used}
    return sum(t.numel() * (1 if name in weights else t.element_size()) for name, t in tensors.items())


def _tensor(module: GraphModule, name: str) -> torch.Tensor:
    owner, _, leaf = name.rpartition(".")
    tensor: torch.Tensor = getattr(module.get_submodule(owner), leaf)
    return tensor
