"""A target that ships the ONNX file as it is, or spoils it on request."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from typing import Literal

import numpy as np
from pydantic import Field

from edgec.context import Context
from edgec.golden import OnnxRunner
from edgec.model import Artifact, Program, artifact_file
from edgec.registry import Options, Tool, register_target


class CopyOptions(Options):
    """What to spoil."""

    spoil: Literal["", "nothing-written", "proof", "weights", "random", "slow", "large", "layout"] = Field(
        "", description="what goes wrong; the last three with quantised programs only, not with their float twins"
    )


def tools() -> list[Tool]:
    return [Tool("cp", "1", "apt-get install coreutils")]


class SlowRunner(OnnxRunner):
    """Takes 20 ms more than it should."""

    def run(self, signature: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        time.sleep(0.02)
        return super().run(signature, inputs)


def _open(artifact: Artifact) -> OnnxRunner:
    kind = SlowRunner if artifact.details.get("slow") else OnnxRunner
    return kind({s.name: artifact.path / f"{s.name}.onnx" for s in artifact.signatures}, threads=1)


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
    spoilt = options.spoil if program.quantization is not None else ""
    if spoilt == "large":
        (context.out / "padding.bin").write_bytes(bytes(3_000_000))
        files.append(artifact_file(context.out, "padding.bin", "model"))
    proof = "none" if options.spoil == "proof" else "executed"
    counts = {"ops": 10, "layout_ops": 4 if spoilt == "layout" else 0}
    details = {"slow": spoilt == "slow"}
    artifact = Artifact("copy", context.out, tuple(files), program.signatures, counts, details, proof)
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
