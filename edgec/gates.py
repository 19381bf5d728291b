"""Gates: what a recipe demands of its build, and the verdict.

A gate passes, fails, or is *unproven*: the number it needs was not measured. Unproven is not a pass: it fails the build
when the recipe asked for the gate. Two gates stand without being asked for, because their absence hides disasters: a
limit on the metric's drop and one on parity. Where these defaults find nothing to measure, they say so and go on.

    gates:
      max_bytes: {all: 6 MB, tflite: 4 MB}
      min_compression: 3.5
      max_drop: 1.5 %
      min_speedup: {tflite: 1.2}
      parity: {cosine: 0.999, targets: {tflite: {off_by_n: 1}}}
      proven: [onnxruntime, tflite, tvm]
      compare: ["quantize.qat_top1 >= quantize.ptq_top1"]

What a recipe's `validate:` finds are gates too, `validate.<check>.<target>`. A gate of parity or of validation that
fails ends the build with exit code 6, any other with 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from edgec.errors import EdgecError, ExitCode, GateFailed, ParityError, Reason, RecipeError
from edgec.limits import ALL, CountPerTarget, Drop, DropLimit, ParityGate, RatioPerTarget, SizePerTarget
from edgec.registry import Options, suggest
from edgec.units import format_bytes, format_number

if TYPE_CHECKING:
    from collections.abc import Collection

    from edgec.report.document import BuildDocument, TargetRecord


class Gates(Options):
    """What the build must reach. A limit is one value for every target, or one per target: `{tflite: 3 MB}`."""

    max_bytes: SizePerTarget | None = Field(None, description="greatest size of an artefact: bytes, `3 MB`, `2.5 MiB`")
    min_compression: RatioPerTarget | None = Field(
        None, description="least ratio of the source's float32 weights to an artefact's size"
    )
    min_metric: dict[str, float] = Field(
        default_factory=dict, description="least value of a metric of the final model and of each artefact"
    )
    max_metric: dict[str, float] = Field(
        default_factory=dict, description="greatest value of a metric of the final model and of each artefact"
    )
    max_drop: DropLimit | None = Field(
        Drop(amount=0.05, relative=True),
        description="how much worse than the source the primary metric may get, at the final model and at each "
        "artefact: a number in the metric's units, or a share (`2 %`); `null` switches it off",
    )
    min_speedup: RatioPerTarget | None = Field(
        None, description="least ratio of the float artefact's median latency to this one's, in the same run"
    )
    max_latency_ratio: RatioPerTarget | None = Field(
        None, description="greatest ratio of an artefact's median latency to the float one's, in the same run"
    )
    parity: ParityGate | None = Field(
        ParityGate(), description="limits on the difference from the golden; `null` switches it off"
    )
    max_layout_ops: CountPerTarget | None = Field(
        None, description="how many operations of an artefact may only move data"
    )
    max_undelegated_ops: CountPerTarget | None = Field(
        None, description="how many operations the target's fast path may leave to the slow one"
    )
    max_float_ops: CountPerTarget | None = Field(
        None, description="how many operations of an INT8 artefact may compute in float"
    )
    no_flex: bool = Field(False, description="no Flex and no custom operations in a .tflite")
    proven: list[str] = Field(
        default_factory=list,
        description="targets whose artefact must have run on its engine here; skipped is a failure",
    )
    compare: list[str] = Field(
        default_factory=list,
        description="comparisons between numbers of stages and targets, for example "
        "`distill.top1 > distill.alone_top1` or `tflite.top1 >= onnxruntime.top1 - 0.005`",
    )

    @model_validator(mode="after")
    def _comparisons_parse(self) -> Gates:
        from edgec.comparison import parse_comparison

        for text in self.compare:
            parse_comparison(text)
        return self

    def asked_for(self, field: str) -> bool:
        """The recipe says so, rather than a default."""
        return field in self.model_fields_set

    def check_names(self, targets: Collection[str], stages: Collection[str]) -> None:
        """Raise RecipeError for a gate on a target or a stage that the recipe doesn't have."""
        from edgec.comparison import parse_comparison

        named = [(f, t) for f in _PER_TARGET for t in getattr(self, f) or {} if t != ALL]
        named += [("proven", t) for t in self.proven]
        named += [("parity.targets", t) for t in (self.parity.targets if self.parity else {})]
        for field, target in named:
            if target not in targets:
                raise RecipeError(
                    f"gate `{field}` names the target `{target}`, which the recipe doesn't have"
                    f"{suggest(target, targets)}",
                    hint=f"its targets: {', '.join(targets)}",
                )
        for text in self.compare:
            for stage in parse_comparison(text).stages:
                if stage not in targets and stage not in stages:
                    known = [*stages, *targets]
                    raise RecipeError(
                        f"gate `compare`: `{text}` names `{stage}`, which is neither a stage nor a target"
                        f"{suggest(stage, known)}",
                        hint=f"known: {', '.join(known)}",
                    )


_PER_TARGET = (
    "max_bytes",
    "min_compression",
    "min_speedup",
    "max_latency_ratio",
    "max_layout_ops",
    "max_undelegated_ops",
    "max_float_ops",
)


@dataclass(frozen=True)
class Verdict:
    """One gate's verdict. `required` is false for a default that the recipe didn't ask for."""

    name: str
    limit: float | int | str
    value: float | int | str | None
    verdict: Literal["pass", "fail", "unproven"]
    required: bool = True
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.verdict == "pass" or (self.verdict == "unproven" and not self.required)

    @property
    def is_parity(self) -> bool:
        return self.name.startswith(("parity.", "validate."))

    def sentence(self) -> str:
        """For the error's one line."""
        value = "not measured" if self.value is None else f"is {_show(self.name, self.value)}"
        text = f"{self.name} {value}, the limit is {_show(self.name, self.limit)}"
        return f"{text} ({self.note})" if self.note else text


def _show(name: str, value: float | int | str | None) -> str:
    if isinstance(value, str) or value is None:
        return str(value)
    return format_bytes(value) if name.startswith("max_bytes") else format_number(value)


def judge(gates: Gates, document: BuildDocument) -> list[Verdict]:
    """Every gate's verdict on a document whose ledger and targets are complete (see `document.complete`)."""
    from edgec.comparison import judge_comparison

    verdicts = [*_sizes_and_counts(gates, document), *_metrics(gates, document), *_drops(gates, document)]
    verdicts += [*_parity(gates, document), *_proven(gates, document), *_validation(document)]
    verdicts += [judge_comparison(text, document) for text in gates.compare]
    return verdicts


def exit_code(verdicts: list[Verdict]) -> ExitCode:
    """6 when parity failed, 3 when another gate did, 0 when all hold."""
    broken = [v for v in verdicts if not v.holds]
    if any(v.is_parity and v.verdict == "fail" for v in broken):
        return ExitCode.PARITY_FAILED
    return ExitCode.GATE_FAILED if broken else ExitCode.OK


def gate_error(verdicts: list[Verdict]) -> EdgecError | None:
    """The error that a build with these verdicts ends with, or None."""
    broken = sorted((v for v in verdicts if not v.holds), key=lambda v: (not v.is_parity, v.verdict != "fail"))
    if not broken:
        return None
    more = f", and {len(broken) - 1} more" if len(broken) > 1 else ""
    message = f"gate failed: {broken[0].sentence()}{more}"
    code = exit_code(verdicts)
    if code == ExitCode.PARITY_FAILED:
        hint = "`edgec diff` shows the first tensor at which two artefacts part"
        if broken[0].name.startswith("validate."):
            hint = "`edgec validate` shows every number; the report's warnings say where to look"
        return ParityError(message, hint=hint)
    unproven = all(v.verdict == "unproven" for v in broken)
    hint = "the gates' table in the report has every value; change the recipe, or its `gates:`"
    return GateFailed(message, hint=hint, reason=Reason.UNPROVEN if unproven else Reason.GATE)


def _verdict(name: str, limit: float | int, value: float | int | None, *, least: bool, **more: Any) -> Verdict:
    if value is None:
        return Verdict(name, limit, None, "unproven", **more)
    good = value >= limit if least else value <= limit
    return Verdict(name, limit, value, "pass" if good else "fail", **more)


def _sizes_and_counts(gates: Gates, document: BuildDocument) -> Iterator[Verdict]:
    for field in _PER_TARGET:
        limits = getattr(gates, field) or {}
        for name, target in document.targets.items():
            limit = limits.get(name, limits.get(ALL))
            if limit is not None:
                yield _verdict(f"{field}.{name}", limit, _measured(field, target), least=field.startswith("min_"))
    if gates.no_flex:
        for name, target in document.targets.items():
            if name == "tflite":
                # In a .tflite a Flex operation is a custom one whose name begins with "Flex".
                yield _verdict(f"no_flex.{name}", 0, target.counts.get("custom_ops"), least=False)


def _measured(field: str, target: TargetRecord) -> float | int | None:
    if field == "max_bytes":
        return target.bytes
    if field == "min_compression":
        return target.compression
    if field in ("min_speedup", "max_latency_ratio"):
        if target.latency_ms is None or target.float_latency_ms is None:
            return None
        own, floating = target.latency_ms.p50, target.float_latency_ms.p50
        return floating / own if field == "min_speedup" else own / floating
    return target.counts.get(field.removeprefix("max_"))


def _points(document: BuildDocument) -> Iterator[tuple[str, dict[str, float], float | None]]:
    """`(name, metrics, drop)` of the final model and of each artefact."""
    models = [
        s for s in document.ledger if s.kind in ("source", "import", "pass") and (s.metrics or s.metric is not None)
    ]
    if models:
        yield "model", models[-1].metrics, models[-1].drop
    for name, target in document.targets.items():
        yield name, target.metrics, target.drop


def _metrics(gates: Gates, document: BuildDocument) -> Iterator[Verdict]:
    for field, least in (("min_metric", True), ("max_metric", False)):
        for metric, limit in getattr(gates, field).items():
            points = list(_points(document))
            if not any(metric in metrics for _, metrics, _ in points):
                yield Verdict(f"{field}.{metric}", limit, None, "unproven", note=_known(metric, points))
                continue
            for name, metrics, _ in points:
                yield _verdict(f"{field}.{metric}.{name}", limit, metrics.get(metric), least=least)


def _known(metric: str, points: list[tuple[str, dict[str, float], float | None]]) -> str:
    names = sorted({name for _, metrics, _ in points for name in metrics})
    return f"no such metric{suggest(metric, names)}" if names else "nothing was evaluated"


def _drops(gates: Gates, document: BuildDocument) -> Iterator[Verdict]:
    if gates.max_drop is None:
        return
    required = gates.asked_for("max_drop")
    source = document.metric.source if document.metric else None
    if source is None:
        note = "the source has no metric to drop from"
        yield Verdict("max_drop", str(gates.max_drop), None, "unproven", required, note)
        return
    for name, _, drop in _points(document):
        # An artefact's drop is from the source's metric on the samples that the artefact was evaluated on.
        own = document.targets[name].source_metric if name in document.targets else None
        base = source if own is None else own
        limit = gates.max_drop.limit(base)
        note = f"{gates.max_drop} of {format_number(base)}" if gates.max_drop.relative else ""
        yield _verdict(f"max_drop.{name}", limit, drop, least=False, required=required, note=note)


def _parity(gates: Gates, document: BuildDocument) -> Iterator[Verdict]:
    if gates.parity is None:
        return
    asked = gates.asked_for("parity")
    for name, target in document.targets.items():
        for measure, limit in gates.parity.limits(name).items():
            value = None if target.parity is None else getattr(target.parity, measure)
            note = ""
            if value is None:
                note = "the outputs are not quantised" if target.parity else "the artefact was not run"
            least = measure in ("cosine", "sqnr_db")
            gate = f"parity.{measure}.{name}"
            yield _verdict(gate, limit, value, least=least, required=asked, note=note)


def _validation(document: BuildDocument) -> Iterator[Verdict]:
    """What the recipe's `validate:` found; numbers that are only reported are no gates."""
    for name, target in document.validation.targets.items() if document.validation else ():
        for finding in target.findings:
            if finding.verdict == "reported" or (finding.verdict == "unproven" and not finding.required):
                continue
            yield Verdict(
                f"validate.{finding.check}.{name}",
                "executed" if finding.limit is None else finding.limit,
                finding.value,
                finding.verdict,
                finding.required or finding.verdict == "fail",
                "" if finding.verdict == "pass" else finding.message,
            )


def _proven(gates: Gates, document: BuildDocument) -> Iterator[Verdict]:
    for name in gates.proven:
        target = document.targets.get(name)
        if target is None:
            # The names are checked against the recipe, so it was left out by hand, and the user knows.
            note = "left out of this build with --target"
            yield Verdict(f"proven.{name}", "executed", None, "unproven", required=False, note=note)
        elif target.proven:
            yield Verdict(f"proven.{name}", "executed", target.proof, "pass")
        else:
            command = f"; prove it with: {target.proof_command}" if target.proof_command else ""
            note = f"it did not run on its engine here{command}"
            yield Verdict(f"proven.{name}", "executed", target.proof, "unproven", note=note)
