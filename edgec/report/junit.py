"""JUnit XML, as CI systems read it: a test case per stage, per target and per gate.

Unproven is *skipped* where nobody asked for the proof, and a *failure* where a gate did: a CI that shows a skipped
check as green has shown that check to nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgec.units import format_bytes

if TYPE_CHECKING:
    from edgec.report.document import BuildDocument, GateRecord, TargetRecord


def render_junit(document: BuildDocument) -> str:
    """The XML text; three suites: stages, parity, gates."""
    from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

    name = document.recipe.name if document.recipe else "edgec"
    stages = TestSuite("stages")
    for stage in document.ledger:
        case = TestCase(stage.stage, f"{name}.stages", 0.0 if stage.cached else round(stage.seconds, 3))
        if stage.verdict == "failed":
            case.result = [Error(_first(stage.notes) or "failed", document.error.reason if document.error else "")]
        case.system_out = "\n".join([*stage.notes, *(f"warning: {w}" for w in stage.warnings)])
        stages.add_testcase(case)
    if document.error is not None and not any(s.verdict == "failed" for s in document.ledger) and not document.gates:
        case = TestCase("build", f"{name}.stages", 0.0)  # it failed before or beside a stage: CI must still see it
        case.result = [Error(document.error.message, document.error.reason)]
        stages.add_testcase(case)
    parity = TestSuite("parity")
    for target_name, target in document.targets.items():
        case = TestCase(target_name, f"{name}.parity", 0.0)
        failed = [g for g in document.gates if g.name.startswith("parity.") and g.name.endswith(f".{target_name}")]
        broken = [g for g in failed if not g.holds]
        if broken:
            case.result = [Failure(_sentence(g), g.verdict) for g in broken]
        elif not target.proven:
            proof = f"; prove it with: {target.proof_command}" if target.proof_command else ""
            case.result = [Skipped(f"unproven here: {target.proof}{proof}")]
        case.system_out = _numbers(target)
        parity.add_testcase(case)
    gates = TestSuite("gates")
    for gate in document.gates:
        case = TestCase(gate.name, f"{name}.gates", 0.0)
        if not gate.holds:
            case.result = [Failure(_sentence(gate), gate.verdict)]
        elif gate.verdict == "unproven":
            case.result = [Skipped(_sentence(gate))]
        gates.add_testcase(case)
    xml = JUnitXml(name)
    validation: list[Any] = []
    if document.validation is not None:
        from edgec.report.validation_views import validation_suites

        validation = validation_suites(document.validation, name)
    for suite in (stages, parity, *validation, gates):
        xml.add_testsuite(suite)
    xml.update_statistics()
    text: Any = xml.tostring()
    return text.decode("utf-8") if isinstance(text, bytes) else str(text)


def _first(notes: list[str]) -> str:
    return notes[0] if notes else ""


def _sentence(gate: GateRecord) -> str:
    value = "not measured" if gate.value is None else f"{gate.value}"
    return f"{gate.name}: {value}, the limit is {gate.limit}{f' ({gate.note})' if gate.note else ''}"


def _numbers(target: TargetRecord) -> str:
    lines = [f"proof: {target.proof}", f"size: {format_bytes(target.bytes)}"]
    if target.parity is not None:
        p = target.parity
        lines += [f"cosine: {p.cosine:.8f}", f"SQNR: {p.sqnr_db:.1f} dB", f"relative error: {p.relative_error:.3e}"]
        lines += [] if p.off_by_n is None else [f"off by N: {p.off_by_n}"]
    return "\n".join(lines)
