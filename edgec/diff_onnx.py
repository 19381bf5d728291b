"""Every intermediate tensor of an ONNX graph, by ONNX Runtime at BASIC with all of them made outputs."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgec.golden import OnnxRunner
from edgec.inspection.facts import damaged

Arrays = dict[str, np.ndarray]

# Their results are integers that stand for floats; DequantizeLinear shows them as those.
_HIDDEN = ("QuantizeLinear", "DynamicQuantizeLinear")


class OnnxTracer(OnnxRunner):
    """An OnnxRunner that can also show its intermediate tensors."""

    def __init__(self, paths: Mapping[str, Path], *, level: str = "basic", threads: int = 0) -> None:
        try:
            super().__init__(paths, level=level, threads=threads)
        except Exception as cause:  # ONNX Runtime raises a class of its own for each of its status codes
            raise damaged(next(iter(paths.values())), "an ONNX model that ONNX Runtime can run", cause) from cause
        self.paths = paths
        self.level = level
        self._tracing: dict[str, tuple[Any, list[str]]] = {}

    def trace(self, signature: str, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Every tensor that a node of the main graph computes, in order; integers of quantised tensors are left out."""
        session, names = self._session(signature)
        wanted = {i.name for i in session.get_inputs()}
        values = session.run(names, {k: v for k, v in inputs.items() if k in wanted})
        return {n: v for n, v in zip(names, values, strict=True) if isinstance(v, np.ndarray)}

    def _session(self, signature: str) -> tuple[Any, list[str]]:
        import onnx
        import onnxruntime

        if signature not in self._tracing:
            path = self.paths[signature]
            model = onnx.load(str(path), load_external_data=False)
            names = traced_names(model.graph)
            known = {o.name for o in model.graph.output}
            model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(n) for n in names if n not in known)
            options = onnxruntime.SessionOptions()
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
            external = any(t.external_data for t in model.graph.initializer)
            with tempfile.TemporaryDirectory(dir=path.parent if external else None) as folder:
                # Weights outside of the file are named relative to it, hence the links.
                for name in {e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"}:
                    (Path(folder) / name).hardlink_to(path.parent / name)
                probe = Path(folder) / "trace.onnx"
                onnx.save(model, str(probe))
                session = onnxruntime.InferenceSession(str(probe), options, providers=["CPUExecutionProvider"])
            self._tracing[signature] = session, names
        return self._tracing[signature]


def traced_names(graph: Any) -> list[str]:
    """Outputs of the graph's nodes, in order, without constants and quantised integers."""
    return [name for node in graph.node if node.op_type not in ("Constant", *_HIDDEN) for name in node.output if name]


def graph_facts(path: Path) -> tuple[dict[str, tuple[str, ...]], dict[str, str], dict[str, float]]:
    """`(inputs_of, ops, steps)` of an ONNX file: what each tensor is computed from, by what, its step."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(str(path), load_external_data=False).graph
    constants = {t.name: t for t in graph.initializer if not t.external_data}
    constants |= {
        n.output[0]: a.t for n in graph.node if n.op_type == "Constant" for a in n.attribute if a.name == "value"
    }
    inputs_of, ops, steps = {}, {}, {}
    for node in graph.node:
        for name in node.output:
            inputs_of[name] = tuple(i for i in node.input if i)
            ops[name] = node.op_type
        if node.op_type == "DequantizeLinear" and node.input[1] in constants:
            scale = numpy_helper.to_array(constants[node.input[1]])
            if scale.size == 1:
                steps[node.output[0]] = float(scale.reshape(()))
    return inputs_of, ops, steps
