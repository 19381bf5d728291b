"""What is in a saved .mlpackage: operations by kind, read from its protobuf without loading weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgec.model import Quantization

# Operations that only move elements. A transpose around each convolution is the sign of a layout gone wrong.
LAYOUT_OPS = {"transpose", "space_to_depth", "depth_to_space", "pixel_shuffle", "batch_to_space", "space_to_batch"}
# Operations without arithmetic on activations: never "left in float".
NEUTRAL_OPS = LAYOUT_OPS | {
    *("const", "quantize", "dequantize", "cast", "identity", "read_state", "write_state", "reshape", "expand_dims"),
    *("squeeze", "slice_by_index", "slice_by_size", "slice_update", "concat", "split", "stack", "tile", "pad", "shape"),
    *("gather", "gather_nd", "gather_along_axis", "scatter", "scatter_nd", "scatter_along_axis", "select", "flatten2d"),
}
# Activations that Core ML fuses into the operation before them, so that one quantize serves both.
FUSED_OPS = {"relu", "relu6", "clip", "clamped_relu", "leaky_relu", "prelu"}
PRODUCTS = {"conv", "conv_transpose", "linear", "matmul"}


@dataclass(frozen=True)
class Node:
    """One operation of the protobuf: its kind and the names it reads and writes."""

    kind: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    reads_by_input: dict[str, tuple[str, ...]]


def count_operations(packages: dict[str, Path], quantization: Quantization | None) -> dict[str, int]:
    """Counts over the functions of each package once: ops, layout_ops and, for an INT8 program, float_ops.

    float_ops of a "static" program: arithmetic that doesn't stand between a dequantize and a quantize, directly or
    through activations that Core ML fuses. Of a "weight-only" program: products whose constant weight is in float.
    """
    counts = {"ops": 0, "layout_ops": 0, "quantize_ops": 0, "functions": 0}
    if quantization is not None:
        counts["float_ops"] = 0
    for path in sorted(set(packages.values())):
        for nodes in read_functions(path).values():
            kinds = [n.kind for n in nodes if n.kind != "const" and not n.kind.startswith("constexpr_")]
            counts["functions"] += 1
            counts["ops"] += len(kinds)
            counts["layout_ops"] += sum(k in LAYOUT_OPS for k in kinds)
            counts["quantize_ops"] += sum(k in ("quantize", "dequantize") for k in kinds)
            if quantization is not None:
                float_nodes = _float_arithmetic if quantization.scheme == "static" else _float_products
                counts["float_ops"] += len(float_nodes(nodes))
    return counts


def read_functions(package: Path) -> dict[str, list[Node]]:
    """The operations of each function of a saved package, in order."""
    from .coreml_import import import_coremltools

    import_coremltools()
    from coremltools.models.utils import load_spec

    program = load_spec(str(package)).mlProgram
    functions = {}
    for name, function in program.functions.items():
        block = function.block_specializations[function.opset]
        functions[name] = [_node(op) for op in block.operations]
    return functions


def _node(op: Any) -> Node:
    reads = {
        key: tuple(b.name for b in argument.arguments if b.WhichOneof("binding") == "name")
        for key, argument in op.inputs.items()
    }
    return Node(op.type, tuple(n for names in reads.values() for n in names), tuple(o.name for o in op.outputs), reads)


def _float_arithmetic(nodes: list[Node]) -> list[Node]:
    """Arithmetic of a static INT8 function that an INT8 kernel can't take."""
    makers = {name: node for node in nodes for name in node.writes}
    users: dict[str, list[Node]] = {}
    for node in nodes:
        for name in node.reads:
            users.setdefault(name, []).append(node)

    def constant(name: str) -> bool:
        maker = makers.get(name)
        return maker is not None and (maker.kind == "const" or maker.kind.startswith("constexpr_"))

    def fed(node: Node) -> bool:
        for name in node.reads:
            maker = makers.get(name)
            if constant(name) or (maker is not None and maker.kind == "dequantize"):
                continue
            if maker is None or not (node.kind in FUSED_OPS and maker.kind not in NEUTRAL_OPS and fed(maker)):
                return False
        return True

    def drained(node: Node) -> bool:
        consumers = [user for name in node.writes for user in users.get(name, [])]
        return bool(consumers) and all(
            user.kind == "quantize" or (user.kind in FUSED_OPS and drained(user)) for user in consumers
        )

    arithmetic = [n for n in nodes if n.kind not in NEUTRAL_OPS and not n.kind.startswith("constexpr_")]
    return [n for n in arithmetic if not (fed(n) and drained(n))]


def _float_products(nodes: list[Node]) -> list[Node]:
    """Products whose weight is a plain constant."""
    plain = {name for node in nodes if node.kind == "const" for name in node.writes}
    return [
        n
        for n in nodes
        if n.kind in PRODUCTS and any(w in plain for k in ("weight", "y") for w in n.reads_by_input.get(k, ()))
    ]
