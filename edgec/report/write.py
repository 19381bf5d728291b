"""The reports of a build, written side by side into its output folder; and the papers that go into the bundle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from edgec.store import store_error

if TYPE_CHECKING:
    from edgec.recipe import Recipe
    from edgec.report.document import BuildDocument


def write_reports(document: BuildDocument, out: Path) -> None:
    """Write `build.json`, `report.html`, `junit.xml` and `summary.md`, each whole or not at all.

    Raises:
        StoreError: the folder can't be written.
    """
    from edgec.report.html import render_html
    from edgec.report.junit import render_junit
    from edgec.report.markdown import render_markdown

    texts = {
        "build.json": json.dumps(document.to_json(), indent=2) + "\n",
        "report.html": render_html(document),
        "junit.xml": render_junit(document),
        "summary.md": render_markdown(document),
    }
    try:
        for name, text in texts.items():
            temporary = out / f".{name}.tmp"
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(out / name)
    except OSError as error:
        raise store_error(error, "writing the reports") from error


def papers(document: BuildDocument, recipe: Recipe, files: dict[str, str]) -> dict[str, str]:
    """Text of `edgec.lock` and `sbom.cdx.json`, from the SHA-256 of each file of the bundle by name."""
    from edgec.report.lock import NAME as LOCK
    from edgec.report.lock import inputs_of, make_lock
    from edgec.report.sbom import NAME as SBOM
    from edgec.report.sbom import make_sbom
    from edgec.stagekey import platform_facts

    lock = make_lock(document, inputs_of(recipe), files, platform_facts())
    return {LOCK: lock.to_text(), SBOM: make_sbom(document, lock)}
