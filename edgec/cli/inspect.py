"""`edgec inspect`: what is in a model file, a package or a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgec.cli.options import JsonOption
from edgec.cli.out import out


def inspect(
    path: Annotated[
        Path, typer.Argument(help="An .onnx, .tflite, .mlpackage, TVM library, GGUF, safetensors, or a bundle.")
    ],
    json: JsonOption = False,
) -> None:
    """Show what is in a model file: operations, shapes, dtypes, sizes, and what is quantised and how."""
    out.json = json
    from edgec.inspection.inspect import inspect_path

    found = inspect_path(path)
    out.document(found.to_dict())
    if not json:
        from edgec.inspection.render import render

        out.show(render(found))
