"""What `edgec diff` can run: a Program, an artefact, or a bare .onnx, .tflite or .mlpackage; each as a `Subject`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgec.diff_match import Trace
from edgec.errors import ConversionError, EdgecError, UsageError
from edgec.golden import Recording, zero_state
from edgec.model import Artifact, Program, Runner, Signature, TensorSpec

Arrays = dict[str, np.ndarray]
Facts = tuple[Mapping[str, tuple[str, ...]], Mapping[str, str], Mapping[str, float]]
NO_FACTS: Facts = ({}, {}, {})


@dataclass
class Subject:
    """One side of a diff.

    Attributes:
        label: the path as it was given.
        engine: what computes it.
        signatures: what it can run.
        runner: runs it; `trace` is used where it has one.
        facts: `(inputs_of, ops, steps)` of a signature's graph.
        output_tensors: which traced tensor each output is, where the names differ.
        program: whose recording it may be given.
    """

    label: str
    engine: str
    signatures: tuple[Signature, ...]
    runner: Runner
    facts: Callable[[str], Facts] = lambda signature: NO_FACTS
    output_tensors: Callable[[str], dict[str, str]] = lambda signature: {}
    recording: Path | None = None
    traces: bool = True

    def signature(self, name: str) -> Signature:
        """By name; a subject with one signature takes any name for it."""
        for signature in self.signatures:
            if signature.name == name:
                return signature
        if len(self.signatures) == 1:
            return self.signatures[0]
        raise UsageError(
            f"{self.label} has no signature `{name}`", hint=f"it has: {', '.join(s.name for s in self.signatures)}"
        )

    def trace(self, signature: Signature, inputs: Arrays) -> Trace:
        """Run one step and keep what can be seen of it."""
        named = self.output_tensors(signature.name)
        try:
            tensors: Arrays = self.runner.trace(signature.name, inputs) if self.traces else {}  # type: ignore[attr-defined]
            kept = signature.state_outputs if self.runner.stateful else frozenset()
            # Not twice where it isn't needed: an engine that keeps its state moves on with each run.
            if not all(named.get(o.name, o.name) in tensors for o in signature.outputs if o.name not in kept):
                tensors = {**tensors, **self.runner.run(signature.name, inputs)}
                named = {}
        except EdgecError:
            raise
        except Exception as cause:  # engines raise whatever they like
            said = str(cause).strip().splitlines()
            raise ConversionError(
                f"{self.label} can't be run by {self.engine}: {said[0] if said else type(cause).__name__}",
                hint="are its shapes those of the inputs? `edgec inspect` shows them",
            ) from cause
        outputs = {o.name: named.get(o.name, o.name) for o in signature.outputs if named.get(o.name, o.name) in tensors}
        inputs_of, ops, steps = self.facts(signature.name)
        return Trace(tensors, outputs, inputs_of, ops, steps)


def open_subject(path: Path) -> Subject:
    """Open one side of a diff.

    Raises:
        UsageError: a format that can't be run, or a bundle without saying which target.
        SourceError: a damaged file.
        ToolMissing: its engine isn't here.
    """
    from edgec.inspection.inspect import inspect_path

    if (path / "program.json").is_file():
        return _program(path)
    if (path / "artifact.json").is_file():
        return _artifact(path)
    if (path / "bundle.json").is_file():
        names = sorted(json.loads((path / "bundle.json").read_text()).get("targets", {}))
        raise UsageError(
            f"{path} is a bundle of several artefacts", hint="name one: " + ", ".join(str(path / n) for n in names)
        )
    found = inspect_path(path)
    openers = {"onnx": _onnx, "ort": _onnx, "tflite": _tflite, "coreml": _coreml}
    if found.format not in openers:
        raise UsageError(
            f"{path}: {found.format} files can't be run by themselves",
            hint="give the artefact's folder (it has an artifact.json), a Program, or an .onnx, .tflite or .mlpackage",
        )
    signatures = tuple(_signature(g) for g in found.graphs if g.outputs)
    return openers[found.format](path, signatures)


def _signature(graph: Any) -> Signature:
    """What an inspection says, as a Signature; integers that stand for floats are floats at the runner's edge."""

    def spec(port: Any) -> TensorSpec:
        dtype = "float32" if port.scale is not None or port.dtype in ("float16", "state float16") else port.dtype
        return TensorSpec(port.name, port.shape, dtype)

    inputs = tuple(spec(p) for p in graph.inputs if not p.dtype.startswith("state "))
    return Signature(graph.name, inputs, tuple(spec(p) for p in graph.outputs))


def _program(path: Path) -> Subject:
    from edgec.diff_onnx import OnnxTracer, graph_facts

    program = Program.open(path)
    tracer = OnnxTracer({s.name: program.onnx_path(s.name) for s in program.signatures})
    recording = path / "recording.safetensors"
    return Subject(
        str(path),
        "ONNX Runtime (basic)",
        program.signatures,
        tracer,
        lambda signature: graph_facts(program.onnx_path(signature)),
        recording=recording if recording.is_file() else None,
    )


def _onnx(path: Path, signatures: tuple[Signature, ...]) -> Subject:
    from edgec.diff_onnx import OnnxTracer, graph_facts

    tracer = OnnxTracer({signatures[0].name: path})
    if path.suffix == ".ort":
        return Subject(str(path), "ONNX Runtime", signatures, tracer, traces=False)
    return Subject(str(path), "ONNX Runtime (basic)", signatures, tracer, lambda signature: graph_facts(path))


def _tflite(path: Path, signatures: tuple[Signature, ...]) -> Subject:
    from edgec.diff_tflite import TfliteTracer, graph_facts

    main = signatures[0]  # further subgraphs are bodies of control flow, or further signatures: see artefacts
    tracer = TfliteTracer(path, 0, tuple(t.name for t in main.inputs), tuple(t.name for t in main.outputs))
    return Subject(
        str(path),
        "LiteRT",
        (main,),
        tracer,
        lambda signature: graph_facts(path, 0),
        lambda signature: tracer.output_tensors(),
    )


def _coreml(path: Path, signatures: tuple[Signature, ...]) -> Subject:
    from edgec.targets.coreml_runner import EvaluatorRunner

    runner = EvaluatorRunner({s.name: path for s in signatures}, signatures, False)
    return Subject(str(path), "the MIL evaluator", signatures, runner, _mil_facts(runner))


def _mil_facts(runner: Any) -> Callable[[str], Facts]:
    """Edges and operations of an evaluated program, off the evaluator's instructions."""

    def references(value: Any) -> list[str]:
        if isinstance(value, list):
            return [name for v in value for name in references(v)]
        return [value.name] if type(value).__name__ == "Ref" else []

    def facts(signature: str) -> Facts:
        functions = runner.evaluators[signature].functions
        function = functions.get(signature) or functions["main"]
        inputs_of: dict[str, tuple[str, ...]] = {}
        ops: dict[str, str] = {}
        for instruction in function.instructions:
            for output in instruction.outputs:
                inputs_of[output.name] = tuple(references(list(instruction.inputs.values())))
                ops[output.name] = instruction.kind
        return inputs_of, ops, {}

    return facts


def _artifact(path: Path) -> Subject:
    """An artefact through its target's own runner, with the graph's edges where its file has them."""
    from edgec import registry

    artifact = Artifact.open(path)
    runner = registry.get_target(artifact.target).open(artifact)
    facts: Callable[[str], Facts] = lambda signature: NO_FACTS  # noqa: E731
    if artifact.target == "coreml" and hasattr(runner, "evaluators"):
        facts = _mil_facts(runner)
    elif artifact.target == "tflite":
        facts = _tflite_facts(artifact.file("model"))
    elif artifact.target == "onnxruntime":
        from edgec.diff_onnx import OnnxTracer, graph_facts

        models = {name: path / file for name, file in artifact.details["models"].items()}
        runner = _Traced(runner, OnnxTracer(models))
        facts = lambda signature: graph_facts(models[signature])  # noqa: E731
    recordings = [path / f.name for f in artifact.files if f.role == "recording"]
    return Subject(
        str(path),
        artifact.target,
        artifact.signatures,
        runner,
        facts,
        recording=recordings[0] if recordings else None,
        traces=hasattr(runner, "trace"),
    )


class _Traced:
    """A runner without a trace of its own: outputs are its own, what lies between is a tracer's on the same file."""

    def __init__(self, runner: Runner, tracer: Any) -> None:
        self.runner, self.tracer = runner, tracer
        self.stateful = runner.stateful

    def run(self, signature: str, inputs: Mapping[str, np.ndarray]) -> Arrays:
        return self.runner.run(signature, inputs)

    def trace(self, signature: str, inputs: Mapping[str, np.ndarray]) -> Arrays:
        between: Arrays = self.tracer.trace(signature, inputs)
        return {**between, **self.runner.run(signature, inputs)}

    def reset(self) -> None:
        self.runner.reset()


def _tflite_facts(path: Path) -> Callable[[str], Facts]:
    from edgec.diff_tflite import graph_facts, tensor_names
    from edgec.inspection.tflite import open_tflite

    model = open_tflite(path)
    entries = {}
    for i in range(model.SignatureDefsLength()):
        entry = model.SignatureDefs(i)
        entries[entry.SignatureKey().decode()] = entry

    def facts(signature: str) -> Facts:
        entry = entries[signature]
        inputs_of, ops, steps = graph_facts(path, entry.SubgraphIndex())
        graph = model.Subgraphs(entry.SubgraphIndex())
        for i in range(entry.OutputsLength()):  # the runner gives outputs under the signature's names
            output = entry.Outputs(i)
            name, tensor = output.Name().decode(), tensor_names(graph)[output.TensorIndex()]
            if name not in ops:
                inputs_of[name], ops[name] = (tensor,), ops.get(tensor, "")
            if tensor in steps:
                steps.setdefault(name, steps[tensor])
        return inputs_of, ops, steps

    return facts


def random_inputs(signature: Signature, seed: int) -> Arrays:
    """Standard normal floats, and zeros and ones for integers (valid in any table); dynamic sizes are 1."""
    generator = np.random.default_rng(seed)
    feeds: Arrays = {}
    for spec in signature.inputs:
        if spec.name in signature.state_inputs:
            continue
        shape = tuple(d if isinstance(d, int) else 1 for d in spec.shape)
        if spec.dtype.startswith("float") or spec.dtype == "bfloat16":
            feeds[spec.name] = generator.standard_normal(shape).astype(spec.dtype)
        elif spec.dtype == "bool":
            feeds[spec.name] = generator.random(shape) < 0.5
        else:
            feeds[spec.name] = generator.integers(0, 2, shape).astype(spec.dtype)
    return feeds


def load_recording(path: Path) -> Recording:
    """A recording by its file, or by the folder of the Program that has it.

    Raises:
        UsageError: there is none, or it can't be read.
    """
    file = path / "recording.safetensors" if path.is_dir() else path
    try:
        return Recording.load(file)
    except Exception as cause:  # safetensors' own error class, a missing file, or foreign metadata
        raise UsageError(
            f"--recording {path}: no recording that can be read: {cause}",
            hint="a Program's folder has a recording.safetensors",
        ) from cause


def start_state(signature: Signature) -> Arrays:
    """Zero pools. Dynamic state does not occur: pools are sized when they are exported."""
    return zero_state(signature)
