"""The recipe: a strict, versioned YAML file, read into a `Recipe`.

Every error names `file:line:column`; an unknown key gets a "did you mean". What a pass, a target or a task accepts is
its own Options class, found through the registry, so a third party's stages are checked as strictly as ours.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from edgec import registry
from edgec.errors import RecipeError, UsageError
from edgec.gates import Gates
from edgec.limits import ALL, CountPerTarget
from edgec.registry import Options, suggest
from edgec.sources.section import ModelSection
from edgec.validation.options import ValidateOptions

Location = tuple[str | int, ...]


class MeasureOptions(Options):
    """How much is measured. Fewer samples make a build faster and its numbers coarser."""

    samples: int | None = Field(None, ge=1, description="evaluation samples after each pass; all when not given")
    target_samples: CountPerTarget = Field(
        {ALL: 256}, description="evaluation samples through each artefact on its engine: a number, or one per target"
    )
    evaluated_samples: int = Field(
        8, ge=0, description="evaluation samples where a program is evaluated op by op (Core ML away from a Mac)"
    )
    latency_runs: int = Field(20, ge=1, description="timed runs of the artefact and of its float twin, alternating")
    baseline: bool = Field(True, description="also build each target's float artefact, to compare size and latency")


class RecipeFile(BaseModel):
    """The top level of a recipe as it is written. Stage options are checked one by one afterwards."""

    model_config = ConfigDict(extra="forbid")

    version: Literal[1] = Field(description="version of the recipe format")
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", description="name of the bundle; a folder is called after it")
    seed: int = Field(0, ge=0, lt=2**31, description="of everything random in the build")
    threads: int = Field(
        2, ge=1, le=256, description="threads to compute with; part of what makes a build reproducible"
    )
    model: dict[str, Any] = Field(description="where the model comes from")
    task: dict[str, dict[str, Any] | None] = Field(description="what it is for: one task and its options")
    passes: list[dict[str, dict[str, Any] | None] | str] = Field(
        default_factory=list, description="Model → Model, in order: one pass and its options each"
    )
    export: dict[str, Any] = Field(default_factory=dict, description="options of the export")
    targets: dict[str, dict[str, Any] | None] = Field(min_length=1, description="targets and their options")
    measure: MeasureOptions = Field(default_factory=MeasureOptions, description="how much is measured")
    validation: dict[str, Any] | None = Field(
        None, alias="validate", description="engines held against an independent reference, after the targets"
    )
    gates: dict[str, Any] = Field(default_factory=dict, description="what must hold for the build to count")


@dataclass(frozen=True)
class StageUse:
    """One pass, target or task as the recipe uses it. `id` is unique in the recipe (`prune`, `prune-2`)."""

    id: str
    name: str
    options: Options


@dataclass(frozen=True)
class Recipe:
    path: Path
    name: str
    seed: int
    threads: int
    model: ModelSection
    task: StageUse
    passes: tuple[StageUse, ...]
    export: Options
    targets: tuple[StageUse, ...]
    measure: MeasureOptions
    gates: Gates
    validation: ValidateOptions | None = None

    @property
    def folder(self) -> Path:
        """What relative paths in the recipe are relative to."""
        return self.path.parent

    @property
    def validated(self) -> list[str]:
        """The targets that a validation is asked for and that are built."""
        wanted = self.validation.targets if self.validation is not None else []
        return [use.name for use in self.targets if use.name in wanted]

    def resolved(self) -> dict[str, Any]:
        """The recipe with every default spelled out; JSON."""
        validation = {} if self.validation is None else {"validate": dump(self.validation)}
        return {
            "version": 1,
            "name": self.name,
            "seed": self.seed,
            "threads": self.threads,
            "model": dump(self.model),
            "task": {self.task.name: dump(self.task.options)},
            "passes": [{use.name: dump(use.options)} for use in self.passes],
            "export": dump(self.export),
            "targets": {use.name: dump(use.options) for use in self.targets},
            "measure": dump(self.measure),
            **validation,
            "gates": dump(self.gates),
        }

    @property
    def digest(self) -> str:
        """SHA-256 of the resolved recipe: two spellings of one recipe have the same."""
        return hashlib.sha256(json.dumps(self.resolved(), sort_keys=True).encode()).hexdigest()


def dump(options: BaseModel) -> dict[str, Any]:
    """Options as JSON, under the names that recipes use."""
    result: dict[str, Any] = options.model_dump(mode="json", by_alias=True)
    return result


def load_recipe(path: Path, *, overrides: Iterable[str] = (), targets: Iterable[str] = ()) -> Recipe:
    """Read and check a recipe.

    Args:
        path: the YAML file.
        overrides: `key=value` with a dotted key (`passes.quantize.scheme=qat`), the value being YAML.
        targets: build only these of the recipe's targets; all when empty.

    Raises:
        RecipeError: with `file:line:column` for anything wrong in the file.
        UsageError: for an override or a target that doesn't fit.
    """
    data = _read_yaml(path)
    for override in overrides:
        _override(data, override)
    reader = _Reader(path, data)
    top = reader.check(RecipeFile, data, (), "the recipe")

    task_name, task_options = _single(reader, top.task, ("task",))
    task = reader.stage("tasks", task_name, task_options, ("task", task_name))
    passes = []
    seen: dict[str, int] = {}
    for i, item in enumerate(top.passes):
        name, options = (item, None) if isinstance(item, str) else _single(reader, item, ("passes", i))
        seen[name] = seen.get(name, 0) + 1
        use = reader.stage("passes", name, options, ("passes", i, name))
        passes.append(use if seen[name] == 1 else StageUse(f"{name}-{seen[name]}", name, use.options))

    wanted = list(targets)
    for name in wanted:
        if name not in top.targets:
            raise UsageError(
                f"--target {name}: {path} has no such target{suggest(name, top.targets)}",
                hint=f"its targets: {', '.join(top.targets)}",
            )
    uses = tuple(reader.stage("targets", n, o, ("targets", n)) for n, o in top.targets.items())

    from edgec.passes.export import ExportOptions

    gates = reader.check(Gates, top.gates, ("gates",), "`gates`")
    model = reader.check(ModelSection, top.model, ("model",), "`model`")
    first = ["import"] if model.is_onnx else ["source", "export"]
    try:
        # Against all of the recipe's targets: one that is left out with --target is no mistake in the recipe.
        gates.check_names([u.name for u in uses], [*first, *(u.id for u in passes)])
    except RecipeError as error:
        raise RecipeError(f"{reader.where(('gates',))}: {error.message}", hint=error.hint) from error

    validation = None
    if top.validation is not None:
        validation = reader.check(ValidateOptions, top.validation, ("validate",), "`validate`")
        _check_validation(reader, validation, task_name, top.targets)

    return Recipe(
        path=path,
        name=top.name,
        seed=top.seed,
        threads=top.threads,
        model=model,
        task=task,
        passes=tuple(passes),
        export=reader.check(ExportOptions, top.export, ("export",), "`export`"),
        targets=tuple(u for u in uses if not wanted or u.name in wanted),
        measure=top.measure,
        gates=gates,
        validation=validation,
    )


def _check_validation(reader: _Reader, options: ValidateOptions, task: str, targets: Iterable[str]) -> None:
    if task != "causal-lm":
        raise RecipeError(
            f"{reader.where(('validate',))}: `validate` is for language models, and this recipe's task is `{task}`",
            hint="the gate `parity` holds artefacts of other tasks against the golden",
        )
    known = list(targets)
    for name in dict.fromkeys([*options.targets, *options.limits]):
        if name not in known:
            raise RecipeError(
                f"{reader.where(('validate', 'targets'))}: `validate` names the target `{name}`, which the recipe "
                f"doesn't have{suggest(name, known)}",
                hint=f"its targets: {', '.join(known)}",
            )


class _Reader:
    """Checks parts of one file, and knows where each of them stands in it."""

    def __init__(self, path: Path, data: Any) -> None:
        self.path = path
        self.data = data

    def where(self, location: Location) -> str:
        """`file:line:column` of the deepest part of `location` that the file has."""
        node, line, column = self.data, 0, 0
        for part in location:
            lc = getattr(node, "lc", None)
            try:
                line, column = lc.item(part) if isinstance(part, int) else lc.key(part)  # type: ignore[union-attr]
                node = node[part]
            except (KeyError, IndexError, TypeError, AttributeError):
                break
        return f"{self.path}:{line + 1}:{column + 1}"

    def check(self, cls: Any, data: Any, location: Location, what: str) -> Any:
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            full = location + tuple(first["loc"])
            if first["type"] == "extra_forbidden":
                key = str(first["loc"][-1])
                known = list(_known_keys(cls, first["loc"][:-1]))
                raise RecipeError(
                    f"{self.where(full)}: unknown option `{key}` of {what}{suggest(key, known)}",
                    hint=f"known: {', '.join(sorted(known))}",
                ) from error
            if first["type"] == "missing":
                raise RecipeError(f"{self.where(full[:-1])}: {what} needs `{first['loc'][-1]}`") from error
            dotted = ".".join(str(p) for p in first["loc"])
            label = f"`{dotted}` of {what}" if dotted else what
            text = first["msg"].removeprefix("Value error, ")
            raise RecipeError(f"{self.where(full)}: {label}: {text[:1].lower()}{text[1:]}") from error

    def stage(self, kind: str, name: str, options: Any, location: Location) -> StageUse:
        word = {"passes": "pass", "targets": "target", "tasks": "task"}[kind]
        find: Any = {"passes": registry.get_pass, "targets": registry.get_target, "tasks": registry.get_task}[kind]
        try:
            entry = find(name)
        except RecipeError as error:
            raise RecipeError(f"{self.where(location)}: {error.message}", hint=error.hint) from error
        checked = self.check(entry.options, options or {}, location, f"{word} `{name}`")
        return StageUse(name, name, checked)


def _known_keys(cls: Any, path: Location) -> Iterator[str]:
    """Keys that the model at `path` inside `cls` accepts, under the names that recipes use."""
    schema = cls.model_json_schema(by_alias=True)
    node: Any = schema
    for part in path:
        node = _resolve(schema, node)
        if isinstance(part, int):
            node = node.get("items", {})
        else:
            node = node.get("properties", {}).get(part) or node.get("additionalProperties") or {}
    yield from _resolve(schema, node).get("properties", {})


def _resolve(schema: dict[str, Any], node: Any) -> Any:
    for option in node.get("anyOf", []):
        if "$ref" in option or "properties" in option:
            node = option
    if "allOf" in node:
        node = node["allOf"][0]
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rsplit("/", 1)[1]]
    return node


def _single(reader: _Reader, data: Mapping[str, Any], location: Location) -> tuple[str, Any]:
    if len(data) != 1:
        raise RecipeError(
            f"{reader.where(location)}: expected one name with its options, found {len(data)}",
            hint="write it as `name: {option: value}`",
        )
    return next(iter(data.items()))


def _read_yaml(path: Path) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it isn't UTF-8 text"
        raise RecipeError(
            f"{path}: can't read the recipe: {reason}", hint="`edgec init` writes a starter recipe"
        ) from error
    yaml = YAML(typ="rt")  # the round-trip loader keeps positions, constructs no Python objects, and refuses duplicates
    try:
        data = yaml.load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        problem = re.sub(r"\s+", " ", str(error.problem or error.context))
        raise RecipeError(f"{where}: not valid YAML: {problem}") from error
    except YAMLError as error:
        raise RecipeError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise RecipeError(f"{path}:1:1: a recipe is a mapping of keys to values", hint="see `edgec init`")
    return data


def _override(data: Any, override: str) -> None:
    from ruamel.yaml import YAML

    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UsageError(
            f"--set {override}: expected key=value", hint="for example --set targets.tflite.analyze_gpu=false"
        )
    value = YAML(typ="safe", pure=True).load(text)
    node = data
    parts = key.split(".")
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        if isinstance(node, list):
            node = _list_item(node, part, override)
        elif not isinstance(node, dict):
            raise UsageError(f"--set {override}: `{'.'.join(parts[:i])}` is not a section")
        elif last:
            node[part] = value
        else:
            if node.get(part) is None:
                node[part] = {}
            node = node[part]


def _list_item(items: list[Any], part: str, override: str) -> Any:
    """A pass by its name or its place in `passes`; gives the mapping that holds its options under its name."""
    for i, item in enumerate(items):
        name = item if isinstance(item, str) else next(iter(item))
        if part in (name, str(i)):
            if isinstance(item, str) or item[name] is None:
                items[i] = {name: {}}
            return items[i][name]
    raise UsageError(f"--set {override}: the recipe has no pass `{part}`")


def recipe_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the recipe with every installed pass, target and task, for editors."""
    from edgec.passes.export import ExportOptions

    schema = RecipeFile.model_json_schema()
    definitions = schema.setdefault("$defs", {})

    def add(cls: type[BaseModel], name: str) -> dict[str, str]:
        part = cls.model_json_schema(by_alias=True, ref_template=f"#/$defs/{name}.{{model}}")
        for key, value in part.pop("$defs", {}).items():
            definitions[f"{name}.{key}"] = value
        definitions[name] = part
        return {"$ref": f"#/$defs/{name}"}

    def choice(kind: str, find: Any) -> dict[str, Any]:
        properties = {}
        for name in registry.names(kind):
            entry = find(name)
            part = add(entry.options, f"{kind}.{name}")
            properties[name] = {"anyOf": [part, {"type": "null"}], "description": entry.summary}
        return {"type": "object", "properties": properties, "additionalProperties": False}

    one = {"minProperties": 1, "maxProperties": 1}
    properties = schema["properties"]
    properties["model"] = add(ModelSection, "model")
    properties["export"] = add(ExportOptions, "export")
    properties["gates"] = add(Gates, "gates")
    properties["validate"] = {"anyOf": [add(ValidateOptions, "validate"), {"type": "null"}]}
    properties["task"] = choice("tasks", registry.get_task) | one
    properties["targets"] = choice("targets", registry.get_target) | {"minProperties": 1}
    names = {"type": "string", "enum": registry.names("passes")}
    properties["passes"] = {"type": "array", "items": {"anyOf": [choice("passes", registry.get_pass) | one, names]}}
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "edgec recipe"
    return schema
