"""`edgec schema`: JSON Schema of the recipe, for editors; or of what `build --json` prints."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer


def schema(
    what: Annotated[Literal["recipe", "build"], typer.Argument(help="Of the recipe, or of `build --json`.")] = "recipe",
) -> None:
    """Print a JSON Schema."""
    if what == "build":
        from edgec.report.document import schema as build_schema

        print(json.dumps(build_schema(), indent=2))
    else:
        from edgec.recipe import recipe_schema

        print(json.dumps(recipe_schema(), indent=2))
