"""`edgec build`: the whole chain."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgec.cli.options import JsonOption, RecipeArgument, SetOption, TargetOption, UntilOption
from edgec.cli.out import out

if TYPE_CHECKING:
    from edgec.build import Outcome
    from edgec.recipe import Recipe
    from edgec.store import Store


def build(
    recipe: RecipeArgument,
    target: TargetOption = None,
    set_: SetOption = None,
    until: UntilOption = None,
    force: Annotated[bool, typer.Option("--force", help="Run every stage, also those that are cached.")] = False,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Folder for the bundle and the reports. [default: out/<recipe name>]")
    ] = None,
    check_reproducible: Annotated[
        bool, typer.Option("--check-reproducible", help="Build a second time from nothing and compare every digest.")
    ] = False,
    json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Build a recipe: distil, prune, quantise, export, convert, prove, and bundle."""
    from edgec.ranks import rank

    out.json, out.quiet = json, quiet or rank() > 0
    from edgec.cli.progress import watch
    from edgec.recipe import load_recipe
    from edgec.store import Store, default_root

    loaded = load_recipe(recipe, overrides=set_ or (), targets=target or ())
    folder = out_dir or Path("out") / loaded.name
    store = Store(default_root())
    from edgec.build import build as run

    with watch(out) as listener:
        outcome = run(loaded, store, out=folder, listener=listener, until=until, force=force)
    if check_reproducible and outcome.error is None:
        _check_reproducible(outcome, loaded, store, until)
    if rank() == 0:
        _show(outcome, folder, until)


def _check_reproducible(outcome: Outcome, recipe: Recipe, store: Store, until: str | None) -> None:
    from edgec.cli.progress import watch
    from edgec.reproduce import check_reproducible

    out.progress("building a second time, from nothing")
    with watch(out) as listener:
        outcome.error = check_reproducible(outcome, recipe, store, listener, until=until)
    if outcome.error is None:
        out.progress(f"reproducible: {len(outcome.digests)} digests are the same")


def _show(outcome: Outcome, folder: Path, until: str | None) -> None:
    from edgec.report.ledger import render_build

    document = outcome.document
    out.document(document.to_json())
    out.show(render_build(document))
    if outcome.error is not None:
        if out.debug:
            for note in getattr(outcome.error, "__notes__", ()):
                out.progress(note)
        out.error(outcome.error)
        out.progress(f"  the report: {folder / 'report.html'}")
        raise typer.Exit(int(outcome.error.exit_code))
    if until is None:
        out.progress(f"bundle: {document.bundle}\nreport: {folder / 'report.html'}")
    else:
        out.progress(f"stopped after `{until}`, as asked; no bundle")
