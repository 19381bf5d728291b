"""A validation for people, and for CI systems."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.markup import escape
from rich.text import Text

from edgec.report.ledger import new_table
from edgec.units import format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from edgec.report.validation import FindingRecord, Validation

_STYLES = {"pass": "green", "fail": "bold red", "unproven": "yellow", "reported": "dim"}


def render_validation(document: Validation) -> RenderableType:
    """One table an engine, and what its failures point to."""
    parts: list[RenderableType] = []
    for name, target in document.targets.items():
        table = new_table(f"{name}: {target.tokens:,} tokens of text, {format_seconds(target.seconds)}")
        table.add_column("check", no_wrap=True)
        table.add_column("against", no_wrap=True)
        table.add_column("value", justify="right", no_wrap=True)
        table.add_column("limit", justify="right", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
        table.add_column("", overflow="fold", ratio=1)
        for finding in target.findings:
            verdict = "unproven (required)" if finding.verdict == "unproven" and finding.required else finding.verdict
            table.add_row(
                finding.check,
                escape(finding.reference or "itself"),
                number(finding.value),
                limit_text(finding),
                Text(verdict, style=_STYLES[finding.verdict]),
                escape(finding.message),
            )
        parts.append(table)
        parts += [Text(f"→ {line}", style="yellow") for line in target.diagnosis]
    parts += [Text(f"{name}: {what}", style="dim") for name, what in document.references.items()]
    parts += [Text(f"! {note}", style="yellow") for note in document.notes]
    ending = Text("\nValid", style="bold green") if document.error is None else Text("\nFailed", style="bold red")
    parts.append(ending.append(f" in {format_seconds(document.seconds)}.", style="default"))
    return Group(*parts)


def limit_text(finding: FindingRecord) -> str:
    """A limit with its direction."""
    return "–" if finding.limit is None else f"{'≥' if finding.least else '≤'} {number(finding.limit)}"


def number(value: float | int | None) -> str:
    """Four digits."""
    if value is None:
        return "–"
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def validation_suites(document: Validation, name: str) -> list[Any]:
    """JUnit: a suite an engine, a case a check. Unproven is skipped, and a failure where it was required."""
    from junitparser import Failure, Skipped, TestCase, TestSuite

    suites = []
    for target_name, target in document.targets.items():
        suite = TestSuite(f"validate.{target_name}")
        for finding in target.findings:
            against = f" against {finding.reference}" if finding.reference else ""
            case = TestCase(f"{finding.check}{against}", f"{name}.validate.{target_name}", 0.0)
            if not finding.holds:
                case.result = [Failure("\n".join([finding.sentence(), *target.diagnosis]), finding.verdict)]
            elif finding.verdict == "unproven":
                case.result = [Skipped(finding.message)]
            case.system_out = f"{number(finding.value)} {limit_text(finding)}: {finding.message}"
            suite.add_testcase(case)
        suites.append(suite)
    return suites


def render_validation_junit(document: Validation) -> str:
    """The XML text of `edgec validate --junit`."""
    from junitparser import Error, JUnitXml, TestCase, TestSuite

    name = document.name or "edgec"
    xml = JUnitXml(name)
    for suite in validation_suites(document, name):
        xml.add_testsuite(suite)
    if document.error is not None and not document.targets:
        suite, case = TestSuite("validate"), TestCase("validate", f"{name}.validate", 0.0)
        case.result = [Error(document.error.message, document.error.reason)]
        suite.add_testcase(case)
        xml.add_testsuite(suite)
    xml.update_statistics()
    text: Any = xml.tostring()
    return text.decode("utf-8") if isinstance(text, bytes) else str(text)


def finite(value: float | int | None) -> float | int | None:
    """JSON has neither NaN nor infinity."""
    return None if value is None or not math.isfinite(value) else value
