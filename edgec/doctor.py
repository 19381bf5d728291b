"""What this machine can build: each target's tools with their versions, and what to install where one is missing.

Versions are read from package metadata and `PATH`, so nothing heavy is imported; `probe` does a small real job per
target in a process of its own.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

from edgec import registry
from edgec.errors import Reason, ToolMissing
from edgec.registry import Tool
from edgec.stagekey import installed_version

PROBE_SECONDS = (
    300  # importing TVM or TensorFlow cold takes up to 30 s on a slow disk, converting a layer as much again
)


@dataclass(frozen=True)
class Probe:
    """What came of a target's small job: `said` is its own line, or the last line of what went wrong."""

    passed: bool
    said: str


@dataclass(frozen=True)
class Subject:
    """A target, or edgec itself, and its tools. `problem` is set when its module doesn't even load."""

    name: str
    tools: tuple[Tool, ...]
    problem: str = ""
    probe: Probe | None = None

    @property
    def missing(self) -> tuple[Tool, ...]:
        return tuple(t for t in self.tools if t.version is None and t.required)

    @property
    def state(self) -> str:
        """ "ready", "partly" (something optional is missing), or "missing"."""
        if self.problem or self.missing or (self.probe is not None and not self.probe.passed):
            return "missing"
        return "partly" if any(t.version is None for t in self.tools) else "ready"


@dataclass(frozen=True)
class Diagnosis:
    machine: dict[str, str | int]
    edgec: Subject
    targets: tuple[Subject, ...]

    def to_dict(self) -> dict[str, Any]:
        """What `edgec doctor --json` prints."""

        def subject(s: Subject) -> dict[str, Any]:
            return {**asdict(s), "state": s.state}

        return {
            "machine": self.machine,
            "edgec": subject(self.edgec),
            "targets": {s.name: subject(s) for s in self.targets},
        }


def package(name: str, *, needed_for: str, required: bool = True, install: str = "") -> Tool:
    """A Python package as a Tool, by its metadata."""
    return Tool(name, installed_version(name), install or f"pip install {name}", needed_for, required)


def program(name: str, *, needed_for: str, install: str, required: bool = True) -> Tool:
    """A program on PATH as a Tool; its place stands for its version."""
    return Tool(name, shutil.which(name), install, needed_for, required)


def diagnose(targets: list[str] | None = None, *, probe: bool = False) -> Diagnosis:
    """Look at every installed target, or at those named.

    Raises:
        RecipeError: a named target doesn't exist.
    """
    names = targets or registry.names("targets")
    return Diagnosis(_machine(), Subject("edgec", tuple(_own_tools())), tuple(_target(n, probe) for n in names))


def require(diagnosis: Diagnosis) -> None:
    """Raise ToolMissing for the first target that can't be built here."""
    for subject in diagnosis.targets:
        if subject.state != "missing":
            continue
        if subject.problem:
            raise ToolMissing(f"target `{subject.name}` can't be loaded: {subject.problem}")
        if subject.missing:
            tools = ", ".join(t.name for t in subject.missing)
            raise ToolMissing(
                f"target `{subject.name}` needs {tools}", hint="; ".join(t.install for t in subject.missing)
            )
        assert subject.probe is not None
        raise ToolMissing(
            f"target `{subject.name}` is installed, but doesn't work: {subject.probe.said}",
            hint=f"see it fail with  {sys.executable} -m edgec.probes {subject.name}",
            reason=Reason.TOOL_MISSING,
        )


def _machine() -> dict[str, str | int]:
    import psutil

    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cores": psutil.cpu_count() or 1,
        "memory": psutil.virtual_memory().total,
        "disk_free": shutil.disk_usage(".").free,
    }


def _own_tools() -> list[Tool]:
    """What the passes, the export and the sources need."""
    return [
        package("torch", needed_for="every model"),
        package("torchao", needed_for="quantize (static, QAT)"),
        package("torch-pruning", needed_for="prune"),
        package("onnx", needed_for="export"),
        package("onnxscript", needed_for="export"),
        package("onnxruntime", needed_for="the golden"),
        package("gguf", needed_for="GGUF sources", required=False),
        package("transformers", needed_for="Hugging Face sources other than Llama", required=False),
        package("huggingface_hub", needed_for="`hf:` sources", required=False),
        package("pip", needed_for="`pypi:` sources", required=False, install="python -m ensurepip"),
        program("npm", needed_for="`npm:` sources", install="apt-get install npm", required=False),
        program("apt-get", needed_for="`deb:` sources", install="a Debian or Ubuntu machine", required=False),
        program("zstd", needed_for="`deb:` packages of Ubuntu", install="apt-get install zstd", required=False),
    ]


def _target(name: str, probe: bool) -> Subject:
    try:
        entry = registry.get_target(name)
        tools = tuple(entry.tools())
    except (ImportError, TypeError, AttributeError) as error:
        # A third party's target that does not import must not hide the state of the others.
        return Subject(name, (), problem=f"{type(error).__name__}: {error}")
    subject = Subject(name, tools)
    return Subject(name, tools, probe=_probe(name)) if probe and not subject.missing else subject


def _probe(name: str) -> Probe | None:
    from edgec.probes import PROBES

    if name not in PROBES:
        return None
    command = [sys.executable, "-m", "edgec.probes", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return Probe(False, f"no answer within {PROBE_SECONDS} s")
    if done.returncode < 0:
        return Probe(False, f"its process was killed by signal {-done.returncode}")
    lines = [line for line in (done.stderr if done.returncode else done.stdout).splitlines() if line.strip()]
    return Probe(done.returncode == 0, lines[-1].strip() if lines else f"exit code {done.returncode}")
