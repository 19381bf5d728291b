"""Programs for the Core ML tests beyond programs.py: any module as a Program, with torch's outputs as its golden."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgec.context import Context
from edgec.golden import Recording, Step, TorchRunner
from edgec.model import Program, Signature

if TYPE_CHECKING:
    import torch


def torch_program(
    folder: Path, module: torch.nn.Module, example: tuple[Any, ...], signature: Signature, inputs: list[dict[str, Any]]
) -> Program:
    """A Program of one signature without ONNX, which the Core ML target doesn't read."""
    import torch

    folder.mkdir(parents=True)
    dims = {name: torch.export.Dim(name, min=least, max=greatest) for name, least, greatest in signature.dynamic}
    shapes = tuple({i: dims[d] for i, d in enumerate(t.shape) if isinstance(d, str)} for t in signature.inputs)
    exported = torch.export.export(module.eval(), example, dynamic_shapes=shapes if dims else None, strict=False)
    torch.export.save(exported, folder / f"{signature.name}.pt2")
    runner = TorchRunner({signature.name: module}, (signature,))
    steps = [Step(signature.name, given, runner.run(signature.name, given)) for given in inputs]
    Recording(steps).save(folder / "recording.safetensors")
    program = Program(folder, (signature,), None, "tensors", 21, 1)
    program.save()
    return program


def context(folder: Path) -> Context:
    """A stage's surroundings, with empty folders."""
    out, work = folder / "out", folder / "work"
    out.mkdir(parents=True)
    work.mkdir()
    return Context(seed=0, threads=1, work=work, recipe_dir=folder, cache=folder, out=out)
