"""The renderings say what the document says: terminal, HTML, JUnit, Markdown."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from junitparser import JUnitXml
from report_samples import sample
from rich.console import Console

from edgec.errors import StoreError
from edgec.report import write_reports
from edgec.report.document import BuildDocument, ErrorRecord, StageRecord
from edgec.report.html import render_html
from edgec.report.junit import render_junit
from edgec.report.ledger import render_build
from edgec.report.markdown import render_markdown

FAILING = {"max_layout_ops": 1, "proven": ["coreml", "tflite"], "compare": ["distill.top1 > distill.alone_top1"]}
EVIL = "<script>alert('x')</script>|`"


def terminal(document: BuildDocument, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(render_build(document))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def evil_document() -> BuildDocument:
    document = sample()
    document.ledger[1].notes.append(EVIL)
    document.ledger[1].warnings.append(EVIL)
    document.ledger[1].stage = EVIL
    document.targets[EVIL] = document.targets["tflite"]
    document.error = ErrorRecord(code=5, reason="converter-failed", message=EVIL, hint=EVIL)
    assert document.recipe is not None
    document.recipe.name = EVIL
    return document


def test_ledger_fits_100_columns_and_tells_all() -> None:
    text = terminal(sample(FAILING))
    assert max(len(line) for line in text.splitlines()) <= 100
    for part in ("distill", "unchanged", "128×", "+0.0125", "900 MB", "evaluated", "max_layout_ops.tflite", "[gate]"):
        assert part in text
    assert "…" not in text  # nothing was cut
    assert "`fc` was left in float" in text and "prove it with: edgec diff" in text


def test_ledger_says_where_the_minutes_went() -> None:
    document = sample()
    document.ledger[-1].timings = {"converting": 71.0, "evaluating": 8.0, "replaying": 0.5}
    text = terminal(document)
    assert "Longest: tflite converting 71 s, tflite evaluating 8.0 s" in text and "replaying" not in text
    assert "converting 71 s, evaluating 8.0 s, replaying 0.5 s" in render_html(document)


def test_ledger_names_the_bundle() -> None:
    assert "The bundle lies in out/fashion-mnist" in terminal(sample())


def test_ledger_of_a_build_that_died_early() -> None:
    document = BuildDocument(
        status="failed",
        exit_code=5,
        ledger=[StageRecord(stage="source", kind="source", verdict="failed", notes=["no [such] file"])],
        error=ErrorRecord(code=5, reason="converter-failed", message="source: no [such] file"),
    )
    text = terminal(document)
    assert "failed" in text and "converter-failed" in text and "bundle" not in text


class Page(HTMLParser):
    """Collects what a page would fetch or run, and whether its tags nest."""

    VOID = frozenset({"meta", "link", "img", "br", "hr", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.open: list[str] = []
        self.seen: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.outside += [v or "" for k, v in attrs if k in ("src", "href", "onload", "onclick")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_whole_and_self_contained() -> None:
    text = render_html(sample(FAILING))
    page = Page(text)
    assert page.open == [] and page.outside == [] and "script" not in page.seen
    assert "url(" not in text and "@import" not in text
    assert page.seen.count("svg") == 4 and "prefers-color-scheme: dark" in text
    for part in (
        "fashion-mnist",
        "failed · exit code 3",
        "max_layout_ops.tflite",
        "pruned groups",
        "torch 2.13.0",
        "CONV_2D 12, ADD 3",
    ):
        assert part in text


def test_html_puts_what_broke_first() -> None:
    text = render_html(sample(FAILING))
    gates = text[text.index("<h2>Gates</h2>") :]
    verdicts = re.findall(r'pill \w+">(pass|fail|unproven)<', gates)
    assert verdicts == sorted(verdicts, key=["fail", "unproven", "pass"].index) and verdicts[0] == "fail"


def test_html_escapes_whatever_the_document_holds() -> None:
    text = render_html(evil_document())
    assert "<script" not in text and "&lt;script&gt;" in text
    assert Page(text).open == []


def test_bars_are_as_long_as_their_numbers() -> None:
    text = render_html(sample())
    chart = text[text.index('aria-label="size and metric by stage"') :].split("</svg>")[0]
    widths = [float(w) for w in re.findall(r'class="bar(?: pale)?" [^>]*width="([\d.]+)"', chart)]
    assert widths[0] / widths[1] == pytest.approx(8.0, rel=0.01)  # 8 MB and 1 MB
    assert len(widths) == 6


def test_html_of_a_build_that_died_early_renders() -> None:
    text = render_html(
        BuildDocument(
            status="failed", exit_code=2, error=ErrorRecord(code=2, reason="bad-recipe", message="no such key")
        )
    )
    assert "no such key" in text and Page(text).open == []


def test_junit_has_a_case_for_each_stage_target_and_gate() -> None:
    xml = JUnitXml.fromstring(render_junit(sample(FAILING)).encode())
    cases = {(suite.name, case.name): case for suite in xml for case in suite}
    assert ("stages", "quantize") in cases and ("gates", "max_layout_ops.tflite") in cases
    assert cases["parity", "coreml"].is_skipped  # evaluated, not executed: never green
    assert cases["parity", "tflite"].is_passed
    assert cases["gates", "max_layout_ops.tflite"].is_failure
    assert cases["gates", "proven.coreml"].is_failure  # unproven, and asked for
    assert cases["gates", "proven.tflite"].is_passed
    assert xml.failures == 4 and xml.skipped == 1 and xml.errors == 0


def test_junit_skips_a_default_that_had_nothing_to_measure() -> None:
    xml = JUnitXml.fromstring(render_junit(sample(metric=None)).encode())
    [case] = [c for suite in xml for c in suite if c.name == "max_drop"]
    assert case.is_skipped


def test_junit_shows_a_parity_failure_at_its_target() -> None:
    xml = JUnitXml.fromstring(render_junit(sample({"parity": {"targets": {"tflite": {"cosine": 1.0}}}})).encode())
    cases = {(suite.name, case.name): case for suite in xml for case in suite}
    assert cases["parity", "tflite"].is_failure and cases["parity", "onnxruntime"].is_passed


@pytest.mark.parametrize("ledger", [[], [StageRecord(stage="tflite", kind="target", verdict="failed", notes=["boom"])]])
def test_junit_of_a_failed_build_is_never_green(ledger: list[StageRecord]) -> None:
    error = ErrorRecord(code=5, reason="converter-failed", message="boom")
    xml = JUnitXml.fromstring(
        render_junit(BuildDocument(status="failed", exit_code=5, ledger=ledger, error=error)).encode()
    )
    assert xml.errors == 1 and xml.tests == 1


def test_markdown_leads_with_what_broke() -> None:
    text = render_markdown(sample(FAILING))
    assert text.startswith("## fashion-mnist: failed ❌")
    opened = text.split("<details>")[0]
    assert "`max_layout_ops.tflite`" in opened and "`proven.coreml`" in opened and "`max_drop.tflite`" not in opened
    assert "prove it with `edgec diff" in text and "`fc` was left in float" in text
    for line in (line for line in text.splitlines() if line.startswith("| ")):
        assert line.endswith(" |")


def test_markdown_escapes_what_would_break_it() -> None:
    text = render_markdown(evil_document())
    assert "<script" not in text and "\\|" in text


def test_reports_are_written_whole(tmp_path: Path) -> None:
    document = sample()
    write_reports(document, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["build.json", "junit.xml", "report.html", "summary.md"]
    assert json.loads((tmp_path / "build.json").read_text()) == json.loads(json.dumps(document.to_json()))


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="writing the reports"):
        write_reports(sample(), tmp_path / "absent")
