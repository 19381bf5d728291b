"""ExportedProgram → ONNX: names, rewrites that are known to be right, deterministic bytes, external data when large."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgec.blame import blame_onnx
from edgec.errors import ConversionError, Reason

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch.export import ExportedProgram

    from edgec.model import Signature

WEIGHTS = "program.weights"  # external data of all signatures of a program: equal tensors are stored once
_ALIGN = 4096  # offsets that may be mapped into memory on every platform's page size up to 4 kB


@dataclass
class ExternalWeights:
    """One file of weights for several ONNX models in `folder`; equal tensors are written once."""

    folder: Path
    offsets: dict[str, int] = field(default_factory=dict)

    def place(self, tensor: Any) -> ir.ExternalTensor:
        """Write the bytes of `tensor` unless they are there already; gives the reference to them."""
        import onnx_ir as ir

        data = tensor.tobytes()
        digest = hashlib.sha256(data).hexdigest()
        with (self.folder / WEIGHTS).open("ab") as file:
            if digest not in self.offsets:
                file.write(b"\0" * (-file.tell() % _ALIGN))
                self.offsets[digest] = file.tell()
                file.write(data)
        return ir.ExternalTensor(
            WEIGHTS,
            self.offsets[digest],
            len(data),
            tensor.dtype,
            name=tensor.name,
            shape=tensor.shape,
            base_dir=self.folder,
        )


def write_onnx(
    program: ExportedProgram,
    signature: Signature,
    path: Path,
    *,
    opset: int,
    external_over: int,
    weights: ExternalWeights,
) -> None:
    """Translate a (folded) program and write `path`, checked by onnx.checker.

    Args:
        program: as `export_graph.fold` gives it.
        external_over: bytes of weights from which on they go to `weights` and not into `path` (protobuf ends at 2 GB).

    Raises:
        ConversionError: an op has no ONNX form (the message names it and its source line), or the checker refuses the
            result.
    """
    model = _translate(program, signature, opset)
    simplify(model)
    transpose_quantized_weights(model)
    _strip(model)
    _save(model, path, external_over, weights)
    check(path)


def _translate(program: ExportedProgram, signature: Signature, opset: int) -> ir.Model:
    import onnx_ir as ir
    import torch

    try:
        # optimize=False: torch's own pass includes a rewrite that drops needed reshapes; `simplify` runs the others.
        result = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=opset,
            optimize=False,
            verbose=False,
            input_names=[t.name for t in signature.inputs],
            output_names=[t.name for t in signature.outputs],
        )
    except torch.onnx.errors.OnnxExporterError as error:
        raise blame_onnx(program, signature.name, error) from error
    assert result is not None
    model: ir.Model = result.model
    got = model.opset_imports.get("")
    if got != opset:
        raise ConversionError(
            f"signature `{signature.name}`: an operator has no opset {opset} form (the exporter stayed at opset {got})",
            hint=f"set `export: {{opset: {got}}}`",
            reason=Reason.EXPORT_FAILED,
        )
    values, tensors = [*model.graph.inputs, *model.graph.outputs], [*signature.inputs, *signature.outputs]
    for value, tensor in zip(values, tensors, strict=True):
        value.shape = ir.Shape(tensor.shape)
    return model


class _AtItsOperator:
    """A rewrite rule that is only tried at nodes of its pattern's own operator.

    onnxscript sets up a match for each rule at each node: half the time of an export of 30 layers.
    """

    def __init__(self, rule: Any) -> None:
        self.rule = rule
        pattern = rule._target_pattern
        root = pattern.output_node.op_identifier() if pattern.has_single_output_node else None
        self.op_type: str | None = root[1] if root is not None else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rule, name)

    def try_rewrite(self, model: ir.Model, graph: Any, node: ir.Node, **options: Any) -> Any:
        if self.op_type is not None and node.op_type != self.op_type:
            return None
        return self.rule.try_rewrite(model, graph, node, **options)


def _rules() -> list[Any]:
    """onnxscript's default rewrites, without `_broadcast_to_matmul`.

    That rule drops Reshapes that a static-shape grouped-query attention block needs, and the model is silently wrong
    (onnxscript 0.7.2; parity after export would refuse the model).
    """
    from onnxscript import rewriter
    from onnxscript.rewriter.rules.common import _broadcast_to_matmul

    wrong = set(map(id, _broadcast_to_matmul.rules))
    return [_AtItsOperator(r) for r in rewriter._DEFAULT_REWRITE_RULES if id(r) not in wrong]


def simplify(model: ir.Model) -> None:
    """Fold constants, apply the safe rewrites, remove what is unused; INT8 weights stay behind DequantizeLinear."""
    import onnx_ir as ir
    import onnx_ir.passes.common as common
    from onnxscript import rewriter
    from onnxscript.optimizer import _constant_folding as folding

    def should_fold(node: ir.Node) -> bool | None:
        # Zero points come as int64 and are cast to INT8: fold that, however many channels there are.
        constant = all(i is not None and i.const_value is not None for i in node.inputs)
        return True if node.op_type == "Cast" and constant else None

    ir.passes.Sequential(
        common.InlinePass(),
        ir.passes.PassManager(
            [
                folding.FoldConstantsPass(
                    shape_inference=True,
                    input_size_limit=folding.DEFAULT_CONSTANT_FOLD_INPUT_SIZE_LIMIT,
                    output_size_limit=folding.DEFAULT_CONSTANT_FOLD_OUTPUT_SIZE_LIMIT,
                    should_fold=should_fold,
                ),
                rewriter.RewritePass(rewriter.RewriteRuleSet(_rules())),
                common.RemoveUnusedNodesPass(),
                common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
                common.RemoveUnusedOpsetsPass(),
            ],
            steps=2,
            early_stop=True,
        ),
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )(model)


def transpose_quantized_weights(model: ir.Model) -> None:
    """`INT8 weight → DequantizeLinear(axis 0) → Transpose` becomes `transposed INT8 weight → DequantizeLinear(axis 1)`.

    Otherwise every engine that does not fold a dequantised weight transposes it on each run: 28 million numbers for the
    head of a small language model. A table shared with a Gather (a tied head) gets a transposed copy of its own.
    """
    import numpy as np
    import onnx_ir as ir

    graph = model.graph
    for node in list(graph):
        if node.op_type != "Transpose" or list(node.attributes["perm"].as_ints()) != [1, 0]:
            continue
        dequantize = node.inputs[0].producer() if node.inputs[0] is not None else None
        if dequantize is None or dequantize.op_type != "DequantizeLinear":
            continue
        weight, *parameters = dequantize.inputs
        axis = dequantize.attributes.get_int("axis", 1)
        if weight is None or weight.const_value is None or weight.const_value.dtype != ir.DataType.INT8 or axis != 0:
            continue
        name = f"{weight.name}_transposed"
        if name not in graph.initializers:
            data = np.ascontiguousarray(weight.const_value.numpy().T)
            graph.register_initializer(ir.val(name, const_value=ir.tensor(data, name=name)))
        fresh = ir.node("DequantizeLinear", [graph.initializers[name], *parameters], {"axis": 1})
        fresh.name = f"{dequantize.name}_transposed"
        result, old = fresh.outputs[0], node.outputs[0]
        graph.insert_before(node, fresh)
        result.type, result.shape = old.type, old.shape
        old.replace_all_uses_with(result, replace_graph_outputs=True)
        graph.remove(node, safe=True)
        result.name = old.name
        if not dequantize.outputs[0].uses():
            graph.remove(dequantize, safe=True)
            if not weight.uses() and weight.name is not None:
                graph.initializers.pop(weight.name)


def _strip(model: ir.Model) -> None:
    """Drop stack traces and other metadata: they hold this machine's paths, and triple the size of a small model."""
    model.metadata_props.clear()
    model.doc_string = None
    graph = model.graph
    graph.metadata_props.clear()
    for value in [*graph.inputs, *graph.initializers.values()]:
        value.metadata_props.clear()
    for node in graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()


def _save(model: ir.Model, path: Path, external_over: int, weights: ExternalWeights) -> None:
    import onnx_ir as ir

    initializers = [v for v in model.graph.initializers.values() if v.const_value is not None]
    if sum(v.const_value.nbytes for v in initializers if v.const_value) > external_over:
        for value in initializers:
            assert value.const_value is not None
            if value.const_value.nbytes >= 1024:  # shapes and scales stay in the model, where tools look for them
                value.const_value = weights.place(value.const_value)
    ir.save(model, path)


def check(path: Path) -> None:
    """onnx.checker with type and shape inference.

    Raises:
        ConversionError: the graph is not valid ONNX.
    """
    import onnx

    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ConversionError(
            f"{path.name} is not valid ONNX: {str(error).strip().splitlines()[0]}",
            hint="this is a fault of the exporter or of a rewrite: please report it with the recipe",
            reason=Reason.EXPORT_FAILED,
        ) from error
