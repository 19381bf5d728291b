"""A target's artefact, made and then measured: parity, metric, latency beside its float twin.

The same code measures every target, so that their numbers can be compared: the recording replayed through the
artefact's Runner against the golden, the task's metric through the same Runner, and latency of one step, timed in turns
with the float artefact so that a busy machine disturbs both alike.
"""

from __future__ import annotations

import shutil
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from edgec.context import Context, StageLog
from edgec.errors import ConversionError, Reason
from edgec.golden import Recording, Step, carrying, replay, zero_state
from edgec.limits import samples_of
from edgec.model import Artifact, Program, Runner
from edgec.parity import compare
from edgec.registry import TargetEntry
from edgec.tasks.base import Arrays, Task


@dataclass(frozen=True)
class Latency:
    """Milliseconds of one step: median and 95th percentile."""

    p50: float
    p95: float


def measure_target(
    entry: TargetEntry,
    program: Program,
    options: dict[str, Any],
    context: Context,
    *,
    task: Task,
    reference: Arrays,
    measure: dict[str, Any],
) -> dict[str, Any]:
    """Convert, then measure. Gives the target's part of build.json."""
    checked = entry.options.model_validate(options)
    context.progress(0, 4, "converting")
    with context.timed("converting"):
        artifact = entry.convert(program, checked, context)
    if not any(file.role == "model" for file in artifact.files):
        raise ConversionError(
            f"the target `{entry.name}` reported success without a model file",
            hint="that is a bug in the target",
            reason=Reason.EMPTY_OUTPUT,
        )
    result: dict[str, Any] = {
        "bytes": artifact.bytes,
        "parameters": program.parameters,
        "metrics": {},
        "samples": None,
        "proof": artifact.proof,
        "proof_command": artifact.proof_command,
        "proven": artifact.proof == "executed",
        "counts": artifact.counts,
        "details": {k: v for k, v in artifact.details.items() if k.startswith("report_")},
        "files": [asdict(f) for f in artifact.files],
        "parity": None,
        "latency_ms": None,
        "float_latency_ms": None,
        "float_bytes": None,
    }
    if artifact.proof == "none":
        return result

    context.progress(1, 4, "replaying the recorded inputs")
    recording = program.recording()
    with context.timed("loading"):
        runner = entry.open(artifact)
    steps = dict(program.quantization.output_steps) if program.quantization else {}
    with context.timed("replaying"):
        outputs = replay(runner, program.signatures, recording.steps)
    kept = {name for signature in program.signatures for name in signature.state_outputs} if runner.stateful else ()
    expected = [step.outputs for step in recording.steps]
    result["parity"] = asdict(compare(outputs, expected, steps, may_be_absent=kept))

    context.progress(2, 4, "measuring the metric")
    executed = artifact.proof == "executed"
    samples = samples_of(artifact.target, measure["target_samples"]) if executed else measure["evaluated_samples"]
    if samples:
        result["samples"] = samples
        with context.timed("evaluating"):
            result["metrics"] = task.evaluate(carrying(runner, program.signatures), reference or None, limit=samples)

    if artifact.proof == "executed":  # the time of a program evaluated op by op says nothing about a device
        context.progress(3, 4, "measuring latency")
        twin = program.baseline if measure["baseline"] and entry.twin else None
        _time(entry, program, twin, runner, recording, checked, context, measure["latency_runs"], result)
    return result


def _time(
    entry: TargetEntry,
    program: Program,
    twin: Program | None,
    runner: Runner,
    recording: Recording,
    options: Any,
    context: Context,
    runs: int,
    result: dict[str, Any],
) -> None:
    step = recording.steps[-1]
    contestants = [(runner, program)]
    folder = context.work / "float-artifact"
    if twin is not None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        quiet = Context(
            seed=context.seed,
            threads=context.threads,
            work=context.work,
            recipe_dir=context.recipe_dir,
            cache=context.cache,
            out=folder,
            log=StageLog(),  # what it says is about the twin, not about what ships
        )
        with context.timed("converting the float twin"):
            float_artifact: Artifact = entry.convert(twin, options, quiet)
        result["float_bytes"] = float_artifact.bytes
        contestants.append((entry.open(float_artifact), twin))
    with context.timed("timing"):
        times = _alternate([_call(r, p, step) for r, p in contestants], runs)
    result["latency_ms"] = asdict(_summary(times[0]))
    if twin is not None:
        result["float_latency_ms"] = asdict(_summary(times[1]))
        shutil.rmtree(folder)


def _call(runner: Runner, program: Program, step: Step) -> Any:
    """A function that runs one step again and again, on zero state."""
    signature = program.signature(step.signature)
    feeds = dict(step.inputs)
    if signature.state and not runner.stateful:
        feeds |= zero_state(signature)
    return lambda: runner.run(step.signature, feeds)


def _alternate(calls: list[Any], runs: int) -> list[list[float]]:
    """Milliseconds of each call, taken in turns after three warm-up rounds."""
    times: list[list[float]] = [[] for _ in calls]
    for i in range(runs + 3):
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            if i >= 3:
                taken.append((time.perf_counter() - start) * 1e3)
    return times


def _summary(times: list[float]) -> Latency:
    ordered = sorted(times)
    return Latency(statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))])
