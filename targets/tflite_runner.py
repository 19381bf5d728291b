"""Run a .tflite artefact on LiteRT, by the Signature's names, float at the edge."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from edgec.model import Artifact

Arrays = dict[str, np.ndarray]


class TfliteRunner:
    """LiteRT's interpreter, one signature runner per signature; they share the file's weights.

    `kernels` is "xnnpack" (what a phone's CPU runs) or "reference" (the plain kernels that define the operators).
    """

    stateful = False

    def __init__(self, artifact: Artifact, *, threads: int = 0) -> None:
        self._path = str(artifact.file("model"))
        self._signatures = {s.name: s for s in artifact.signatures}
        self._channels_last = frozenset(artifact.details["channels_last"])
        self._reference = artifact.details["kernels"] == "reference"
        self._threads = threads or len(os.sched_getaffinity(0))
        self._interpreter = self._open(trace=False)
        self._runners = {name: self._interpreter.get_signature_runner(name) for name in self._signatures}

    def _open(self, *, trace: bool) -> Any:
        from ai_edge_litert.interpreter import Interpreter, OpResolverType

        resolver = OpResolverType.AUTO
        if self._reference:
            resolver = OpResolverType.BUILTIN_REF
        elif trace:
            resolver = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES  # a delegate hides what lies inside it
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Interpreter(
                self._path,
                num_threads=self._threads,
                experimental_op_resolver_type=resolver,
                experimental_preserve_all_tensors=trace,
            )

    def run(self, signature: str, inputs: Mapping[str, np.ndarray]) -> Arrays:
        runner = self._runners[signature]
        spec = self._signatures[signature]
        results = runner(**self._feeds(runner, signature, inputs))
        details = runner.get_output_details()
        return {t.name: dequantize(results[t.name], details[t.name]).astype(t.dtype, copy=False) for t in spec.outputs}

    def _feeds(self, runner: Any, signature: str, inputs: Mapping[str, np.ndarray]) -> Arrays:
        details = runner.get_input_details()
        feeds = {}
        for t in self._signatures[signature].inputs:
            value = np.asarray(inputs[t.name])
            if t.name in self._channels_last:
                value = np.moveaxis(value, 1, -1)  # NCHW → NHWC
            feeds[t.name] = quantize(value, details[t.name])
        return feeds

    def reset(self) -> None:
        """Nothing is kept between runs."""

    def trace(self, signature: str, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Every tensor that an operator computes, dequantised, in the order of computation, by its name in the file."""
        from pathlib import Path

        from .tflite_schema import read, signature_graphs, tensor_name

        interpreter = self._open(trace=True)
        runner = interpreter.get_signature_runner(signature)
        runner(**self._feeds(runner, signature, inputs))
        index = runner._subgraph_index
        graph = signature_graphs(read(Path(self._path).read_bytes()))[signature]
        seen: Arrays = {}
        for op in graph.operators:
            for output in (int(o) for o in op.outputs):
                detail = interpreter._get_tensor_details(output, index)
                name = tensor_name(graph.tensors[output])
                key = name if name not in seen else f"{name}#{output}"
                seen[key] = dequantize(interpreter.get_tensor(output, index), detail)
        return seen


def quantize(value: np.ndarray, detail: dict[str, Any]) -> np.ndarray:
    """To a file tensor's type: by its scale and zero point when it is an integer that stands for a float."""
    wanted = np.dtype(detail["dtype"])
    scale, zero_point = detail["quantization"]
    if not scale or not np.issubdtype(wanted, np.integer) or not np.issubdtype(value.dtype, np.floating):
        return np.ascontiguousarray(value, wanted)
    limits = np.iinfo(wanted)
    steps: np.ndarray = np.rint(value / np.float32(scale)) + zero_point
    return steps.clip(limits.min, limits.max).astype(wanted)


def dequantize(value: np.ndarray, detail: dict[str, Any]) -> np.ndarray:
    """The float that a file tensor stands for; tensors without a scale are returned as they are."""
    scale, zero_point = detail["quantization"]
    if not scale or not np.issubdtype(value.dtype, np.integer):
        return value
    result: np.ndarray = (value.astype(np.float32) - zero_point) * np.float32(scale)
    return result
