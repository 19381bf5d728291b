"""The layers of a quantised graph: their names, their quantized edges, and how to leave some of them in float.

A *layer* is an operator that reads dequantised tensors; its name is that of the module which owns its weight, or its
module's with the operator's name appended. An *edge* is one quantize node with the dequantize nodes that read it; it
belongs to the layer that produces it and to those that consume it, and stays as long as one of them does.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edgec.blame import module_name
from edgec.errors import RecipeError
from edgec.registry import suggest

from .quantize_quantizer import is_activation

if TYPE_CHECKING:
    import torch
    from torch.fx import GraphModule, Node


@dataclass
class Layer:
    """One quantised operator.

    Attributes:
        name: dotted, unique in the graph.
        op: the operator's name in ATen, e.g. conv2d, linear, add.
        types: what `exclude_types` may call it, in lower case: the operator, and the classes of its modules.
        weight: name of its weight's edge, or None.
        edges: names of all its edges (quantize nodes).
    """

    name: str
    op: str
    types: frozenset[str]
    weight: str | None = None
    edges: set[str] = field(default_factory=set)


def is_quantize(node: Node) -> bool:
    return node.op == "call_function" and "quantized_decomposed.quantize_per" in str(node.target)


def is_dequantize(node: Node) -> bool:
    return node.op == "call_function" and "quantized_decomposed.dequantize_per" in str(node.target)


def is_observer(node: Node) -> bool:
    """A range observer, or a fake quantiser, of a graph that is prepared and not yet converted."""
    return node.op == "call_module" and str(node.target).startswith("activation_post_process")


def _edge(node: Node) -> Node | None:
    """The edge that `node` reads a tensor from: its quantize node, or its observer."""
    if is_observer(node):
        return node
    return node.all_input_nodes[0] if is_dequantize(node) else None


def layers_of(module: GraphModule) -> list[Layer]:
    """The layers of a prepared or a converted (not folded) graph, in the order they run."""
    layers: dict[str, Layer] = {}
    by_node: dict[Node, Layer] = {}
    for node in module.graph.nodes:
        if node.op != "call_function" or is_quantize(node) or is_dequantize(node):
            continue
        edges = [e for e in map(_edge, node.all_input_nodes) if e is not None]
        if edges:
            weights = {e.name: w for e in edges if (w := _weight(e)) is not None}
            layer = _describe(node, next(iter(weights.values()), None), layers)
            layers[layer.name] = by_node[node] = layer
            layer.edges |= {e.name for e in edges}
            layer.weight = next(iter(weights), None)
    for node in module.graph.nodes:
        if (is_quantize(node) or is_observer(node)) and (producer := _producer(node.all_input_nodes[0], by_node)):
            producer.edges.add(node.name)
    return list(layers.values())


def _weight(edge: Node) -> Node | None:
    """The weight that an edge quantises, if it does: a constant, or (in QAT) one multiplied by BatchNorm's factor."""
    source = edge.all_input_nodes[0]
    if source.op == "call_function" and "aten.mul" in str(source.target):
        source = source.all_input_nodes[0]
    if source.op != "get_attr" or len(source.meta["val"].shape) < 2:
        return None
    return source


_TRANSPARENT = ("getitem", "batch_norm", "aten.div")


def _producer(node: Node, by_node: dict[Node, Layer]) -> Layer | None:
    """The layer that computes `node`, looking through what is fused to it: a clamp, and in QAT its BatchNorm."""
    while node not in by_node and (is_activation(node) or any(t in str(node.target) for t in _TRANSPARENT)):
        node = node.all_input_nodes[0]
    return by_node.get(node)


def _describe(node: Node, weight: Node | None, known: dict[str, Layer]) -> Layer:
    op = str(node.target).removeprefix("aten.").split(".")[0]
    owner = str(weight.target).rpartition(".")[0] if weight is not None else ""
    name = owner or ".".join(filter(None, (module_name(node), op)))
    unique, count = name, 1
    while unique in known:
        unique, count = f"{name}_{count}", count + 1
    stack = (node.meta.get("nn_module_stack") or {}).values()
    classes = {_class_name(cls) for _, cls in stack}
    return Layer(unique, op, frozenset({op.lower(), op.rstrip("123d_").lower()} | classes))


def _class_name(cls: object) -> str:
    """`Conv2d` of a class or of its dotted name, in lower case."""
    text = cls if isinstance(cls, str) else getattr(cls, "__qualname__", str(cls))
    return re.split(r"[.']", str(text).rstrip("'>"))[-1].lower()


def excluded_layers(
    layers: Iterable[Layer], names: Iterable[str], types: Iterable[str], other_ops: Iterable[str] = ()
) -> dict[str, str]:
    """`layer → why` for the layers that the recipe leaves in float.

    Args:
        names: globs of layer names, or of the names of modules that contain them.
        types: operator or class names.
        other_ops: operators of the graph that are never quantised: naming them changes nothing, and is no error.

    Raises:
        RecipeError: a name or a type fits no layer.
    """
    layers = list(layers)
    excluded: dict[str, str] = {}
    for pattern in names:
        fitting = [x for x in layers if any(fnmatch.fnmatchcase(p, pattern) for p in _prefixes(x.name))]
        if not fitting:
            known = [x.name for x in layers]
            raise RecipeError(
                f"quantize: `exclude: {pattern}` fits no layer{suggest(pattern, known)}",
                hint="layers: " + ", ".join(known[:12]) + (" …" if len(known) > 12 else ""),
            )
        excluded |= {x.name: f"exclude: {pattern}" for x in fitting}
    for wanted in types:
        fitting = [x for x in layers if wanted.lower() in x.types]
        if not fitting and wanted.lower() not in {o.lower() for o in other_ops}:
            known = sorted({t for x in layers for t in x.types})
            raise RecipeError(
                f"quantize: `exclude_types: {wanted}` fits no layer{suggest(wanted.lower(), known)}",
                hint="types: " + ", ".join(known),
            )
        excluded |= {x.name: f"exclude_types: {wanted}" for x in fitting}
    return excluded


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def edges_left_out(layers: Iterable[Layer], excluded: Iterable[str]) -> set[str]:
    """The edges that no remaining layer has."""
    out = set(excluded)
    gone: set[str] = set()
    kept: set[str] = set()
    for layer in layers:
        (gone if layer.name in out else kept).update(layer.edges)
    return gone - kept


def remove_edges(module: GraphModule, edges: set[str]) -> None:
    """Take quantize and dequantize nodes out of a graph: those tensors stay float."""
    for node in list(module.graph.nodes):
        if is_quantize(node) and node.name in edges:
            for dequantize in list(node.users):
                dequantize.replace_all_uses_with(node.all_input_nodes[0])
                module.graph.erase_node(dequantize)
            module.graph.erase_node(node)
    module.graph.lint()
    module.recompile()


def output_steps(module: GraphModule, names: Iterable[str]) -> tuple[tuple[str, float], ...]:
    """`(output name, quantisation step)` of each output of the graph that is quantised."""
    output = next(n for n in module.graph.nodes if n.op == "output")
    values: list[torch.fx.Node] = list(output.all_input_nodes)
    steps = []
    for name, value in zip(names, values, strict=False):
        if is_dequantize(value):
            steps.append((name, float(value.args[1])))  # type: ignore[arg-type]
    return tuple(steps)
