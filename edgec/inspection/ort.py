"""ONNX Runtime's own flatbuffer format (.ort): what its session says, since the format's schema is not published."""

from __future__ import annotations

from pathlib import Path

from edgec.errors import ToolMissing
from edgec.inspection.facts import Graph, Inspection, Port, damaged, size_of


def inspect_ort(path: Path) -> Inspection:
    """Inputs, outputs and metadata of an ORT-format file; its operations are not listed.

    Raises:
        SourceError: it isn't an ORT-format file, or is truncated.
        ToolMissing: ONNX Runtime isn't here.
    """
    with path.open("rb") as file:
        if file.read(8)[4:8] != b"ORTM":
            raise damaged(path, "an ORT-format model", "its identifier ORTM is missing")
    try:
        import onnxruntime
    except ImportError as cause:
        raise ToolMissing("reading ORT-format files needs onnxruntime", hint="pip install onnxruntime") from cause
    onnxruntime.set_default_logger_severity(4)
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as cause:
        raise damaged(path, "an ORT-format model", cause) from cause

    def port(value: onnxruntime.NodeArg) -> Port:
        shape = tuple(d if isinstance(d, int | str) else "?" for d in value.shape)
        return Port(value.name, shape, value.type.removeprefix("tensor(").removesuffix(")"))

    meta = session.get_modelmeta()
    graph = Graph(meta.graph_name, tuple(map(port, session.get_inputs())), tuple(map(port, session.get_outputs())), {})
    metadata = {"producer": meta.producer_name, **meta.custom_metadata_map}
    return Inspection(str(path), "ort", size_of(path), (graph,), metadata=metadata)
