"""One stage in a process of its own, seen from both sides.

A converter that crashes, hangs on to memory or prints pages of warnings does so in here: the parent gets progress as
JSON lines through a pipe, an answer file, and everything else in a log. `run_stage` is the parent's side;
`python -m edgec.worker REQUEST FD` the child's.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgec.errors import ConversionError, EdgecError, Reason, from_dict
from edgec.ranks import without_ranks
from edgec.stages import Request
from edgec.store import store_error

Event = dict[str, Any]
LOG_TAIL = 8  # lines of the child's own output that an error quotes

_QUIET = {
    "PYTHONHASHSEED": "0",  # some converters order operations by the hash of a name
    "PYTHONWARNINGS": "ignore",
    "SOURCE_DATE_EPOCH": "0",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "JAX_PLATFORMS": "cpu",
    # Threads that spin at barriers starve each other as soon as a core is taken: ten times slower on a busy machine.
    "OMP_WAIT_POLICY": "PASSIVE",
}

# Passes allocate the same activations in every step. By default glibc gives much of that memory back to the system and
# takes it again, a page fault for every 4 KiB: with this a training step takes a tenth to a third less time, for the
# same bits; with a threshold of 32 MiB, the most that `mallopt` takes, half of that.
_KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # transparent huge pages, where the system leaves the choice
}


def run_stage(request: Request, folder: Path, on_event: Callable[[Event], None]) -> dict[str, Any]:
    """Run a stage in a child process and wait for it.

    Args:
        request: what to run; its `out` must exist and be empty.
        folder: where the request, the answer and the log go; must exist.
        on_event: called with each progress event.

    Returns:
        `{"result": …, "log": …, "seconds": float, "peak_memory": bytes}`.

    Raises:
        EdgecError: the child's own, or a ConversionError saying how it died, with the last lines that it printed.
    """
    request_path, log_path = folder / "request.json", folder / "log.txt"
    request_path.write_text(json.dumps(asdict(request)))
    (folder / "scratch").mkdir(exist_ok=True)
    read, write = os.pipe()
    environment = dict(os.environ) if request.distributed else without_ranks(dict(os.environ))
    environment |= _QUIET
    environment |= {"OMP_NUM_THREADS": str(request.threads), "TMPDIR": str(folder / "scratch")}
    if request.kind == "pass":
        environment = _KEEP_MEMORY | environment  # what the user has set, stays
    start = time.monotonic()
    with log_path.open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "edgec.worker", str(request_path), str(write)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(write,),
            env=environment,
            process_group=0,  # a group of its own, so that a compiler or pip that it has started ends with it
        )
    os.close(write)
    try:
        with os.fdopen(read, encoding="utf-8") as events:
            for line in events:
                on_event(json.loads(line))
        status = child.wait()
    except BaseException:  # Ctrl-C, or a bug in the caller: the child must not outlive the build
        _kill_group(child)
        raise
    answer_path = folder / "answer.json"
    if not answer_path.is_file():
        raise _death(request, status, log_path)
    answer: dict[str, Any] = json.loads(answer_path.read_text())
    if "error" in answer:
        error = from_dict(answer["error"])
        if answer.get("traceback"):
            error.add_note(answer["traceback"])
        raise error
    return answer | {"seconds": time.monotonic() - start}


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _death(request: Request, status: int, log_path: Path) -> EdgecError:
    """The error for a child that left no answer."""
    tail = " | ".join(line for line in log_path.read_text(errors="replace").splitlines()[-LOG_TAIL:] if line.strip())
    said = f"; its last words: {tail[-600:]}" if tail else ""
    if status == -signal.SIGKILL:
        return ConversionError(
            f"{request.id}: the process was killed, most likely because memory ran out{said}",
            hint="`edgec plan` shows the predicted peak memory; close other programs, or build fewer targets at a time",
            reason=Reason.OUT_OF_MEMORY,
        )
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
    return ConversionError(
        f"{request.id}: the process died with {how}{said}",
        hint="a crash of a converter, not of edgec; `exclude:` the part it names, or leave this target out",
        reason=Reason.CONVERTER_CRASHED,
    )


def _die_with_parent() -> None:
    """Linux: be killed when the parent dies, even by SIGKILL; elsewhere a killed build's stage runs to its end."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def main() -> None:
    """The child: run the request, write the answer."""
    _die_with_parent()
    request_path, events_fd = Path(sys.argv[1]), int(sys.argv[2])
    request = Request(**json.loads(request_path.read_text()))
    with os.fdopen(events_fd, "w", encoding="utf-8") as events:
        answer = _answer(request, events)
    temporary = request_path.with_name("answer.tmp")
    temporary.write_text(json.dumps(answer))
    temporary.rename(request_path.with_name("answer.json"))
    # The interpreter's own end can crash in a converter's destructors; what counts has been written.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _answer(request: Request, events: Any) -> dict[str, Any]:
    from edgec.context import Context
    from edgec.stages import prepare_torch

    if request.kind == "validate":  # which builds on everything else, the other kinds of stages among it
        from edgec.validation.stage import run
    else:
        from edgec.stages import run

    context = Context(
        seed=request.seed,
        threads=request.threads,
        work=Path(request.work),
        recipe_dir=Path(request.recipe_dir),
        cache=Path(request.cache),
        out=Path(request.out),
        events=events,
    )
    try:
        prepare_torch(request.seed, request.threads)
        result = run(request, context)
    except EdgecError as error:
        if not error.message.startswith(f"{request.id}:"):
            error.message = f"{request.id}: {error.message}"
        return {"error": error.to_dict(), "traceback": traceback.format_exc()}
    except MemoryError:
        memory = ConversionError(f"{request.id}: memory ran out", reason=Reason.OUT_OF_MEMORY)
        return {"error": memory.to_dict(), "traceback": traceback.format_exc()}
    except OSError as error:
        return {"error": store_error(error, f"running {request.id}").to_dict(), "traceback": traceback.format_exc()}
    except Exception as error:  # noqa: BLE001 - a converter may raise anything; it becomes this stage's error
        first = next((line for line in str(error).splitlines() if line.strip()), "no message")
        other = ConversionError(
            f"{request.id}: {type(error).__name__}: {first[:400]}",
            hint="`edgec --debug build …` shows the traceback",
            reason=Reason.CONVERTER_FAILED,
        )
        return {"error": other.to_dict(), "traceback": traceback.format_exc()}
    # ru_maxrss is in KiB on Linux and in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) * unit
    return {"result": result, "log": context.log.to_dict(), "peak_memory": peak}


if __name__ == "__main__":
    main()
