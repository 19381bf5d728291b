"""`edgec diff`: run two models on the same inputs, and show the first tensor at which they part."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgec.cli.options import JsonOption
from edgec.cli.out import out
from edgec.errors import ExitCode

if TYPE_CHECKING:
    from rich.table import Table

    from edgec.diff import Difference
    from edgec.diff_match import Pair

_NAME = 44
_HELP = "A target's folder in a bundle, an .onnx, .tflite or .mlpackage, or a Program."


def diff(
    a: Annotated[Path, typer.Argument(help=_HELP, show_default=False)],
    b: Annotated[Path, typer.Argument(help=_HELP, show_default=False)],
    recording: Annotated[
        Path | None, typer.Option("--recording", help="Inputs: a recording.safetensors, or the Program that has it.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Without a recording: the seed of random inputs.")] = 0,
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0, help="Equal up to this relative error, on the tensor's own scale.")
    ] = 1e-3,
    off_by: Annotated[int, typer.Option("--off-by", min=0, help="Or up to so many quantisation steps.")] = 1,
    show_all: Annotated[bool, typer.Option("--all", help="List every tensor that was compared.")] = False,
    json: JsonOption = False,
) -> None:
    """Run two models on the same inputs and show the first tensor at which they part."""
    out.json = json
    from edgec.diff import diff as compare
    from edgec.diff_match import Limits
    from edgec.diff_subject import load_recording, open_subject

    left, right = open_subject(a), open_subject(b)
    source = recording or left.recording or right.recording
    steps = load_recording(source).steps if source else None
    out.progress(f"{left.label} ({left.engine}) against {right.label} ({right.engine}), " + _inputs(source, seed))
    found = compare(left, right, steps, seed=seed, limits=Limits(tolerance, off_by))
    out.document({"a": str(a), "b": str(b), **found.to_dict()})
    for note in found.notes:
        out.progress(note)
    if show_all:
        out.show(_table("tensors", found.pairs, found))
    out.show(_table(f"outputs, the worst of {found.steps} steps", found.outputs, found))
    if found.parting is None:
        out.show("equal within the limits")
        return
    _explain(found)
    raise typer.Exit(int(ExitCode.PARITY_FAILED))


def _short(name: str) -> str:
    """The end of a name: converters put whole paths of modules in front (--json has them)."""
    return name if len(name) <= _NAME else f"…{name[-_NAME + 1 :]}"


def _inputs(source: Path | None, seed: int) -> str:
    return f"on {source}" if source else f"on random inputs of seed {seed}"


def _explain(found: Difference) -> None:
    parting = found.parting
    assert parting is not None
    op = "" if not parting.op_a else f" ({parting.op_a}{f' / {parting.op_b}' if parting.op_b else ''})"
    out.show(
        f"they part at step {parting.step}, signature `{parting.signature}`, "
        f"at tensor `{_short(parting.pair.a)}` / `{_short(parting.pair.b)}`{op}"
    )
    out.show(_table("there", (parting.pair,), found))
    if parting.agreeing:
        out.show(_table("what it was computed from, on which they agree", parting.agreeing[-6:], found))
    out.show(
        f"{len(found.pairs)} tensors paired, {sum(not found.limits.holds(p) for p in found.pairs)} of them differ; "
        f"{found.alone_a} only in a, {found.alone_b} only in b"
    )


def _table(title: str, pairs: tuple[Pair, ...], found: Difference) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("a", "b", "matched by", "relative error", "cosine", "SQNR dB", "off by", ""):
        table.add_column(column, justify="left" if column in ("a", "b", "matched by", "") else "right", overflow="fold")
    for pair in pairs:
        verdict = "equal" if found.limits.holds(pair) else "differs"
        names = _short(pair.a), _short(pair.b)
        how = pair.how + (" (transposed)" if pair.transposed else "")
        if pair.row is None:
            table.add_row(*names, how, "–", "–", "–", "–", pair.fault.strip())
            continue
        row = pair.row
        steps = "–" if row.off_by_n is None else str(row.off_by_n)
        table.add_row(
            *names, how, f"{row.relative_error:.2e}", f"{row.cosine:.6f}", f"{row.sqnr_db:.1f}", steps, verdict
        )
    return table
