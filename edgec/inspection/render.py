"""An inspection as tables for a terminal."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from edgec.inspection.facts import Graph, Inspection, Port
from edgec.units import format_bytes

_OPS_SHOWN = 24


def render(found: Inspection) -> Group:
    """Everything about one file, or about each part of a folder."""
    parameters = f", {found.parameters:,} parameters" if found.parameters else ""
    parts: list[Text | Table | Group] = [
        Text(f"{found.path}: {found.format}, {format_bytes(found.bytes)} ({found.bytes:,} bytes){parameters}", "bold")
    ]
    parts += [block for graph in found.graphs for block in _graph(graph)]
    if found.weights:
        table = _table("weights", ("dtype", "tensors", "parameters", "bytes"))
        for w in found.weights:
            table.add_row(w.dtype, f"{w.tensors:,}", f"{w.parameters:,}", f"{w.bytes:,}")
        parts.append(table)
    if found.quantized:
        table = _table("quantised", ("what", "dtype", "how", "tensors", "parameters", "scales"))
        for q in found.quantized:
            scales = "–" if q.least_scale is None else f"{q.least_scale:.3g} … {q.greatest_scale:.3g}"
            table.add_row(
                q.what, q.dtype, q.granularity, f"{q.tensors:,}", f"{q.parameters:,}" if q.parameters else "–", scales
            )
        parts.append(table)
    elif not found.parts and found.format in ("onnx", "tflite", "coreml", "gguf"):
        parts.append(Text("quantised: nothing"))
    if found.metadata:
        table = _table("metadata", ("key", "value"))
        for key, value in found.metadata.items():
            table.add_row(key, value if len(value) <= 100 else f"{value[:97]}…")
        parts.append(table)
    for part in found.parts:
        parts += [Text(""), render(part)]
    return Group(*parts)


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in columns:
        number = column in ("tensors", "parameters", "bytes", "count")
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def _graph(graph: Graph) -> list[Text | Table]:
    table = _table(
        f"{graph.name}: {graph.op_count:,} operations" if graph.ops else graph.name,
        ("", "name", "shape", "dtype", "quantised"),
    )
    for kind, ports in (("input", graph.inputs), ("output", graph.outputs)):
        for port in ports:
            table.add_row(kind, port.name, _shape(port), port.dtype, _scale(port))
    blocks: list[Text | Table] = [table]
    if graph.ops:
        shown = list(graph.ops.items())[:_OPS_SHOWN]
        rest = len(graph.ops) - len(shown)
        line = ", ".join(f"{name} × {count}" for name, count in shown) + (f", and {rest} kinds more" if rest else "")
        blocks.append(Text(f"ops: {line}"))
    return blocks


def _shape(port: Port) -> str:
    return " × ".join(str(d) for d in port.shape) or "scalar"


def _scale(port: Port) -> str:
    return "" if port.scale is None else f"scale {port.scale:.4g}, zero point {port.zero_point or 0}"
