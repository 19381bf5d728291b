"""A .tflite file by itself, with or without signatures: run, traced, and its graph."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgec.inspection.tflite import open_tflite

Arrays = dict[str, np.ndarray]


class TfliteTracer:
    """LiteRT over one subgraph of a file, without delegates (they hide what lies inside them). Float at the edge.

    `inputs` and `outputs` name the subgraph's tensors in order; `subgraph` is its index.
    """

    stateful = False

    def __init__(self, path: Path, subgraph: int, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
        from ai_edge_litert.interpreter import Interpreter, OpResolverType

        self.inputs, self.outputs, self.index = inputs, outputs, subgraph
        self.graph = open_tflite(path).Subgraphs(subgraph)
        self.names = tensor_names(self.graph)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.interpreter = Interpreter(
                str(path),
                experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
                experimental_preserve_all_tensors=True,
            )

    def run(self, signature: str, inputs: Mapping[str, np.ndarray]) -> Arrays:
        traced = self.trace(signature, inputs)
        return {name: traced[tensor] for name, tensor in self.output_tensors().items()}

    def output_tensors(self) -> dict[str, str]:
        return {n: self.names[int(self.graph.Outputs(i))] for i, n in enumerate(self.outputs)}

    def reset(self) -> None:
        """Nothing is kept between runs, but resource variables, which LiteRT starts anew."""
        if self.index == 0:
            self.interpreter.reset_all_variables()

    def trace(self, signature: str, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Every tensor that an operator computes, dequantised, in order; graph inputs that are outputs too, first."""
        from edgec.targets.tflite_runner import dequantize, quantize

        engine = self.interpreter
        details = engine.get_input_details()
        for detail, name in zip(details, self.inputs, strict=True):
            if tuple(detail["shape"]) != inputs[name].shape:
                engine.resize_tensor_input(detail["index"], inputs[name].shape)
        engine.allocate_tensors()
        for detail, name in zip(details, self.inputs, strict=True):
            engine.set_tensor(detail["index"], quantize(inputs[name], detail))
        engine.invoke()
        computed = [int(self.graph.Outputs(i)) for i in range(self.graph.OutputsLength())]
        order: dict[int, None] = {}
        for o in range(self.graph.OperatorsLength()):
            op = self.graph.Operators(o)
            order |= dict.fromkeys(int(op.Outputs(i)) for i in range(op.OutputsLength()))
        result: Arrays = {}
        for index in [i for i in computed if i not in order] + list(order):
            detail = engine._get_tensor_details(index, self.index)
            try:
                value = engine.get_tensor(index, self.index)
            except ValueError:
                continue  # a resource handle, or the output of an operator that was not taken: nothing to see
            result[self.names[index]] = dequantize(value, detail)
        return result


def tensor_names(graph: Any) -> list[str]:
    """Names of a subgraph's tensors, made unique."""
    names: list[str] = []
    seen: set[str] = set()
    for i in range(graph.TensorsLength()):
        name = (graph.Tensors(i).Name() or b"").decode(errors="replace")
        names.append(f"{name}#{i}" if name in seen or not name else name)
        seen.add(name)
    return names


def graph_facts(path: Path, subgraph: int) -> tuple[dict[str, tuple[str, ...]], dict[str, str], dict[str, float]]:
    """`(inputs_of, ops, steps)` of one subgraph, as for ONNX (see diff_onnx)."""
    from edgec.inspection.tflite import operator_name

    model = open_tflite(path)
    graph = model.Subgraphs(subgraph)
    names = tensor_names(graph)
    codes = [operator_name(model.OperatorCodes(i)) for i in range(model.OperatorCodesLength())]
    inputs_of, ops, steps = {}, {}, {}
    for o in range(graph.OperatorsLength()):
        op = graph.Operators(o)
        taken = tuple(names[int(op.Inputs(i))] for i in range(op.InputsLength()) if op.Inputs(i) >= 0)
        for i in range(op.OutputsLength()):
            name = names[int(op.Outputs(i))]
            inputs_of[name], ops[name] = taken, codes[op.OpcodeIndex()]
    for i, name in enumerate(names):
        quantization = graph.Tensors(i).Quantization()
        if quantization is not None and quantization.ScaleLength() == 1 and name in ops:
            steps[name] = float(quantization.Scale(0))
    return inputs_of, ops, steps
