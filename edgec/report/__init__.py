"""What a build says when it is over: one document (document.py), and its renderings for people and for machines."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgec.recipe import Recipe
    from edgec.report.document import BuildDocument


def write_reports(document: BuildDocument, out: Path) -> None:
    """Write `report.html`, `build.json`, `junit.xml` and `summary.md` into `out`, each whole or not at all.

    Raises:
        StoreError: `out` can't be written.
    """
    from edgec.report.html import render_html
    from edgec.report.junit import render_junit
    from edgec.report.markdown import render_markdown
    from edgec.store import OUTPUT_HINT, store_error

    texts = {
        "build.json": json.dumps(document.to_json(), indent=1, allow_nan=False) + "\n",
        "junit.xml": render_junit(document),
        "summary.md": render_markdown(document),
        "report.html": render_html(document),
    }
    try:
        for name, text in texts.items():
            temporary = out / f".{name}-{os.getpid()}"
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(out / name)
    except OSError as error:
        raise store_error(error, "writing the reports", hint=OUTPUT_HINT) from error


def papers(document: BuildDocument, recipe: Recipe, files: dict[str, str]) -> dict[str, str]:
    """The bundle's papers by name: edgec.lock and the SBOM. `files` are the bundle's SHA-256 by relative name."""
    from edgec.report.lock import NAME as LOCK
    from edgec.report.lock import inputs_of, make_lock
    from edgec.report.sbom import NAME as SBOM
    from edgec.report.sbom import make_sbom
    from edgec.stagekey import platform_facts

    lock = make_lock(document, inputs_of(recipe), files, platform_facts())
    return {LOCK: lock.to_text(), SBOM: make_sbom(document, lock)}
