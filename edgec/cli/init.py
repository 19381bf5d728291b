"""`edgec init`: a commented starter recipe."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from edgec.cli.out import out


def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.", metavar="RECIPE")] = Path("recipe.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a commented starter recipe, with a tiny model that builds as it stands."""
    from edgec.errors import UsageError
    from edgec.store import store_error

    if path.is_dir():
        raise UsageError(f"{path} is a folder", hint=f"name the file: edgec init {path / 'recipe.yaml'}")
    factory = path.with_name("model.py")
    for target in (path, factory):
        if target.exists() and not force:
            raise UsageError(f"{target} is already there", hint="name another file, or give --force")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files("edgec.cli").joinpath("starter.yaml").read_text())
        factory.write_text(files("edgec.cli").joinpath("starter_model.py").read_text())
    except OSError as error:
        raise store_error(
            error, "writing the starter recipe", hint="make that folder writable, or go to another one"
        ) from error
    out.show(f"wrote {path} and {factory}; next: edgec plan {path}")
