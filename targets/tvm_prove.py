"""Is the aarch64 library right? Recorded steps through it under qemu against the golden; or a plain "unproven".

One step of each signature is enough to run every kernel: its last one, from the state that the host library has by
then. Emulation is some 50 times slower than this machine, so the cheapest signature goes first, and tells what the
others would take.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edgec.context import Context
from edgec.errors import ParityError, ToolMissing
from edgec.golden import Arrays, Step, zero_state
from edgec.model import Artifact, Program

if TYPE_CHECKING:
    from .tvm import TvmOptions
    from .tvm_cross import ArmHost

TOLERANCE = 1e-3  # relative error of a float32 program: sums in another order differ by some 1e-6 of the output's scale
STEPS_OFF = 2  # quantised outputs may fall on the other side of a rounding, and carry that on: 2 of 255 steps
FIRST_LIMIT = 1200  # seconds for the cheapest signature, whose time nobody knows yet
SLACK = 10  # a signature that was admitted may take this many times what was predicted: the machine may be busy


@dataclass(frozen=True)
class Moment:
    """A recorded step, the state in front of it, and the seconds that the host library took."""

    step: Step
    state: Arrays
    seconds: float


def prove_aarch64(
    artifact: Artifact, library: dict[str, Any], program: Program, options: TvmOptions, context: Context
) -> None:
    """Fill in `library["proof"]`, the signatures that were run and the worst relative error.

    Raises:
        ParityError: the library computes something else than the golden.
        ConversionError: it crashed.
    """
    from .tvm_cross import arm_host

    if not options.verify_cross:
        return _unproven(library, "`verify_cross` is off", context)
    if not library["files"][0].endswith(".so"):
        return _unproven(library, "it isn't linked", context)
    if any(s.dynamic for s in program.signatures):
        return _unproven(library, "its shapes are dynamic", context)
    try:
        host = arm_host(context.cache)
    except ToolMissing as error:
        return _unproven(library, f"{error.message} ({error.hint})", context)
    return _run(artifact, library, program, options.verify_seconds, host, context)


def _run(
    artifact: Artifact, library: dict[str, Any], program: Program, budget: float, host: ArmHost, context: Context
) -> None:
    from .tvm_cross import run_aarch64

    moments = sorted(_moments(artifact, program), key=lambda m: m.seconds)
    steps = dict(program.quantization.output_steps) if program.quantization else {}
    worst, proven, slowdown = 0.0, [], 0.0
    for i, moment in enumerate(moments):
        name = moment.step.signature
        expected = moment.seconds * slowdown
        if i and expected > budget:
            context.warn(
                f"`{name}` of {library['files'][0]} is unproven here: it would take some {expected:.0f} s under "
                f"qemu, more than `verify_seconds`"
            )
            continue
        context.progress(i, len(moments), f"running `{name}` under qemu")
        start = time.monotonic()
        limit = max(SLACK * expected, FIRST_LIMIT)
        outputs = run_aarch64(artifact, library["files"][0], moment.step, moment.state, host, limit)
        slowdown = max(slowdown, (time.monotonic() - start) / max(moment.seconds, 1e-4))
        worst = max(worst, _compare(outputs, moment.step.outputs, steps, library["files"][0]))
        proven.append(name)
    whole = len(proven) == len(moments)
    library |= {
        "proof": "executed under qemu-user" if whole else "partly executed under qemu-user",
        "proven_signatures": proven,
        "relative_error": worst,
    }
    context.note(f"{library['triple']}: {', '.join(proven)} under qemu agree with the golden to {worst:.1e}")


def _moments(artifact: Artifact, program: Program) -> list[Moment]:
    """The last recorded step of each signature, with the state that the host library reaches in front of it."""
    from .tvm_runner import TvmRunner

    runner = TvmRunner(artifact)
    recording = program.recording()
    last = {step.signature: i for i, step in enumerate(recording.steps)}
    found: list[Moment] = []
    state: Arrays = {}
    for i, step in enumerate(recording.steps):
        signature = program.signature(step.signature)
        if signature.state and not state:
            state = zero_state(signature)
        before = {k: v.copy() for k, v in state.items()} if last[step.signature] == i else {}
        start = time.perf_counter()
        outputs = runner.run(step.signature, step.inputs | state)
        seconds = time.perf_counter() - start
        state = {name: outputs[out] for name, out in signature.state}
        if last[step.signature] == i:
            found.append(Moment(step, before, seconds))
    return found


def _compare(outputs: Arrays, expected: Arrays, steps: dict[str, float], file: str) -> float:
    worst = 0.0
    for name, golden in expected.items():
        difference = _relative_error(outputs[name], golden)
        limit = max(TOLERANCE, STEPS_OFF * _relative_step(steps.get(name), golden))
        if not difference <= limit:
            raise ParityError(
                f"tvm: {file} under qemu differs from the golden: `{name}` has relative error {difference:.2g}, "
                f"at most {limit:.2g} is rounding",
                hint="compare the host library with `edgec diff`; if that agrees, it is a compiler's bug for Arm",
            )
        worst = max(worst, difference)
    return worst


def _unproven(library: dict[str, Any], why: str, context: Context) -> None:
    context.warn(f"{library['files'][0]} ({library['triple']}) is unproven here: {why}")


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
