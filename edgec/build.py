"""Plan → Bundle: run the stages that the store lacks, judge the gates, leave a bundle and a report.

A stage that fails ends the build, except that the other targets are still tried: their results are kept, and one run
shows every target that is broken. Whatever happens, the reports are written, and a bundle only when all of it holds.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from edgec.bundle import assemble
from edgec.errors import EdgecError, RecipeError, ToolMissing
from edgec.gates import exit_code, gate_error, judge
from edgec.plan import Plan, Stage, data_digest, make_plan, stage_key
from edgec.ranks import POLL_SECONDS, rank
from edgec.recipe import Recipe, dump
from edgec.registry import get_pass, get_task
from edgec.report.document import (
    BuildDocument,
    GateRecord,
    MetricInfo,
    RecipeInfo,
    StageRecord,
    TargetRecord,
    complete,
)
from edgec.report.parts import ErrorRecord
from edgec.report.validation import Validation
from edgec.stages import Request
from edgec.store import OUTPUT_HINT, Entry, Store, store_error
from edgec.tasks.base import TaskContext
from edgec.worker import run_stage

# What a target's stage measured, under the names that its part of the document has.
TARGET_FIELDS = (
    "proven",
    "proof",
    "proof_command",
    "bytes",
    "float_bytes",
    "parameters",
    "parity",
    "metrics",
    "samples",
    "counts",
    "details",
    "files",
    "latency_ms",
    "float_latency_ms",
)


class Listener(Protocol):
    """Hears what a build does, for a terminal or a log."""

    def started(self, stage: str) -> None: ...

    def event(self, stage: str, event: dict[str, Any]) -> None: ...

    def finished(self, stage: str, record: StageRecord) -> None: ...


@dataclass
class Outcome:
    """What `build` gives back: the document, and the first error with its traceback notes, if any."""

    document: BuildDocument
    error: EdgecError | None
    digests: dict[str, str] = field(default_factory=dict)  # content digest of each stage, and of "bundle"


def build(
    recipe: Recipe,
    store: Store,
    *,
    out: Path,
    listener: Listener,
    until: str | None = None,
    force: bool = False,
) -> Outcome:
    """Build a recipe into `out` (`bundle/`, `report.html`, `build.json`, `junit.xml`, `summary.md`).

    Args:
        recipe: what to build.
        store: where results are kept.
        out: the folder to leave the bundle and the reports in; made when missing.
        listener: hears the progress.
        until: stop after this stage, without a bundle.
        force: run every stage, also those that the store has.

    Returns:
        The outcome. Errors of stages and gates are in it, not raised.

    Raises:
        EdgecError: before anything has run: a gate on nothing, a missing tool, an output folder that can't be made.
    """
    start = time.monotonic()
    if recipe.model.is_onnx and recipe.passes:
        raise RecipeError(
            f"{recipe.path}: pass `{recipe.passes[0].name}` works on a torch module, and the model is an ONNX file",
            hint="remove `passes:`, or start from the checkpoint",
        )
    plan = make_plan(recipe, store, until=until, force=force)
    _check_tools(plan)
    _check_output(out)

    document = _new_document(recipe, store)
    run = _Run(recipe, store, document, listener, force)
    failure = run.all([p.stage for p in plan.stages])
    if rank() > 0:
        return Outcome(document, failure)
    document.seconds = time.monotonic() - start  # what is idle of it is a waste; the reports' own time comes on top
    complete(document)
    outcome = Outcome(document, failure, {s: e.result["digest"] for s, e in run.entries.items()})
    if failure is None and until is None:
        verdicts = judge(recipe.gates, document)
        document.gates = [GateRecord.of(v) for v in verdicts]
        outcome.error = gate_error(verdicts)
        document.exit_code = int(exit_code(verdicts))
        if outcome.error is None:
            path, outcome.digests["bundle"] = _bundle(recipe, run.entries, document, out)
            document.bundle = str(path)
    _conclude(document, outcome.error, time.monotonic() - start)
    from edgec.report import write_reports

    write_reports(document, out)
    return outcome


class _Run:
    """The stages of one build, in order."""

    def __init__(self, recipe: Recipe, store: Store, document: BuildDocument, listener: Listener, force: bool) -> None:
        self.recipe = recipe
        self.store = store
        self.document = document
        self.listener = listener
        self.force = force
        self.data = data_digest(recipe, store)
        self.entries: dict[str, Entry] = {}

    def all(self, stages: list[Stage]) -> EdgecError | None:
        """Run everything; gives the first error."""
        first: EdgecError | None = None
        for stage in stages:
            if first is not None and stage.kind != "target":
                break
            if any(need not in self.entries for need in stage.needs.values()):
                break
            try:
                self.one(stage)
            except EdgecError as error:
                first = first or error
        return first

    def one(self, stage: Stage) -> None:
        """One stage, from the store or by running it."""
        inputs = {role: self.entries[need] for role, need in stage.needs.items()}
        key = stage_key(stage, self.recipe, {r: e.result["digest"] for r, e in inputs.items()}, self.data)
        entry = None if self.force else self.store.find(key)
        cached = entry is not None
        if entry is None:
            self.listener.started(stage.id)
            try:
                entry, cached = self._run(stage, key, inputs) if rank() == 0 else self._follow(stage, key, inputs)
            except EdgecError as error:
                record = StageRecord(stage=stage.id, kind=_kind(stage), verdict="failed", notes=[error.message])
                self.document.ledger.append(record)
                self.listener.finished(stage.id, record)
                raise
        self.entries[stage.id] = entry
        record = self._record(stage, entry, cached)
        self.listener.finished(stage.id, record)

    def _run(self, stage: Stage, key: str, inputs: dict[str, Entry]) -> tuple[Entry, bool]:
        with self.store.lock(key):
            # Another build may have finished it while this one waited for the lock.
            if not self.force and (entry := self.store.find(key)):
                return entry, True
            with self.store.writing(key) as folder:
                request = self._request(stage, folder, self.store.work(key), inputs)
                answer = run_stage(request, folder, lambda event: self.listener.event(stage.id, event))
                result = answer["result"] | {
                    "stage": stage.id,
                    "log": answer["log"],
                    "seconds": answer["seconds"],
                    "peak_memory": answer["peak_memory"],
                }
                return self.store.commit(key, folder, result), False

    def _follow(self, stage: Stage, key: str, inputs: dict[str, Entry]) -> tuple[Entry, bool]:
        """On another rank than the first: train along, then wait for the first rank's result."""
        if _distributed(stage):
            folder = Path(tempfile.mkdtemp(prefix=f"rank{rank()}-", dir=self.store.root / "tmp"))
            (folder / "out").mkdir()
            try:
                work = folder / key  # training finds its group by this name, as the first rank's does
                work.mkdir()
                request = self._request(stage, folder, work, inputs)
                run_stage(request, folder, lambda event: None)
            finally:
                shutil.rmtree(folder)
        while (entry := self.store.find(key)) is None:
            time.sleep(POLL_SECONDS)  # torchrun ends every rank when the first one fails
        return entry, True

    def _request(self, stage: Stage, folder: Path, work: Path, inputs: dict[str, Entry]) -> Request:
        return Request(
            id=stage.id,
            kind=stage.kind,
            name=stage.name,
            options=stage.options,
            task=self.recipe.task.name,
            task_options=dump(self.recipe.task.options),
            measure=dump(self.recipe.measure),
            seed=self.recipe.seed,
            threads=self.recipe.threads,
            recipe_dir=str(self.recipe.folder.resolve()),
            cache=str(self.store.root.resolve()),
            out=str((folder / "out").resolve()),
            work=str(work.resolve()),
            inputs={role: str(entry.out.resolve()) for role, entry in inputs.items()},
            distributed=_distributed(stage),
        )

    def _record(self, stage: Stage, entry: Entry, cached: bool) -> StageRecord:
        """Add the stage's line to the ledger, and its target's part."""
        result = entry.result
        log, document = result["log"], self.document
        metric = result["metrics"].get(document.metric.name) if document.metric else None
        if stage.kind in ("source", "import"):
            # As float32, whatever the checkpoint is stored in. BatchNorm's statistics count, though no parameters.
            document.source_bytes = max(4 * result["parameters"], result["bytes"])
        if document.metric and (stage.kind in ("source", "import") or stage.name == "train"):
            document.metric.source, document.metric.stage = metric, stage.id
        record = StageRecord(
            stage=stage.id,
            kind=_kind(stage),
            verdict=log["verdict"],
            cached=cached,
            digest=result["digest"],
            bytes=result["bytes"],
            parameters=result["parameters"],
            metric=metric,
            metrics=result["metrics"] | log["metrics"],
            latency_ms=result.get("latency_ms"),
            seconds=result["seconds"],
            timings=log["timings"],
            peak_memory=result["peak_memory"],
            notes=log["notes"],
            warnings=log["warnings"],
            tables=log["tables"],
            facts=log["facts"],
        )
        document.ledger.append(record)
        if cached:
            document.cached_stages.append(stage.id)
        if stage.kind == "target":
            document.targets[stage.id] = TargetRecord(
                **{name: result[name] for name in TARGET_FIELDS},
                metric=metric,
                source_metric=self._source_metric(result["samples"]),
                warnings=log["warnings"],
            )
        if stage.kind == "validate":
            document.validation = Validation.model_validate_json((entry.out / "validation.json").read_bytes())
        return record

    def _source_metric(self, samples: int | None) -> float | None:
        """The source's metric on as many samples as an artefact was evaluated on."""
        info = self.document.metric
        if info is None or samples is None:
            return None
        subsets = self.entries[info.stage].result.get("subset_metrics", {}) if info.stage in self.entries else {}
        value: float | None = subsets.get(str(samples), {}).get(info.name)
        return info.source if value is None else value


def _distributed(stage: Stage) -> bool:
    return stage.kind == "pass" and get_pass(stage.name).distributed


def _kind(stage: Stage) -> Any:
    return "source" if stage.kind == "import" else stage.kind


def _check_tools(plan: Plan) -> None:
    """Before minutes of work: are the tools here that the plan needs?"""
    if plan.missing:
        tool = plan.missing[0]
        more = f" (and {len(plan.missing) - 1} more: see `edgec doctor`)" if len(plan.missing) > 1 else ""
        raise ToolMissing(
            f"{tool.name} is not on this machine, and {tool.needed_for or 'a target of the recipe'} needs it{more}",
            hint=f"install it with: {tool.install}; or leave the target out with --target",
        )


def _check_output(out: Path) -> None:
    """Before minutes of work: can the bundle be left there?"""
    probe = out / f".writable-{os.getpid()}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise store_error(error, "trying the output folder", hint=OUTPUT_HINT) from error


def _new_document(recipe: Recipe, store: Store) -> BuildDocument:
    from edgec import __version__
    from edgec.report.environment import environment, tools

    context = TaskContext(recipe.folder, store.root, recipe.seed)
    task = get_task(recipe.task.name).create(recipe.task.options, context)
    return BuildDocument(
        status="failed",
        exit_code=0,
        recipe=RecipeInfo(
            name=recipe.name,
            path=str(recipe.path),
            digest=recipe.digest,
            seed=recipe.seed,
            task=recipe.task.name,
            source=recipe.model.from_ or recipe.model.factory or "",
        ),
        metric=MetricInfo(name=task.metric, higher_is_better=task.higher_is_better),
        environment=environment(recipe.threads),
        tools=tools(),
        edgec=__version__,
    )


def _conclude(document: BuildDocument, error: EdgecError | None, seconds: float) -> None:
    document.seconds = seconds
    document.status = "built" if error is None else "failed"
    if error is not None:
        document.exit_code = int(error.exit_code)
        data = error.to_dict()
        document.error = ErrorRecord.model_validate(data)


def _bundle(recipe: Recipe, entries: dict[str, Entry], document: BuildDocument, out: Path) -> tuple[Path, str]:
    from edgec.report import papers

    targets = {use.id: entries[use.id] for use in recipe.targets}
    write: Callable[[dict[str, str]], dict[str, str]] = lambda files: papers(document, recipe, files)  # noqa: E731
    return assemble(out, recipe.resolved(), targets, entries.get("source"), write)
