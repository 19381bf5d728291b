"""A target whose tool isn't on any machine."""

from __future__ import annotations

from edgec.context import Context
from edgec.model import Artifact, Program, Runner
from edgec.registry import Options, Tool, register_target


class AbsentOptions(Options):
    """None."""


def tools() -> list[Tool]:
    return [Tool("unobtainium-compiler", None, "apt-get install unobtainium", needed_for="the target `absent`")]


def _open(artifact: Artifact) -> Runner:
    raise AssertionError("nothing is ever converted, so nothing is opened")


@register_target("absent", tools=tools, open=_open)
def convert(program: Program, options: AbsentOptions, context: Context) -> Artifact:
    raise AssertionError("the missing tool must be found before this runs")
