"""The one document of a build: what `edgec build --json` prints and the bundle's build.json holds.

Every other report (ledger, HTML, JUnit, Markdown) is drawn from this and from nothing else, so they can't disagree. Its
JSON Schema is published as docs/build.schema.json. Fields may be added; none is renamed or removed within `version` 1.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from edgec.report.parts import ErrorRecord, Part
from edgec.report.validation import Validation

if TYPE_CHECKING:
    from edgec.gates import Verdict
    from edgec.parity import Parity

StageVerdict = Literal["changed", "unchanged", "failed"]
GateResult = Literal["pass", "fail", "unproven"]
Proof = Literal["executed", "evaluated", "none"]


class TableRecord(Part):
    """A table that a stage made: a sensitivity table, pruned groups."""

    title: str
    columns: list[str]
    rows: list[list[str | int | float | None]]


class Latency(Part):
    """Time of one call (the last recorded step), in milliseconds."""

    p50: float = Field(description="median")
    p95: float = Field(description="95th percentile")


class ParityRow(Part):
    """One output of one step, compared with the golden."""

    output: str
    step: int = Field(description="index into the recording")
    cosine: float
    sqnr_db: float
    relative_error: float
    off_by_n: int | None
    max_abs_error: float


class ParityRecord(Part):
    """An artefact's outputs against the golden: the worst over all outputs and steps."""

    cosine: float = Field(description="least cosine similarity")
    sqnr_db: float = Field(description="least signal to quantisation noise, dB; 300 means identical")
    relative_error: float = Field(description="greatest error over the output's greatest value")
    off_by_n: int | None = Field(description="greatest error in quantisation steps; null when no output is quantised")
    worst: ParityRow | None = Field(None, description="the row with the greatest relative error")
    rows: list[ParityRow] = Field(default_factory=list, description="every output of every step")

    @staticmethod
    def of(parity: Parity) -> ParityRecord:
        """From `edgec.parity.compare`'s result."""
        return ParityRecord.model_validate(asdict(parity))


class StageRecord(Part):
    """One line of the ledger: a stage, and what it did to the model."""

    stage: str = Field(description="name of the stage, unique in the build")
    kind: Literal["source", "import", "pass", "export", "target", "validate"]
    verdict: StageVerdict = Field(description="changed the model, left it as it was, or failed")
    cached: bool = Field(
        False, description="taken from the store: `seconds` and `peak_memory` are those of its first run"
    )
    digest: str | None = Field(None, description="SHA-256 key of the result in the store")
    bytes: int | None = Field(None, description="weights of the model, or model files of the artefact")
    predicted_bytes: int | None = Field(None, description="what the plan predicted for `bytes`")
    parameters: int | None = Field(None, description="number of weights, tied ones once")
    metric: float | None = Field(None, description="the task's primary metric after this stage")
    metrics: dict[str, float] = Field(default_factory=dict, description="all metrics, the stage's own among them")
    drop: float | None = Field(None, description="how much worse than the source's metric; negative when better")
    factor: float | None = Field(None, description="bytes before this stage over bytes after it")
    compression: float | None = Field(None, description="the running product of the factors: float source over this")
    latency_ms: Latency | None = Field(None, description="of the model in PyTorch, or of the artefact on its engine")
    seconds: float = Field(0.0, description="wall time of the stage in its process")
    timings: dict[str, float] = Field(default_factory=dict, description="seconds by part of the stage")
    peak_memory: int | None = Field(None, description="greatest resident memory of the stage's process, bytes")
    notes: list[str] = Field(default_factory=list)
    warnings: list[str] = Field(default_factory=list)
    tables: list[TableRecord] = Field(default_factory=list)
    facts: dict[str, Any] = Field(default_factory=dict, description="whatever else the stage reported; JSON")


class FileRecord(Part):
    """One file of an artefact or of the bundle."""

    name: str
    role: str = Field(description="`model` is what a device loads; other roles are extra")
    bytes: int
    sha256: str | None = None


class TargetRecord(Part):
    """One target's artefact, and what was proven about it on this machine."""

    proven: bool = Field(description="the artefact itself ran on its engine here, on the recorded inputs")
    proof: Proof = Field("executed", description="executed on the engine; evaluated without it; or not run at all")
    proof_command: str = Field("", description="the command that proves the rest, where it can be proven")
    bytes: int | None = Field(None, description="size of the model files")
    float_bytes: int | None = Field(None, description="size of the same target's float artefact")
    compression: float | None = Field(None, description="float source's weights over `bytes`")
    parity: ParityRecord | None = None
    latency_ms: Latency | None = None
    float_latency_ms: Latency | None = Field(None, description="of the float artefact, interleaved in the same run")
    metric: float | None = Field(None, description="the task's primary metric, run on the engine")
    metrics: dict[str, float] = Field(default_factory=dict)
    samples: int | None = Field(None, description="evaluation samples that the metrics were taken on")
    source_metric: float | None = Field(None, description="the source's primary metric on the same samples")
    drop: float | None = Field(None, description="how much worse than the source's metric on the same samples")
    counts: dict[str, int] = Field(default_factory=dict, description="operations by kind: ops, layout_ops, float_ops …")
    parameters: int | None = Field(None, description="number of weights of the program that was converted")
    details: dict[str, Any] = Field(default_factory=dict, description="what else the target reported; JSON")
    files: list[FileRecord] = Field(default_factory=list)
    warnings: list[str] = Field(default_factory=list)


class GateRecord(Part):
    """One gate's verdict."""

    name: str = Field(description="the gate and, after a dot, what it was applied to")
    limit: float | int | str
    value: float | int | str | None = Field(description="null when it could not be measured")
    verdict: GateResult
    required: bool = Field(True, description="the recipe asked for it: `unproven` then fails the build")
    note: str = Field("", description="why, when the verdict needs a word")

    @staticmethod
    def of(verdict: Verdict) -> GateRecord:
        """From `edgec.gates.judge`'s verdicts."""
        return GateRecord.model_validate(asdict(verdict))

    @property
    def holds(self) -> bool:
        """Whether the build may go on with this verdict."""
        return self.verdict == "pass" or (self.verdict == "unproven" and not self.required)


class MetricInfo(Part):
    """The task's primary metric."""

    name: str
    higher_is_better: bool = True
    source: float | None = Field(None, description="the source model's value, from which drops are counted")
    stage: str = Field("source", description="the stage after which it was taken: `train`, where a recipe has one")


class RecipeInfo(Part):
    name: str
    path: str = Field("", description="as given on the command line")
    digest: str = Field("", description="SHA-256 of the recipe as understood, defaults filled in")
    seed: int = 0
    task: str = ""
    source: str = Field("", description="where the model comes from")


class Waste(Part):
    """One of the four wastes: a share from 0 to 1 that is left, or null where a build doesn't decide it."""

    share: float | None
    of: str = Field(description="what the share is a share of, and how it was measured")
    by: dict[str, float] = Field(default_factory=dict, description="the same by stage or target")


class Wastes(Part):
    """What is left of each of the four wastes (design: drive waste to zero, and print what is left)."""

    memory: Waste
    compute: Waste
    idle: Waste
    size: Waste


class BuildDocument(Part):
    """The result of one `edgec build`."""

    version: Literal[1] = 1
    status: Literal["built", "failed"]
    exit_code: int
    bundle: str | None = Field(None, description="folder of the bundle; null when none was made")
    seconds: float = Field(0.0, description="wall time of this build")
    cached_stages: list[str] = Field(default_factory=list, description="stages taken from the store")
    ledger: list[StageRecord] = Field(default_factory=list)
    targets: dict[str, TargetRecord] = Field(default_factory=dict)
    validation: Validation | None = Field(None, description="what the recipe's `validate:` found")
    gates: list[GateRecord] = Field(default_factory=list)
    error: ErrorRecord | None = None
    recipe: RecipeInfo | None = None
    metric: MetricInfo | None = None
    source_bytes: int | None = Field(None, description="float32 weights of the source model: what ratios refer to")
    wastes: Wastes | None = None
    environment: dict[str, str] = Field(default_factory=dict, description="platform, CPU, cores, memory, threads")
    tools: dict[str, str] = Field(default_factory=dict, description="versions of everything that made the result")
    edgec: str = Field("", description="version of edgec")

    def stage(self, name: str) -> StageRecord | None:
        """The ledger's line of that name."""
        return next((s for s in self.ledger if s.stage == name), None)

    def to_json(self) -> dict[str, Any]:
        """Plain data; `error` is left out of a build that has none."""
        data = self.model_dump(mode="json")
        if self.error is None:
            del data["error"]
        return data


def drop(metric: MetricInfo | None, value: float | None, source: float | None = None) -> float | None:
    """How much worse `value` is than the source's: in the metric's units, negative when it is better.

    `source` is the source's value on the same samples, where that isn't `metric.source`.
    """
    if metric is None or value is None:
        return None
    source = metric.source if source is None else source
    if source is None:
        return None
    return source - value if metric.higher_is_better else value - source


def complete(document: BuildDocument) -> None:
    """Fill in, in place, what follows from the rest: drops, size factors, running compression, wastes.

    A stage that reports no size leaves the running product as it was. An export's and a target's factor is from the
    last model, whose weights are also what an artefact is predicted to weigh.
    """
    from edgec.report.waste import measure_wastes

    before = document.source_bytes
    base = document.stage(document.metric.stage) if document.metric else None
    untrained = document.ledger[: document.ledger.index(base)] if base else []
    for stage in document.ledger:
        target = document.targets.get(stage.stage)
        source = target.source_metric if target else None
        stage.drop = None if stage in untrained else drop(document.metric, stage.metric, source)
        if stage.predicted_bytes is None:
            stage.predicted_bytes = before if stage.kind == "target" else stage.facts.get("predicted_bytes")
        if stage.bytes and before:
            stage.factor = before / stage.bytes
        if stage.bytes and document.source_bytes:
            stage.compression = document.source_bytes / stage.bytes
        if stage.kind in ("source", "import", "pass") and stage.bytes:
            before = stage.bytes
    for target in document.targets.values():
        target.drop = drop(document.metric, target.metric, target.source_metric)
        if target.bytes and document.source_bytes:
            target.compression = document.source_bytes / target.bytes
    _report_surprises(document)
    document.wastes = measure_wastes(document)


# An artefact is its model's weights, its graph (a fifth more, in small models), and for a compiled one its code.
SURPRISE = 1.25
CODE_BYTES = 1_000_000


def _report_surprises(document: BuildDocument) -> None:
    """Warn where a size isn't what it should be: a file larger than predicted, or than its float twin."""
    for stage in document.ledger:
        target = document.targets.get(stage.stage)
        found = []
        expected = stage.predicted_bytes and max(SURPRISE * stage.predicted_bytes, stage.predicted_bytes + CODE_BYTES)
        if stage.kind == "target" and stage.bytes and expected and stage.bytes > expected:
            found.append(f"the result has {stage.bytes:,} bytes, where {stage.predicted_bytes:,} were predicted")
        if target and target.bytes and target.float_bytes and target.bytes >= target.float_bytes:
            found.append(f"the artefact has {target.bytes:,} bytes, and its float twin {target.float_bytes:,}")
        for text in found:
            if text not in stage.warnings:
                stage.warnings.append(text)
            if target and text not in target.warnings:
                target.warnings.append(text)


def schema() -> dict[str, Any]:
    """JSON Schema of the document, as published."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **BuildDocument.model_json_schema(mode="serialization"),
    }
