"""`edgec doctor`: what this machine can build, tool by tool, and what to install."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from edgec.cli.options import JsonOption
from edgec.cli.out import out

if TYPE_CHECKING:
    from rich.table import Table

    from edgec.doctor import Diagnosis


def doctor(
    target: Annotated[
        list[str] | None,
        typer.Option("--target", "-t", help="Only this target, which must be buildable; may be given again."),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Also convert and run something small with each target.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Show what this machine can build, tool by tool, and what to install."""
    out.json = json
    from edgec.doctor import diagnose, require

    found = diagnose(target, probe=probe)
    if target:
        try:
            require(found)
        finally:
            out.show(_table(found))
    else:
        out.show(_table(found))
    out.document(found.to_dict())


def _table(found: Diagnosis) -> Table:
    from rich.table import Table

    from edgec.units import format_bytes

    machine = found.machine
    title = (
        f"{machine['system']}, Python {machine['python']}, {machine['cores']} cores, "
        f"{format_bytes(int(machine['memory']))} memory, {format_bytes(int(machine['disk_free']))} free here"
    )
    table = Table(title=title, title_justify="left")
    for column in ("", "state", "tool", "version", "needed for", "to install"):
        table.add_column(column, overflow="fold")
    for subject in (found.edgec, *found.targets):
        name, state = subject.name, subject.state
        for tool in subject.tools:
            absent = "missing" if tool.required else "not here"
            install = "" if tool.version else tool.install
            table.add_row(name, state, tool.name, tool.version or absent, tool.needed_for, install)
            name = state = ""
        if subject.problem:
            table.add_row(name, state, "", subject.problem, "", "")
        if subject.probe is not None:
            result = "works" if subject.probe.passed else "fails"
            table.add_row("", "", "probe", result, subject.probe.said, "")
        table.add_section()
    return table
