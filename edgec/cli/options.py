"""Options that several commands share, said once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RecipeArgument = Annotated[Path, typer.Argument(help="The recipe, a YAML file.", metavar="RECIPE", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
TargetOption = Annotated[
    list[str] | None, typer.Option("--target", "-t", help="Only this target of the recipe; may be given again.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change the recipe, for example `seed=1` or `passes.prune.sparsity=0.3`."
    ),
]
UntilOption = Annotated[str | None, typer.Option("--until", metavar="STAGE", help="Stop after this stage.")]
