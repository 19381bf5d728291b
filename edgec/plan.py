"""Recipe → Plan: the stages that will run, which of them the store already has, and what they will cost.

Keys are chained through the *contents* of results: a stage's key needs its inputs' digests, so stages behind the first
one that must run have no key yet, and are planned as "runs". Nothing here runs a stage or imports torch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from edgec import registry
from edgec.recipe import Recipe, dump
from edgec.registry import Tool
from edgec.stagekey import library_versions, platform_facts, source_digest
from edgec.store import Entry, Store, digest_json, digest_tree
from edgec.tasks.base import TaskContext


@dataclass(frozen=True)
class Stage:
    """One stage: `needs` maps the role that an input has in it to the stage that makes it."""

    id: str
    kind: str  # source | import | pass | export | target | validate
    name: str
    options: dict[str, Any]
    needs: dict[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Planned:
    """A stage with what is known about it. `entry` is set when the store has it; sizes are estimates otherwise."""

    stage: Stage
    key: str | None
    entry: Entry | None
    bytes: int | None
    peak_memory: int | None

    @property
    def cached(self) -> bool:
        return self.entry is not None


@dataclass(frozen=True)
class Plan:
    recipe: Recipe
    stages: tuple[Planned, ...]
    missing: tuple[Tool, ...]

    @property
    def peak_memory(self) -> int | None:
        """Of the hungriest stage that will run, in bytes; stages run one at a time."""
        return max((p.peak_memory for p in self.stages if p.peak_memory and not p.cached), default=None)

    def to_dict(self) -> dict[str, Any]:
        """What `edgec plan --json` prints."""
        return {
            "recipe": self.recipe.name,
            "digest": self.recipe.digest,
            "stages": [
                {
                    "stage": p.stage.id,
                    "kind": p.stage.kind,
                    "cached": p.cached,
                    "key": p.key,
                    "predicted_bytes": p.bytes,
                    "predicted_peak_memory": p.peak_memory,
                }
                for p in self.stages
            ],
            "peak_memory": self.peak_memory,
            "missing_tools": [{"name": t.name, "needed_for": t.needed_for, "install": t.install} for t in self.missing],
        }


COMMON_MODULES = ("edgec.checkpoint", "edgec.golden")
# Loads what the stages of a build make: a validation is handed those, and takes no more than a class from it.
LOADS_MODELS = "edgec.reference.load"
RUNS_EVERY_STAGE = "edgec.stages"  # what each kind imports there is among that kind's own modules


def stages_of(recipe: Recipe, *, until: str | None = None) -> list[Stage]:
    """The recipe's stages in order; `until` cuts after the stage of that id."""
    task_module = registry.get_task(recipe.task.name).module
    common = (*COMMON_MODULES, task_module)
    if recipe.model.is_onnx:
        stages = [Stage("import", "import", "onnx", dump(recipe.model), {}, (*common, "edgec.sources.onnx_program"))]
        program = "import"
        source: dict[str, str] = {}
    else:
        stages = [Stage("source", "source", "source", dump(recipe.model), {}, (*common, "edgec.sources.models"))]
        source = {"source": "source"}
        model, baseline = "source", None
        for use in recipe.passes:
            if use.name == "quantize" and baseline is None:
                baseline = model
            needs = {"model": model, **source}
            own = registry.get_pass(use.name).module
            stages.append(Stage(use.id, "pass", use.name, dump(use.options), needs, (*common, own)))
            model = use.id
        # The float program is exported for those who are compared with it, and costs as much as the quantised one.
        compared = recipe.measure.baseline and any(registry.get_target(use.name).twin for use in recipe.targets)
        needs = {"model": model, **source} | ({"baseline": baseline} if baseline and compared else {})
        stages.append(Stage("export", "export", "export", dump(recipe.export), needs, (*common, "edgec.passes.export")))
        program = "export"
    for use in recipe.targets:
        needs = {"program": program, **source}
        own = registry.get_target(use.name).module
        stages.append(Stage(use.id, "target", use.name, dump(use.options), needs, (*common, "edgec.measure", own)))
    if recipe.validated and not recipe.model.is_onnx:
        assert recipe.validation is not None
        needs = {"program": program, **source, **({"float": baseline} if baseline else {})}
        needs |= {name: name for name in recipe.validated}
        modules = (*common, "edgec.validation.stage")
        stages.append(Stage("validate", "validate", "validate", dump(recipe.validation), needs, modules))
    if until is not None:
        ids = [s.id for s in stages]
        if until not in ids:
            from edgec.errors import UsageError

            raise UsageError(
                f"--until {until}: no such stage{registry.suggest(until, ids)}", hint=f"stages: {', '.join(ids)}"
            )
        stages = stages[: ids.index(until) + 1]
    return stages


def stage_key(stage: Stage, recipe: Recipe, inputs: dict[str, str], data: str) -> str:
    """SHA-256 of everything that decides what the stage makes.

    Args:
        stage: the stage.
        recipe: its recipe.
        inputs: the content digest of each of the stage's inputs, by role.
        data: `data_digest` of the recipe.
    """
    libraries = stage.name if stage.kind == "target" else "source" if stage.kind == "import" else stage.kind
    return digest_json(
        {
            "kind": stage.kind,
            "name": stage.name,
            "options": stage.options,
            "task": {recipe.task.name: dump(recipe.task.options)},
            "measure": dump(recipe.measure) if stage.kind != "export" else None,
            "seed": recipe.seed,
            "threads": recipe.threads,
            "inputs": inputs,
            "data": data,
            "source": source_digest(
                stage.modules, alone=[RUNS_EVERY_STAGE, *([LOADS_MODELS] if stage.kind == "validate" else [])]
            ),
            "libraries": library_versions(libraries),
            "platform": platform_facts(),
        }
    )


def data_digest(recipe: Recipe, store: Store) -> str:
    """Digest of what the recipe refers to: local files by content, packages by name, version and pinned digest."""
    task = registry.get_task(recipe.task.name).create(
        recipe.task.options, TaskContext(recipe.folder, store.root, recipe.seed)
    )
    references = [*task.data_references(), *recipe.model.references()]
    for use in recipe.passes:
        references += use.options.references()
    if recipe.validation is not None:
        references += recipe.validation.references()
    return digest_json([[ref, pinned or "", local_digest(recipe.folder, ref)] for ref, pinned in references])


def local_digest(folder: Path, reference: str) -> str:
    """Content digest of a local file or folder; empty for a package, whose version and hash say what it is.

    One process reads a file once, as long as its size and times stay what they were.
    """
    path = folder / reference
    if not path.exists() and ".py:" in reference:  # a factory: path.py:function
        path = folder / reference.rpartition(":")[0]
    if path.is_file():
        return _file_digest(path, _stamp(path))
    if path.is_dir():
        return _tree_digest(path, tuple(_stamp(p) for p in sorted(path.rglob("*")) if p.is_file()))
    if any(c in reference for c in "*?[") and ":" not in reference:
        return digest_json([[str(p), local_digest(folder, str(p))] for p in sorted(folder.glob(reference))])
    return ""


def _stamp(path: Path) -> tuple[str, int, int, int, int]:
    """Another one after any write that the file system can tell."""
    stat = path.stat()
    return str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


@cache
def _file_digest(path: Path, _stamp: object) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def _tree_digest(path: Path, _stamps: object) -> str:
    return digest_tree(path)[0]


def make_plan(recipe: Recipe, store: Store, *, until: str | None = None, force: bool = False) -> Plan:
    """Look up every stage in the store (none with `force`), and estimate what the rest will cost."""
    from edgec.estimate import Estimate

    data = data_digest(recipe, store)
    digests: dict[str, str] = {}
    estimate = Estimate.start(recipe, store)
    planned = []
    for stage in stages_of(recipe, until=until):
        key = entry = None
        if all(need in digests for need in stage.needs.values()):
            inputs = {role: digests[need] for role, need in stage.needs.items()}
            key = stage_key(stage, recipe, inputs, data)
            entry = None if force else store.find(key)
        if entry is not None:
            result = entry.result
            digests[stage.id] = result["digest"]
            estimate.known(stage, result)
            planned.append(Planned(stage, key, entry, result["bytes"], result["peak_memory"]))
        else:
            size, memory = estimate.guess(stage)
            planned.append(Planned(stage, key, None, size, memory))
    return Plan(recipe, tuple(planned), tuple(_missing_tools(planned)))


def _missing_tools(planned: list[Planned]) -> list[Tool]:
    """Required tools that aren't here, of the targets that must run. Asking can take seconds: TVM has to be loaded."""
    return [
        tool
        for p in planned
        if p.stage.kind == "target" and not p.cached
        for tool in registry.get_target(p.stage.name).tools()
        if tool.required and tool.version is None
    ]
