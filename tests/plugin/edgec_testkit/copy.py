"""A target that ships the ONNX file as it is, or spoils it on request."""

from __future__ import annotations

import shutil
from typing import Literal

from pydantic import Field

from edgec.context import Context
from edgec.golden import OnnxRunner
from edgec.model import Artifact, Program, artifact_file
from edgec.registry import Options, Tool, register_target


class CopyOptions(Options):
    """What to spoil."""

    spoil: Literal["", "nothing-written", "proof", "weights", "random"] = Field("", description="what goes wrong")


def tools() -> list[Tool]:
    return [Tool("cp", "1", "apt-get install coreutils")]


def _open(artifact: Artifact) -> OnnxRunner:
    return OnnxRunner({s.name: artifact.path / f"{s.name}.onnx" for s in artifact.signatures}, threads=1)


@register_target("copy", tools=tools, open=_open)
def convert(program: Program, options: CopyOptions, context: Context) -> Artifact:
    artifact = Artifact("copy", context.out, (), program.signatures)
    if options.spoil == "nothing-written":
        return artifact
    files = []
    for signature in program.signatures:
        name = f"{signature.name}.onnx"
        if options.spoil == "weights":
            _spoil(program.onnx_path(signature.name), context.out / name)
        else:
            shutil.copyfile(program.onnx_path(signature.name), context.out / name)
        files.append(artifact_file(context.out, name, "model"))
    if options.spoil == "random":
        import uuid

        (context.out / "manifest.txt").write_text(uuid.uuid4().hex)
    proof = "none" if options.spoil == "proof" else "executed"
    artifact = Artifact("copy", context.out, tuple(files), program.signatures, {"ops": 1, "layout_ops": 0}, {}, proof)
    artifact.save()
    return artifact


def _spoil(source: object, to: object) -> None:
    """A conversion that goes wrong quietly: every float weight becomes another one."""
    import numpy as np
    import onnx
    from onnx import numpy_helper

    model = onnx.load(str(source))
    for weight in model.graph.initializer:
        if weight.data_type == onnx.TensorProto.FLOAT:
            array = numpy_helper.to_array(weight)
            changed = np.flip(array.reshape(-1)).reshape(array.shape) * np.float32(-0.5)
            weight.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(changed), weight.name))
    onnx.save(model, str(to))
