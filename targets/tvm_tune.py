"""MetaSchedule: try other schedules on this machine, and keep those that beat the built-in ones.

The most expensive kernels are tuned first, with an equal share of the trials each. What was found is kept in a folder:
MetaSchedule's own database, and `kept.json` with the two times of every kernel and which schedule won. A kernel that is
in there is not tuned again, so a build with a saved database repeats bit by bit.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgec.context import Context
from edgec.errors import ConversionError
from edgec.golden import zero_state

from . import tvm_kernels as kernels
from .tvm_build import last_line
from .tvm_schedule import PRODUCT, schedule

if TYPE_CHECKING:
    from edgec.model import Program

    from .tvm_import import Imported

SHARE = 32  # trials per kernel: fewer find nothing, more give little
TIMEOUT = 300  # seconds for one candidate to build or run: its process imports TVM first, which takes 25 s
RUNS = 15  # of each of the two schedules, taken in turns
MARGIN = 0.97  # a tuned schedule must be at least 3 % faster: less is noise


@dataclass(frozen=True)
class Outcome:
    """A kernel's milliseconds with the built-in and with the tuned schedule, and whether the latter is used."""

    kernel: str
    builtin_ms: float
    tuned_ms: float | None  # None: no candidate ran
    kept: bool


def tune(module: Any, target: Any, trials: int, folder: Path, context: Context) -> tuple[Any, list[Outcome]]:
    """The module with tuned schedules where they won, and what was measured.

    Raises:
        ConversionError: MetaSchedule failed.
    """
    import tvm_ffi

    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "kept.json"
    known: dict[str, dict[str, Any]] = json.loads(record.read_text()) if record.is_file() else {}
    database = _database(folder)
    tasks = _tasks(module)
    budget = trials
    outcomes = []
    for i, (variable, function) in enumerate(tasks):
        key = f"{tvm_ffi.structural_hash(function) % 2**64:016x}"
        if key not in known and budget > 0:
            share = min(SHARE, budget)
            budget -= share
            context.progress(i, len(tasks), f"tuning {variable.name_hint}: {share} trials")
            outcome = _tune_one(variable.name_hint, function, target, share, database, context)
            known[key] = asdict(outcome)
            record.write_text(json.dumps(known, indent=1, sort_keys=True))
        if key in known:
            outcome = Outcome(**known[key])
            outcomes.append(outcome)
            tuned = _tuned(function, target, database) if outcome.kept else None
            if tuned is not None:
                module[variable] = tuned.with_attrs(function.attrs).with_attr("tirx.is_scheduled", True)
    return module, outcomes


def compare_builds(builtin: Any, tuned: Any, imported: Imported, program: Program) -> tuple[float, float]:
    """Median milliseconds of the recording's last step with either build, on zero state, in turns."""
    import tvm
    from tvm import relax

    step = program.recording().steps[-1]
    signature = program.signature(step.signature)
    feeds = step.inputs | zero_state(signature)
    arguments = [tvm.runtime.tensor(np.asarray(feeds[t.name])) for t in signature.inputs]
    parameters = [tvm.runtime.tensor(imported.arrays[n]) for n in imported.functions[signature.name]]
    functions = [relax.VirtualMachine(e, tvm.cpu())[signature.name] for e in (builtin, tuned)]
    before, after = _alternate(functions, (*arguments, parameters))
    return before, after


def _database(folder: Path) -> Any:
    from tvm.s_tir import meta_schedule

    return meta_schedule.database.JSONDatabase(str(folder / "workloads.json"), str(folder / "records.json"))


def _tasks(module: Any) -> list[tuple[Any, Any]]:
    """The kernels worth tuning (products and convolutions), the most arithmetic first."""
    from tvm import tirx
    from tvm.s_tir.analysis import estimate_tir_flops

    found = []
    for variable, function in module.functions_items():
        if not isinstance(function, tirx.PrimFunc) or function.attrs.get("tirx.is_scheduled", 0):
            continue
        text = function.script()
        if any(f'"{name}"' in text for name in (kernels.DENSE, kernels.CONV, kernels.DEPTHWISE, PRODUCT)):
            flops = estimate_tir_flops(_module(function))
            found.append((-flops, variable.name_hint, variable, function))
    return [(variable, function) for _, _, variable, function in sorted(found, key=lambda t: t[:2])]


def _module(function: Any) -> Any:
    import tvm

    return tvm.IRModule({"main": function.with_attr("global_symbol", "main")})


def _tune_one(name: str, function: Any, target: Any, trials: int, database: Any, context: Context) -> Outcome:
    from tvm.s_tir import meta_schedule

    try:
        meta_schedule.tune_tir(
            mod=_module(function),
            target=target,
            work_dir=str(context.work / "tuning-logs"),
            max_trials_global=trials,
            num_trials_per_iter=min(trials, 16),
            builder=meta_schedule.builder.LocalBuilder(timeout_sec=TIMEOUT),
            runner=meta_schedule.runner.LocalRunner(timeout_sec=TIMEOUT),
            database=database,
            strategy="replay-trace",  # random sampling: a share is too small for the evolutionary search to learn from
            cost_model="none",
            seed=context.seed,
        )
    except Exception as error:
        raise ConversionError(
            f"tvm: tuning {name} failed: {last_line(error)}", hint="build with `tune: {trials: 0}`"
        ) from error
    builtin = schedule(function, target)
    tuned = _tuned(function, target, database)
    if tuned is None:
        return Outcome(name, _time([builtin], target)[0], None, False)
    before, after = _time([builtin, tuned], target)
    return Outcome(name, before, after, after < before * MARGIN)


def _tuned(function: Any, target: Any, database: Any) -> Any | None:
    found = database.query_schedule(_module(function), target, "main")
    return None if found is None else found.mod["main"]


def _time(functions: list[Any], target: Any) -> list[float]:
    """Median milliseconds of each function on random data, in turns."""
    import tvm

    rng = np.random.default_rng(0)
    arguments = []
    for buffer in functions[0].params:
        shape, dtype = tuple(int(d) for d in buffer.shape), str(buffer.dtype)
        array = rng.integers(-4, 5, shape).astype(dtype)
        arguments.append(tvm.runtime.tensor(array))
    return _alternate([tvm.compile(_module(f), target=target)["main"] for f in functions], arguments)


def _alternate(functions: list[Any], arguments: Any) -> list[float]:
    times: list[list[float]] = [[] for _ in functions]
    for i in range(RUNS + 3):
        for function, taken in zip(functions, times, strict=True):
            start = time.perf_counter()
            function(*arguments)
            if i >= 3:
                taken.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(t) for t in times]
