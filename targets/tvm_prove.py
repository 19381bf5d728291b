"""Is the aarch64 library right? Recorded steps through it under qemu against the golden; or a plain "unproven"."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from edgec.context import Context
from edgec.errors import ParityError, ToolMissing
from edgec.model import Artifact, Program

if TYPE_CHECKING:
    from .tvm import TvmOptions

TOLERANCE = 1e-3  # relative error of a float32 program: sums in another order differ by some 1e-6 of the output's scale
STEPS_OFF = 2  # quantised outputs may fall on the other side of a rounding, and carry that on: 2 of 255 steps


def prove_aarch64(
    artifact: Artifact, library: dict[str, Any], program: Program, options: TvmOptions, context: Context
) -> None:
    """Fill in `library["proof"]` and its numbers.

    Raises:
        ParityError: the library computes something else than the golden.
        ConversionError: it crashed.
    """
    from .tvm_cross import arm_host, run_aarch64

    if not options.verify_cross:
        _unproven(library, "`verify_cross` is off", context)
        return
    if not library["files"][0].endswith(".so"):
        _unproven(library, "it isn't linked", context)
        return
    try:
        host = arm_host(context.cache)
    except ToolMissing as error:
        _unproven(library, f"{error.message} ({error.hint})", context)
        return
    recording = program.recording()
    steps = min(options.verify_steps, len(recording.steps))
    context.progress(0, 1, f"running {steps} recorded steps under qemu")
    start = time.monotonic()
    outputs = run_aarch64(artifact, library["files"][0], recording, steps, host)
    steps_of = dict(program.quantization.output_steps) if program.quantization else {}
    worst = 0.0
    for got, step in zip(outputs, recording.steps[:steps], strict=True):
        for name, array in got.items():
            difference = _relative_error(array, step.outputs[name])
            limit = max(TOLERANCE, STEPS_OFF * _relative_step(steps_of.get(name), step.outputs[name]))
            if not difference <= limit:
                raise ParityError(
                    f"tvm: {library['files'][0]} under qemu differs from the golden: `{name}` has relative error "
                    f"{difference:.2g}, at most {limit:.2g} is rounding",
                    hint="compare the host library with `edgec diff`; if that agrees, it is a compiler's bug for Arm",
                )
            worst = max(worst, difference)
    library |= {"proof": "executed under qemu-user", "relative_error": worst, "steps": steps}
    context.note(
        f"{library['triple']}: {steps} recorded steps under qemu agree with the golden to {worst:.1e} "
        f"({time.monotonic() - start:.0f} s)"
    )


def _unproven(library: dict[str, Any], why: str, context: Context) -> None:
    context.warn(f"tvm: {library['files'][0]} ({library['triple']}) is unproven here: {why}")


def _relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """‖got − expected‖ / ‖expected‖; infinite where something isn't finite."""
    a, b = got.astype(np.float64), expected.astype(np.float64)
    if not np.isfinite(a).all():
        return float("inf")
    scale = float(np.linalg.norm(b))
    return float(np.linalg.norm(a - b)) / (scale if scale > 0 else 1.0)


def _relative_step(step: float | None, expected: np.ndarray) -> float:
    """One quantisation step in every element, on the scale of the relative error."""
    if step is None:
        return 0.0
    scale = float(np.linalg.norm(expected.astype(np.float64)))
    return step * float(np.sqrt(expected.size)) / scale if scale > 0 else 0.0
