"""edgec.lock: what went into a bundle and what came out of it, by digest.

JSON, sorted, without times or machine names: the same recipe on the same machine gives the same file. Reading an old
one back and comparing says *what* changed between two bundles: the recipe, an input, a tool, a stage's result, a file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from edgec.errors import Reason, UsageError

if TYPE_CHECKING:
    from edgec.recipe import Recipe
    from edgec.report.document import BuildDocument

NAME = "edgec.lock"


class Input(BaseModel):
    """Something from outside that the build read: weights, a factory, data."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["model", "data"]
    reference: str = Field(description="as the recipe writes it")
    sha256: str = Field(description="pinned by the recipe, or of the local file; empty when neither is known")


class Lock(BaseModel):
    """The file's contents."""

    model_config = ConfigDict(extra="forbid")

    version: Literal[1] = 1
    edgec: str
    recipe: str = Field(description="name")
    recipe_digest: str = Field(description="SHA-256 of the recipe with its defaults filled in")
    seed: int
    inputs: list[Input]
    stages: dict[str, str] = Field(description="SHA-256 of each stage's result")
    tools: dict[str, str] = Field(description="versions")
    platform: dict[str, str]
    files: dict[str, str] = Field(description="SHA-256 of each of the bundle's files")

    def to_text(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"


@dataclass(frozen=True)
class Difference:
    """One line of `compare_locks`: `before` or `after` is None where the entry is on one side only."""

    section: str
    name: str
    before: str | None
    after: str | None


def inputs_of(recipe: Recipe) -> list[Input]:
    """Everything that a recipe refers to, with its digest. Fetches nothing."""
    from edgec import registry
    from edgec.plan import local_digest
    from edgec.tasks.base import TaskContext

    # A task's construction touches no data, so where its downloads would go doesn't matter here.
    task = registry.get_task(recipe.task.name).create(
        recipe.task.options, TaskContext(recipe.folder, recipe.folder, recipe.seed)
    )
    found: list[tuple[Literal["model", "data"], str, str | None]] = []
    found += [("model", reference, pinned) for reference, pinned in recipe.model.references()]
    for use in recipe.passes:
        found += [("model", reference, pinned) for reference, pinned in use.options.references()]
    found += [("data", reference, pinned) for reference, pinned in task.data_references()]
    inputs = {
        (role, reference): Input(
            role=role, reference=reference, sha256=(pinned or local_digest(recipe.folder, reference)).lower()
        )
        for role, reference, pinned in found
    }
    return [inputs[key] for key in sorted(inputs)]


def make_lock(document: BuildDocument, inputs: list[Input], files: dict[str, str], platform: dict[str, str]) -> Lock:
    """The lock of a finished build. `files` are the bundle's, by relative name."""
    assert document.recipe is not None
    return Lock(
        edgec=document.edgec,
        recipe=document.recipe.name,
        recipe_digest=document.recipe.digest,
        seed=document.recipe.seed,
        inputs=inputs,
        stages={s.stage: s.digest for s in document.ledger if s.digest},
        tools=document.tools,
        platform=platform,
        files=files,
    )


def read_lock(path: Path) -> Lock:
    """Read an edgec.lock. Raises UsageError when it is missing, or isn't one."""
    try:
        return Lock.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", reason=Reason.SOURCE_NOT_FOUND) from error
    except (ValidationError, UnicodeDecodeError) as error:
        first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else "not text"
        raise UsageError(
            f"{path} is not an edgec.lock of version 1: {first}", hint="it lies in a bundle, next to bundle.json"
        ) from error


def compare_locks(before: Lock, after: Lock) -> list[Difference]:
    """What differs, causes first: recipe, inputs, tools and platform, then stages and files."""
    differences = []
    for section, one, two in (
        ("edgec", {"version": before.edgec}, {"version": after.edgec}),
        ("recipe", _recipe(before), _recipe(after)),
        ("inputs", _inputs(before), _inputs(after)),
        ("tools", before.tools, after.tools),
        ("platform", before.platform, after.platform),
        ("stages", before.stages, after.stages),
        ("files", before.files, after.files),
    ):
        for name in [*one, *(n for n in two if n not in one)]:
            if one.get(name) != two.get(name):
                differences.append(Difference(section, name, one.get(name), two.get(name)))
    return differences


def _recipe(lock: Lock) -> dict[str, str]:
    return {"name": lock.recipe, "digest": lock.recipe_digest, "seed": str(lock.seed)}


def _inputs(lock: Lock) -> dict[str, str]:
    return {f"{i.role} {i.reference}": i.sha256 for i in lock.inputs}
