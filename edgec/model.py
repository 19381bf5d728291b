"""What travels through a build: Model → Program → Artifact. Bundles are made of artefacts (see bundle.py).

`Model` is a torch module with the task it is for. `Program` is the waist of the hourglass: exported graphs, their ONNX
form, and a recording of what they must compute. `Artifact` is what a target made of a Program. A Model lives in memory
inside one stage and on disk between stages (checkpoint.py); Program and Artifact *are* folders, and the classes here
only read and write their JSON descriptions. Nothing here imports torch at load.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import torch
    from torch.export import ExportedProgram

    from edgec.draft import Draft
    from edgec.golden import Recording
    from edgec.tasks.base import Task

Dim = int | str  # a fixed size, or the name of a dynamic dimension
DECODER_FILE = "decoder.json"  # a language model's companion file: its architecture, and the sizes of its step graph


@dataclass(frozen=True)
class TensorSpec:
    """One input or output: `shape` holds sizes, or names of dynamic dimensions; `dtype` is NumPy's name."""

    name: str
    shape: tuple[Dim, ...]
    dtype: str

    @staticmethod
    def from_dict(data: dict[str, Any]) -> TensorSpec:
        return TensorSpec(data["name"], tuple(data["shape"]), data["dtype"])

    def sized(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape with each dynamic dimension replaced by its size."""
        return tuple(d if isinstance(d, int) else sizes[d] for d in self.shape)


@dataclass(frozen=True)
class Signature:
    """One entry point of a program: its name, its tensors, and what it carries from one step to the next.

    `state` pairs an input with the output that becomes that input at the next step (KV pools). `dynamic` gives each
    dynamic dimension its least and greatest size.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    state: tuple[tuple[str, str], ...] = ()
    dynamic: tuple[tuple[str, int, int], ...] = ()

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Signature:
        return Signature(
            name=data["name"],
            inputs=tuple(TensorSpec.from_dict(t) for t in data["inputs"]),
            outputs=tuple(TensorSpec.from_dict(t) for t in data["outputs"]),
            state=tuple((a, b) for a, b in data["state"]),
            dynamic=tuple((n, lo, hi) for n, lo, hi in data["dynamic"]),
        )

    @property
    def state_inputs(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.state)

    @property
    def state_outputs(self) -> frozenset[str]:
        return frozenset(name for _, name in self.state)


@dataclass(frozen=True)
class LayerScheme:
    """How one layer's weight is stored: `dtype` is int8 or float32; `axis` is None for per tensor."""

    name: str
    op: str
    dtype: str
    axis: int | None
    reason: str = ""  # why it was left in float, when it was


@dataclass(frozen=True)
class Quantization:
    """What the quantise pass fixed. The numbers themselves are nodes and buffers of the graph.

    `scheme` is "static" (W8A8, quantize and dequantize nodes around activations) or "weight-only" (INT8 weights,
    dequantised where they are used; activations stay float in the graph, and an engine with an INT8 kernel may
    quantise them dynamically). `output_steps` gives the quantisation step of each quantised output, by output name.
    """

    scheme: str
    layers: tuple[LayerScheme, ...] = ()
    output_steps: tuple[tuple[str, float], ...] = ()

    @staticmethod
    def from_dict(data: dict[str, Any] | None) -> Quantization | None:
        if data is None:
            return None
        return Quantization(
            scheme=data["scheme"],
            layers=tuple(LayerScheme(**layer) for layer in data["layers"]),
            output_steps=tuple((n, s) for n, s in data["output_steps"]),
        )


@dataclass
class Model:
    """A torch module, the task it serves, and how to build its architecture again.

    Attributes:
        module: in evaluation mode unless a pass is training it.
        task: data, loss, metric and sample inputs.
        source: what built the architecture (see checkpoint.py); JSON, without weights.
        quantization: None for a float model. For the "static" scheme `module` is a PT2E GraphModule.
        metrics: the latest evaluation, by metric name.
        draft: a draft head that was trained on this very module, for speculative decoding.
    """

    module: torch.nn.Module
    task: Task
    source: dict[str, Any]
    quantization: Quantization | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    draft: Draft | None = None

    @property
    def parameters(self) -> int:
        """Number of weights, tied ones once, buffers of quantised weights included."""
        from edgec.graphs import count_parameters

        return count_parameters(self.module)


@dataclass(frozen=True)
class Program:
    """A folder with `program.json`, one `<signature>.pt2` and one `<signature>.onnx` per signature, and a recording.

    The .pt2 holds the ExportedProgram with weights *unfolded* (float weights followed by quantize nodes, for the
    static scheme); `exported(name, folded=True)` gives INT8 constants. `float/` inside is the same program before
    quantisation, when there was one: the baseline that size and latency are compared with. `companions/` holds what the
    task says a runtime needs beside the graphs (a tokenizer).
    """

    path: Path
    signatures: tuple[Signature, ...]
    quantization: Quantization | None
    task_kind: str
    opset: int
    parameters: int

    @staticmethod
    def open(path: Path) -> Program:
        data = json.loads((path / "program.json").read_text())
        return Program(
            path=path,
            signatures=tuple(Signature.from_dict(s) for s in data["signatures"]),
            quantization=Quantization.from_dict(data["quantization"]),
            task_kind=data["task_kind"],
            opset=data["opset"],
            parameters=data["parameters"],
        )

    def save(self) -> None:
        data = asdict(self)
        del data["path"]
        (self.path / "program.json").write_text(json.dumps(data, indent=1, sort_keys=True))

    def signature(self, name: str) -> Signature:
        return next(s for s in self.signatures if s.name == name)

    def onnx_path(self, signature: str) -> Path:
        return self.path / f"{signature}.onnx"

    def exported(self, signature: str, *, folded: bool = False) -> ExportedProgram:
        """Load one ExportedProgram; `folded` turns `weight → quantize` into INT8 constants.

        Raises:
            ConversionError: this program was imported from an ONNX file, and has none.
        """
        from edgec.errors import ConversionError, Reason
        from edgec.graphs import load_exported

        path = self.path / f"{signature}.pt2"
        if not path.is_file() and self.onnx_path(signature).is_file():
            raise ConversionError(
                "this target converts from PyTorch, and the model is an ONNX file",
                hint="build it for onnxruntime and tvm, or start from the PyTorch checkpoint",
                reason=Reason.UNSUPPORTED_SCHEME,
            )
        program: ExportedProgram = load_exported(path, folded=folded)
        return program

    def companion(self, name: str) -> Path | None:
        """One of the files that the task gave along, or None."""
        path = self.path / "companions" / name
        return path if path.is_file() else None

    def recording(self) -> Recording:
        from edgec.golden import Recording

        return Recording.load(self.path / "recording.safetensors")

    @property
    def baseline(self) -> Program | None:
        """The float program, or None when this one is float itself."""
        path = self.path / "float"
        return Program.open(path) if path.is_dir() else None


@dataclass(frozen=True)
class ArtifactFile:
    """One file of an artefact. `role`: "model" is what a device loads; every other role is extra."""

    name: str  # relative to the artefact's folder; a folder's name for an .mlpackage
    role: str
    bytes: int


@dataclass(frozen=True)
class Artifact:
    """A folder that a target filled, with `artifact.json`.

    Attributes:
        target: the target's name.
        files: what is in the folder; the size of the artefact is that of its "model" files.
        signatures: what it can run; shapes as in the Program.
        counts: operations by kind, e.g. {"ops": 120, "layout_ops": 2, "float_ops": 0, "undelegated_ops": 1}.
        details: what only this target's `open` needs (names of tensors, functions …); JSON.
        proof: "executed" (ran on the engine), "evaluated" (its program was evaluated, not its engine), "none".
        proof_command: what proves the rest elsewhere, when `proof` isn't "executed".
    """

    target: str
    path: Path
    files: tuple[ArtifactFile, ...]
    signatures: tuple[Signature, ...]
    counts: dict[str, int] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    proof: str = "executed"
    proof_command: str = ""

    @staticmethod
    def open(path: Path) -> Artifact:
        data = json.loads((path / "artifact.json").read_text())
        return Artifact(
            target=data["target"],
            path=path,
            files=tuple(ArtifactFile(**f) for f in data["files"]),
            signatures=tuple(Signature.from_dict(s) for s in data["signatures"]),
            counts=data["counts"],
            details=data["details"],
            proof=data["proof"],
            proof_command=data["proof_command"],
        )

    def save(self) -> None:
        data = asdict(self)
        del data["path"]
        (self.path / "artifact.json").write_text(json.dumps(data, indent=1, sort_keys=True))

    @property
    def bytes(self) -> int:
        return sum(f.bytes for f in self.files if f.role == "model")

    def file(self, role: str) -> Path:
        return self.path / next(f.name for f in self.files if f.role == role)


def artifact_file(folder: Path, name: str, role: str) -> ArtifactFile:
    """Describe a file or a folder (an .mlpackage) that a target has just written."""
    path = folder / name
    files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
    return ArtifactFile(name, role, sum(p.stat().st_size for p in files))


class Runner(Protocol):
    """Something that computes a signature: a torch module, a golden session, an artefact on its engine.

    `run` takes and returns NumPy arrays by the Signature's names, float where the Signature says float: an engine
    whose tensors are INT8 quantises and dequantises at its own edge. A runner whose engine keeps the state itself
    (`stateful`) takes no state inputs, returns no state outputs, and forgets on `reset`.
    """

    stateful: bool

    def run(self, signature: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]: ...

    def reset(self) -> None: ...


class Tracing(Protocol):
    """A runner that can also show its intermediate tensors, in the order they are computed (for `edgec diff`)."""

    def trace(self, signature: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]: ...
