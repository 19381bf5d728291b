"""Passes, targets and tasks by name: ours from the tables below, others' from entry points.

A pass is one module with one `Options` class and one function under `@register_pass(name)`; a target likewise under
`@register_target(name)`. The option class is read off the function's annotations, so one declaration gives the recipe's
schema, the documentation, the report's defaults and the cache key. Modules are imported when their name is first
asked for; they must not import torch, tensorflow, coremltools or tvm at the top.

Third parties name a module under the entry-point groups `edgec.passes`, `edgec.targets` and `edgec.tasks`.
"""

from __future__ import annotations

import difflib
import importlib
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict

from edgec.errors import RecipeError
from edgec.stagekey import installed_version

if TYPE_CHECKING:
    from edgec.context import Context
    from edgec.model import Artifact, Model, Program, Runner
    from edgec.tasks.base import Task


class Options(BaseModel):
    """Base of every option class: unknown keys are errors, values don't change after they are read."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    def references(self) -> list[tuple[str, str | None]]:
        """`(reference, pinned SHA-256 or None)` of every file and package these options name: part of the cache key."""
        return []


@dataclass(frozen=True)
class Tool:
    """Something a target needs, as `edgec doctor` shows it."""

    name: str
    version: str | None  # None: not here
    install: str  # the command that installs it
    needed_for: str = ""
    required: bool = True  # False: only part of the target needs it

    @staticmethod
    def of_package(package: str, needed_for: str, *, pin: str = "") -> Tool:
        """A Python package; `pin` is what is known to work, for example `==9.0`."""
        return Tool(package, installed_version(package), f"pip install {package}{pin}", needed_for)


@dataclass(frozen=True)
class PassEntry:
    """A pass. `distributed`: under torchrun every rank runs it; other stages run on the first rank alone."""

    name: str
    module: str
    options: type[Options]
    run: Callable[[Model, Any, Context], Model]
    summary: str
    distributed: bool = False


@dataclass(frozen=True)
class TargetEntry:
    """A target: `convert` fills `context`'s artefact folder; `open` gives a Runner for a finished artefact.

    `twin`: its float artefact is worth comparing with; the engine runs float models as well as it runs INT8 ones.
    """

    name: str
    module: str
    options: type[Options]
    convert: Callable[[Program, Any, Context], Artifact]
    tools: Callable[[], list[Tool]]
    open: Callable[[Artifact], Runner]
    summary: str
    twin: bool = True


@dataclass(frozen=True)
class TaskEntry:
    name: str
    module: str
    options: type[Options]
    create: Callable[..., Task]
    summary: str


PASSES = {
    "train": "edgec.passes.train",
    "distill": "edgec.passes.distill",
    "prune": "edgec.passes.prune",
    "quantize": "edgec.passes.quantize",
    "draft_head": "edgec.passes.draft_head",
}
TARGETS = {
    "onnxruntime": "edgec.targets.onnxruntime",
    "tflite": "edgec.targets.tflite",
    "coreml": "edgec.targets.coreml",
    "tvm": "edgec.targets.tvm",
    "native": "edgec.targets.native",
}
TASKS = {
    "image-classification": "edgec.tasks.image_classification",
    "causal-lm": "edgec.tasks.causal_lm",
    "tensors": "edgec.tasks.tensors",
}

_passes: dict[str, PassEntry] = {}
_targets: dict[str, TargetEntry] = {}
_tasks: dict[str, TaskEntry] = {}
F = TypeVar("F", bound=Callable[..., Any])


def _summary(function: Callable[..., Any]) -> str:
    module = importlib.import_module(function.__module__)
    text = (module.__doc__ or function.__doc__ or "").strip()
    return text.split("\n\n")[0].replace("\n", " ")


def _options_of(function: Callable[..., Any]) -> type[Options]:
    # Looked up by name, one by one: Model, Program and Context are imported for type checkers only.
    hints = [function.__globals__.get(h) if isinstance(h, str) else h for h in function.__annotations__.values()]
    found = [h for h in hints if isinstance(h, type) and issubclass(h, Options)]
    if len(found) != 1:
        raise TypeError(f"{function.__module__}.{function.__name__} must take exactly one Options class")
    return found[0]


def register_pass(name: str, *, distributed: bool = False) -> Callable[[F], F]:
    """Make `run(model, options, context) -> Model` the pass `name`; see PassEntry for `distributed`."""

    def wrap(run: F) -> F:
        _passes[name] = PassEntry(name, run.__module__, _options_of(run), run, _summary(run), distributed)
        return run

    return wrap


def register_target(
    name: str, *, tools: Callable[[], list[Tool]], open: Callable[[Artifact], Runner], twin: bool = True
) -> Callable[[F], F]:
    """Make `convert(program, options, context) -> Artifact` the target `name`; see TargetEntry for the rest."""

    def wrap(convert: F) -> F:
        _targets[name] = TargetEntry(
            name, convert.__module__, _options_of(convert), convert, tools, open, _summary(convert), twin
        )
        return convert

    return wrap


def register_task(name: str) -> Callable[[F], F]:
    """Make a `Task` class, whose `__init__` takes its Options, the task `name`."""

    def wrap(cls: F) -> F:
        _tasks[name] = TaskEntry(name, cls.__module__, _options_of(cls.__init__), cls, _summary(cls))
        return cls

    return wrap


@cache
def _modules(kind: str) -> dict[str, str]:
    """Name → module of everything of a kind that is installed."""
    ours = {"passes": PASSES, "targets": TARGETS, "tasks": TASKS}[kind]
    theirs = {e.name: e.value.split(":")[0] for e in entry_points(group=f"edgec.{kind}")}
    return {**theirs, **ours}


def names(kind: str) -> list[str]:
    """Every known name of a kind: "passes", "targets" or "tasks"."""
    return sorted(_modules(kind))


def suggest(wrong: str, known: typing.Iterable[str]) -> str:
    """ "; did you mean `x`?" or nothing."""
    close = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.5)
    return f"; did you mean `{close[0]}`?" if close else ""


def _find(kind: str, word: str, name: str, table: dict[str, Any]) -> Any:
    known = _modules(kind)
    if name not in known:
        hint = f"known: {', '.join(sorted(known))}"
        raise RecipeError(f"unknown {word} `{name}`{suggest(name, known)}", hint=hint)
    importlib.import_module(known[name])
    if name not in table:
        raise TypeError(f"{known[name]} doesn't register the {word} `{name}` that it is listed for")
    return table[name]


def get_pass(name: str) -> PassEntry:
    entry: PassEntry = _find("passes", "pass", name, _passes)
    return entry


def get_target(name: str) -> TargetEntry:
    entry: TargetEntry = _find("targets", "target", name, _targets)
    return entry


def get_task(name: str) -> TaskEntry:
    entry: TaskEntry = _find("tasks", "task", name, _tasks)
    return entry
