"""Does the same recipe give the same bytes? Build it again from nothing, and compare digests stage by stage."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from edgec.build import Listener, Outcome, build
from edgec.errors import EdgecError, ExitCode, Reason
from edgec.recipe import Recipe
from edgec.store import Store


def check_reproducible(
    first: Outcome, recipe: Recipe, store: Store, listener: Listener, *, until: str | None
) -> EdgecError | None:
    """Build `recipe` in an empty store (downloads shared with `store`) and compare with `first`.

    Returns:
        None when every digest is the same; otherwise the error that names the first stage whose bytes differ.
    """
    root = Path(tempfile.mkdtemp(prefix="reproduce-", dir=store.root / "tmp"))
    try:
        (root / "store").mkdir()
        (root / "store" / "downloads").symlink_to(store.downloads.resolve())
        again = build(recipe, Store(root / "store"), out=root / "out", listener=listener, until=until)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if again.error is not None:
        return again.error
    for stage, digest in first.digests.items():
        if again.digests.get(stage) != digest:
            error = EdgecError(
                f"`{stage}` is not reproducible: {digest[:16]} the first time, "
                f"{str(again.digests.get(stage))[:16]} the second",
                hint="the stages before it gave the same bytes; something in it depends on time, order or threads",
                reason=Reason.NOT_REPRODUCIBLE,
            )
            error.exit_code = ExitCode.GATE_FAILED
            return error
    return None
