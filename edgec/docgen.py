"""Reference pages and schemas from the code: `python -m edgec.docgen` writes docs/, `--check` says what is stale.

What a pass, a target, a task or a gate accepts stands once, in its Options class; these pages are that class in prose,
so they can't fall behind it unnoticed: a test runs `--check`.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from edgec import registry
from edgec.errors import ExitCode, Reason

DOCS = Path(__file__).parent.parent / "docs"
NOTICE = "<!-- Written by `python -m edgec.docgen` from the code; edit the docstrings and descriptions there. -->"

EXIT_CODES = {
    ExitCode.OK: "Built, and all gates hold.",
    ExitCode.BUG: "A bug in edgec. `--debug` shows the traceback.",
    ExitCode.USAGE: "The recipe, the command line, or something that they refer to is wrong; or the store or the "
    "output folder can't be used.",
    ExitCode.GATE_FAILED: "The build is there, and one of the recipe's gates does not hold, or was not proven.",
    ExitCode.TOOL_MISSING: "A tool that the recipe needs is missing on this machine. `edgec doctor` lists all.",
    ExitCode.CONVERSION_FAILED: "A pass, the export or a target failed.",
    ExitCode.PARITY_FAILED: "An artefact does not compute what its model computes.",
    ExitCode.INTERRUPTED: "Stopped with Ctrl-C. Finished stages are kept; the same command goes on from there.",
}

REASONS = {
    Reason.BUG: "a bug in edgec; please report it",
    Reason.BAD_RECIPE: "a key, a value or a reference in the recipe is wrong; the message has `file:line:column`",
    Reason.BAD_OPTION: "an option on the command line, or of a stage, is wrong",
    Reason.SOURCE_NOT_FOUND: "a file, a package or a data set is not where the recipe says",
    Reason.DIGEST_MISMATCH: "a file has another SHA-256 than the recipe pins; both are in the message",
    Reason.BAD_CHECKPOINT: "a checkpoint is truncated, malformed, or does not fit its architecture",
    Reason.UNSAFE_FILE: "a file would run code, or an archive would write outside its folder; it was not opened",
    Reason.NOT_FINITE: "NaN or infinity among weights, activations or outputs",
    Reason.EMPTY_DATA: "a data set has no samples",
    Reason.BAD_DATA: "a data set's file is not what its kind of data looks like",
    Reason.EXTREME_CONSTANT: "a constant such as −1e38 would ruin the range of an INT8 activation",
    Reason.TOOL_MISSING: "a tool is not installed; the hint has the command",
    Reason.UNSUPPORTED_OP: "a converter has no such operation; the message names it and the line of the model",
    Reason.UNSUPPORTED_SCHEME: "a target or an opset can't hold this kind of quantisation",
    Reason.EXPORT_FAILED: "the model could not be exported, or what was exported is not valid",
    Reason.CONVERTER_FAILED: "a converter raised an error; the message quotes it",
    Reason.CONVERTER_CRASHED: "a converter's process died; the message has its last words",
    Reason.OUT_OF_MEMORY: "a stage was killed for memory, or could not allocate it",
    Reason.EMPTY_OUTPUT: "a stage reported success and left nothing",
    Reason.INVARIANT_BROKEN: "a result broke a rule that always holds (a softmax that does not sum to 1)",
    Reason.PARITY: "an artefact's outputs differ from the golden's by more than the limit",
    Reason.GATE: "a gate does not hold",
    Reason.UNPROVEN: "what a gate asked for was not measured",
    Reason.STORE: "the cache or the output folder can't be read or written",
    Reason.DISK_FULL: "no space is left",
    Reason.NOT_REPRODUCIBLE: "two builds of one recipe gave different bytes",
    Reason.VERSION_MISMATCH: "a bundle, a runtime library and this edgec don't belong together",
    Reason.UNSUPPORTED_MODEL: "a bundle, a tokenizer or an option is valid, but the runtime doesn't do that",
    Reason.TOO_LONG: "prompt and answer don't fit the context, or the whole memory for keys and values",
    Reason.QUEUE_FULL: "too many requests wait already",
    Reason.INTERRUPTED: "stopped from outside",
}


def pages() -> dict[str, str]:
    """Every generated file's text, by its name in docs/."""
    from edgec.recipe import recipe_schema
    from edgec.report.document import schema as build_schema
    from edgec.report.validation import schema as validation_schema

    return {
        "passes.md": passes_page(),
        "targets.md": targets_page(),
        "tasks.md": tasks_page(),
        "gates.md": gates_page(),
        "exit-codes.md": exit_codes_page(),
        "recipe.schema.json": json.dumps(recipe_schema(), indent=1) + "\n",
        "build.schema.json": json.dumps(build_schema(), indent=1) + "\n",
        "validation.schema.json": json.dumps(validation_schema(), indent=1) + "\n",
    }


def passes_page() -> str:
    from edgec.passes.export import ExportOptions

    parts = [NOTICE, "# Passes", "A pass takes the model and gives it back changed. They run in the recipe's order."]
    for name in registry.PASSES:
        entry = registry.get_pass(name)
        parts += [f"## {name}", _prose(entry.module), _yaml(["passes:", f"  - {name}:"], entry.options, 6)]
        parts += options_tables(entry.options)
    parts += ["## export", "Follows the last pass; its options stand under `export:`.", _prose("edgec.passes.export")]
    parts += options_tables(ExportOptions)
    return _join(parts)


def targets_page() -> str:
    parts = [NOTICE, "# Targets", "A target turns the exported program into an artefact, and runs it to prove it."]
    for name in registry.TARGETS:
        entry = registry.get_target(name)
        parts += [f"## {name}", _prose(entry.module), _yaml(["targets:", f"  {name}:"], entry.options, 4)]
        parts += options_tables(entry.options)
        tools = [
            (f"`{t.name}`", t.needed_for or f"`{name}`", "yes" if t.required else "for a part") for t in entry.tools()
        ]
        parts += ["Tools, which `edgec doctor` looks for:", _table(("tool", "needed for", "required"), tools)]
    return _join(parts)


def tasks_page() -> str:
    parts = [NOTICE, "# Tasks", "A task says what a model is for: its data, its loss, its metric, its sample inputs."]
    for name in registry.TASKS:
        entry = registry.get_task(name)
        cls: Any = entry.create
        better = "higher" if cls.higher_is_better else "lower"
        parts += [f"## {name}", _prose(entry.module), f"Primary metric: `{cls.metric}` ({better} is better)."]
        parts += [_yaml(["task:", f"  {name}:"], entry.options, 4), *options_tables(entry.options)]
    return _join(parts)


def gates_page() -> str:
    from edgec.gates import Gates

    parts = [NOTICE, "# Gates", _prose("edgec.gates"), *options_tables(Gates)]
    return _join([*parts, "## Comparisons", _prose("edgec.comparison")])


def exit_codes_page() -> str:
    codes = [(str(int(code)), EXIT_CODES[code]) for code in ExitCode]
    reasons = [(f"`{reason}`", REASONS[reason]) for reason in Reason]
    return _join(
        [
            NOTICE,
            "# Exit codes and reasons",
            "Scripts may rely on these numbers. They never change.",
            _table(("code", "meaning"), codes),
            "With `--json`, a failure's `error` also has a `reason`, one of these words:",
            _table(("reason", "meaning"), reasons),
        ]
    )


def options_tables(cls: type[BaseModel]) -> list[str]:
    """A table of a class's options, and one for each class inside it."""
    schema = cls.model_json_schema(by_alias=True)
    classes = _classes(cls)
    parts = [_options_table(cls, schema, schema)]
    for name, part in schema.get("$defs", {}).items():
        if part.get("properties"):
            text = " ".join(part.get("description", "").split())
            parts += [f"### {name}", *([text] if text else []), _options_table(classes[name], schema, part)]
    return parts


def _classes(cls: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Every model class that a model class's fields lead to, by name."""
    found: dict[str, type[BaseModel]] = {}
    todo: list[Any] = [field.annotation for field in cls.model_fields.values()]
    while todo:
        kind = todo.pop()
        todo += typing.get_args(kind)
        if isinstance(kind, type) and issubclass(kind, BaseModel) and kind.__name__ not in found:
            found[kind.__name__] = kind
            todo += [field.annotation for field in kind.model_fields.values()]
    return found


def _options_table(cls: type[BaseModel], schema: dict[str, Any], part: dict[str, Any]) -> str:
    if not part.get("properties"):
        return "No options."
    defaults = _defaults(cls)
    rows = []
    for name, field in part["properties"].items():
        default = "–" if name in defaults and _nothing(defaults[name]) else f"`{_yaml_value(defaults.get(name))}`"
        default = default if name in defaults else "needed"
        rows.append((f"`{name}`", describe_type(schema, field), default, _inline(field.get("description", ""))))
    return _table(("option", "type", "default", "meaning"), rows)


def _defaults(cls: type[BaseModel]) -> dict[str, Any]:
    """Each optional field's default as JSON, by the name that recipes use; of an inner class only what is set."""
    found = {}
    for name, field in cls.model_fields.items():
        if not field.is_required():
            value = to_jsonable_python(field.get_default(call_default_factory=True))
            if isinstance(value, dict):
                value = {k: v for k, v in value.items() if not _nothing(v)}
            found[field.alias or name] = value
    return found


def _nothing(value: Any) -> bool:
    return value is None or value in ({}, [])


def describe_type(schema: dict[str, Any], field: dict[str, Any]) -> str:
    """A JSON Schema fragment in words."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        target = schema["$defs"][name]
        return f"[{name}](#{name.lower()})" if target.get("properties") else describe_type(schema, target)
    if "anyOf" in field:
        kinds = [describe_type(schema, f) for f in field["anyOf"] if f.get("type") != "null"]
        if len(kinds) > 1 and kinds[-1] == f"mapping to {' or '.join(kinds[:-1])}":
            return f"{' or '.join(kinds[:-1])}; or a mapping to such"
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in field:
        return ", ".join(f"`{v}`" for v in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if field.get("type") == "array":
        if "prefixItems" in field:
            return "[" + ", ".join(describe_type(schema, f) for f in field["prefixItems"]) + "]"
        items = field.get("items")
        return f"list of {describe_type(schema, items)}" if items else "list"
    if field.get("type") == "object":
        values = field.get("additionalProperties")
        return f"mapping to {describe_type(schema, values)}" if isinstance(values, dict) and values else "mapping"
    name = {"string": "text", "boolean": "true or false"}.get(field.get("type", ""), field.get("type", "any"))
    bounds = [
        f"{sign} {field[key]:g}"
        for key, sign in (("exclusiveMinimum", ">"), ("minimum", "≥"), ("exclusiveMaximum", "<"), ("maximum", "≤"))
        if key in field
    ]
    if "examples" in field:
        name += " such as " + ", ".join(f"`{e}`" for e in field["examples"])
    return f"{name} {', '.join(bounds)}".strip()


def _yaml(head: list[str], options: type[BaseModel], indent: int) -> str:
    """The stage in a recipe, with its defaults; what has none stands as a comment."""
    lines = []
    defaults = _defaults(options)
    for name, field in options.model_fields.items():
        key = field.alias or name
        if key not in defaults:
            lines.append(f"{' ' * indent}# {key}: needed")
        elif _nothing(defaults[key]):
            lines.append(f"{' ' * indent}# {key}:")
        else:
            lines.append(f"{' ' * indent}{key}: {_yaml_value(defaults[key])}")
    bare = all(line.lstrip().startswith("#") for line in lines)
    head = [*head[:-1], f"{head[-1]} {{}}" if bare else head[-1]]
    return "```yaml\n" + "\n".join([*head, *lines]) + "\n```"


def _yaml_value(value: Any) -> str:
    """Flow style, with quotes only where YAML needs them."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_yaml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_yaml_value(v) for v in value) + "]"
    if isinstance(value, str):
        plain = value.replace("-", "").replace("_", "").isalnum() and not value.isdigit()
        return value if plain and value not in ("true", "false", "null", "yes", "no") else json.dumps(value)
    return json.dumps(value)


def _prose(module: str) -> str:
    return inspect.cleandoc(importlib.import_module(module).__doc__ or "")


def _inline(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows])


def _join(parts: list[str]) -> str:
    return "\n\n".join(p for p in parts if p) + "\n"


def stale(folder: Path) -> list[str]:
    """Names of files in `folder` that are missing or differ from what the code says."""
    found = []
    for name, text in pages().items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            found.append(name)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Write, or check; 1 when something is stale."""
    parser = argparse.ArgumentParser(prog="python -m edgec.docgen", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is stale")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of the pages")
    options = parser.parse_args(arguments)
    if options.check:
        for name in (found := stale(options.out)):
            print(f"stale: {options.out / name}; run `python -m edgec.docgen`", file=sys.stderr)
        return 1 if found else 0
    options.out.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (options.out / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
