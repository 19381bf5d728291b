"""`edgec plan`: what would run, what is cached, and what it will cost. Runs nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgec.cli.options import JsonOption, RecipeArgument, SetOption, TargetOption, UntilOption
from edgec.cli.out import out

if TYPE_CHECKING:
    from rich.table import Table

    from edgec.plan import Plan


def plan(
    recipe: RecipeArgument,
    target: TargetOption = None,
    set_: SetOption = None,
    until: UntilOption = None,
    json: JsonOption = False,
) -> None:
    """Show what would run, what is cached, and what it will cost."""
    out.json = json
    from edgec.plan import make_plan
    from edgec.recipe import load_recipe
    from edgec.store import Store, default_root

    loaded = load_recipe(recipe, overrides=set_ or (), targets=target or ())
    made = make_plan(loaded, Store(default_root()), until=until)
    out.document(made.to_dict())
    out.show(_table(made))
    for tool in made.missing:
        out.progress(f"missing: {tool.name}, needed for {tool.needed_for}; install it with: {tool.install}")


def _table(plan: Plan) -> Table:
    from rich.table import Table

    from edgec.units import format_bytes

    table = Table(title=f"{plan.recipe.name}: what would run", title_justify="left")
    for column, justify in (("stage", "left"), ("does", "left"), ("size", "right"), ("peak memory", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for planned in plan.stages:
        about = "" if planned.cached else "~"  # an estimate, until the stage has run

        def size(value: int | None, about: str = about) -> str:
            return "?" if value is None else f"{about}{format_bytes(value)}"

        does = "cached" if planned.cached else "runs" if planned.key else "runs (needs what is before it)"
        table.add_row(planned.stage.id, does, size(planned.bytes), size(planned.peak_memory))
    return table
