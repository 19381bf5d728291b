"""The golden: what the exported program computes on recorded inputs, step by step.

A recording is a list of consecutive steps. Each step calls one signature; state tensors (KV pools) start as zeros and
are carried from step to step, so they are not part of a step's inputs. The outputs recorded are those of ONNX Runtime
at ORT_ENABLE_BASIC on CPU, where QuantizeLinear and DequantizeLinear mean what the ONNX specification says.

The file is one safetensors file: tensors `"<step>/in/<name>"` and `"<step>/out/<name>"`, and the signature names in its
metadata. State outputs are recorded for the last step only: they are large, and contain every earlier one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from edgec.model import Runner, Signature

Arrays = dict[str, np.ndarray]


@dataclass
class Step:
    """One call: `inputs` without state, `outputs` empty until a golden run fills them."""

    signature: str
    inputs: Arrays
    outputs: Arrays = field(default_factory=dict)


@dataclass
class Recording:
    steps: list[Step]

    @staticmethod
    def load(path: Path) -> Recording:
        from safetensors import safe_open

        with safe_open(path, framework="numpy") as file:
            names: list[str] = json.loads(file.metadata()["signatures"])
            steps = [Step(name, {}) for name in names]
            for key in file.keys():  # noqa: SIM118 - a safe_open is not a mapping
                index, direction, name = key.split("/", 2)
                step = steps[int(index)]
                (step.inputs if direction == "in" else step.outputs)[name] = file.get_tensor(key)
        return Recording(steps)

    def save(self, path: Path) -> None:
        from safetensors.numpy import save_file

        tensors: Arrays = {}
        for i, step in enumerate(self.steps):
            tensors |= {f"{i}/in/{k}": np.ascontiguousarray(v) for k, v in step.inputs.items()}
            tensors |= {f"{i}/out/{k}": np.ascontiguousarray(v) for k, v in step.outputs.items()}
        save_file(tensors, path, metadata={"signatures": json.dumps([s.signature for s in self.steps])})


def zero_state(signature: Signature, sizes: Mapping[str, int] | None = None) -> Arrays:
    """The state before the first step."""
    return {
        t.name: np.zeros(t.sized(sizes or {}), t.dtype) for t in signature.inputs if t.name in signature.state_inputs
    }


def replay(runner: Runner, signatures: tuple[Signature, ...], steps: list[Step]) -> list[Arrays]:
    """Run the steps in order, carrying the state; gives each step's outputs (state outputs in the last one only).

    Signatures of one program that carry state name it alike, so a prefill's pools go into the following decode.
    A stateful runner keeps its state itself and is reset first; its state outputs are absent from the result.
    """
    by_name = {s.name: s for s in signatures}
    runner.reset()
    state: Arrays = {}
    results: list[Arrays] = []
    for i, step in enumerate(steps):
        signature = by_name[step.signature]
        feeds = dict(step.inputs)
        if signature.state and not runner.stateful:
            state = state or zero_state(signature)
            feeds |= state
        outputs = runner.run(step.signature, feeds)
        if signature.state and not runner.stateful:
            state = {name: outputs[out] for name, out in signature.state}
            if i + 1 < len(steps):
                outputs = {k: v for k, v in outputs.items() if k not in signature.state_outputs}
        results.append(outputs)
    return results


class Carrying:
    """A runner that keeps the state of another one between runs, so that its user never sees pools.

    Takes no state inputs, gives no state outputs, and forgets on `reset`, like an engine that is stateful itself.
    """

    stateful = True

    def __init__(self, runner: Runner, signatures: tuple[Signature, ...]) -> None:
        self.runner = runner
        self.signatures = {s.name: s for s in signatures}
        self.state: Arrays = {}

    def run(self, signature: str, inputs: Mapping[str, np.ndarray]) -> Arrays:
        spec = self.signatures[signature]
        state = {name: self.state[name] for name in spec.state_inputs if name in self.state}
        outputs = self.runner.run(signature, {**inputs, **(state or zero_state(spec))})
        self.state |= {name: outputs.pop(out) for name, out in spec.state}
        return outputs

    def reset(self) -> None:
        self.runner.reset()
        self.state = {}


def carrying(runner: Runner, signatures: tuple[Signature, ...]) -> Runner:
    """`runner` itself where it is stateful or has no state, else `runner` in a `Carrying`."""
    if runner.stateful or not any(s.state for s in signatures):
        return runner
    return Carrying(runner, signatures)


class OnnxRunner:
    """ONNX Runtime over one file per signature, at a given graph optimisation level.

    `level` is "disable", "basic", "extended" or "all"; the golden is "basic".
    """

    stateful = False

    def __init__(self, paths: Mapping[str, Path], *, level: str = "basic", threads: int = 0) -> None:
        import onnxruntime as ort

        ort.set_default_logger_severity(3)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.graph_optimization_level = {
            "disable": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
            "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
            "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
            "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
        }[level]
        self.sessions = {
            name: ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            for name, path in paths.items()
        }

    def run(self, signature: str, inputs: Mapping[str, np.ndarray]) -> Arrays:
        session = self.sessions[signature]
        names = [o.name for o in session.get_outputs()]
        wanted = {i.name for i in session.get_inputs()}
        return dict(zip(names, session.run(names, {k: v for k, v in inputs.items() if k in wanted}), strict=True))

    def reset(self) -> None:
        """Nothing is kept between runs."""


class TorchRunner:
    """A torch module (or ExportedProgram's module) per signature, in evaluation mode and without gradients.

    `remember` keeps every output, for a module that is evaluated on the same inputs several times.
    """

    stateful = False

    def __init__(
        self, modules: Mapping[str, object], signatures: tuple[Signature, ...], *, remember: bool = False
    ) -> None:
        self.modules = modules
        self.signatures = {s.name: s for s in signatures}
        self.remembered: dict[str, Arrays] | None = {} if remember else None

    def run(self, signature: str, inputs: Mapping[str, np.ndarray]) -> Arrays:
        if self.remembered is None or self.signatures[signature].state:
            return self._compute(signature, inputs)
        digest = hashlib.sha256(signature.encode())
        for name in sorted(inputs):
            digest.update(f"{name}{inputs[name].shape}".encode() + inputs[name].tobytes())
        key = digest.hexdigest()
        if key not in self.remembered:
            self.remembered[key] = self._compute(signature, inputs)
        return dict(self.remembered[key])

    def _compute(self, signature: str, inputs: Mapping[str, np.ndarray]) -> Arrays:
        import torch

        spec = self.signatures[signature]
        args = [torch.from_numpy(np.ascontiguousarray(inputs[t.name])) for t in spec.inputs]
        with torch.no_grad():
            out = self.modules[signature](*args)  # type: ignore[operator]
        outputs = out if isinstance(out, tuple | list) else (out,)
        return {t.name: o.numpy() for t, o in zip(spec.outputs, outputs, strict=True)}

    def reset(self) -> None:
        """Nothing is kept between runs."""
