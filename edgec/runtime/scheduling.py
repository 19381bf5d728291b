"""The scheduler and the block pool without a model: native/include/edgec_scheduling.h for Python.

`Scheduler` and `Pool` are driven by tests with an engine of their own; `run_trace` is what `edgec simulate` stands on.
The headers native/src/scheduler.h and block_pool.h say what the calls mean.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, byref, c_char_p, c_double, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self

from edgec.runtime.abi import StepOutcome, declare
from edgec.runtime.failures import EngineError, status_of


class Admission(IntEnum):
    """Whether a sequence was taken in, or why not."""

    ACCEPTED = 0
    QUEUE_FULL = 1
    TOO_LONG = 2
    INVALID = 3


class PoolCounts(ctypes.Structure):
    """`edgec_pool_counts`."""

    _fields_ = (
        ("total", c_int32),
        ("free", c_int32),
        ("cached", c_int32),
        ("owned", c_int32),
        ("owned_tokens", c_int64),
    )


class Options(ctypes.Structure):
    """`edgec_scheduler_options`."""

    _fields_ = (
        ("struct_size", c_uint32),
        ("blocks", c_int32),
        ("block_size", c_int32),
        ("first_block", c_int32),
        ("context", c_int32),
        ("max_batch", c_int32),
        ("step_tokens", c_int32),
        ("max_waiting", c_int32),
        ("aging_steps", c_int32),
        ("static_batching", c_int32),
        ("prefix_cache", c_int32),
        ("colliding", c_int32),
        ("step_slo", c_double),
    )


class Spec(ctypes.Structure):
    """`edgec_sequence_spec`."""

    _fields_ = (
        ("struct_size", c_uint32),
        ("id", c_uint64),
        ("tokens", POINTER(c_int32)),
        ("count", c_int32),
        ("priority", c_int32),
        ("tenant", c_uint64),
        ("weight", c_double),
        ("max_new_tokens", c_int32),
        ("compute_all", c_int32),
        ("key", c_char_p),
        ("key_bytes", c_int32),
    )


class PlanCounts(ctypes.Structure):
    """`edgec_plan`."""

    _fields_ = tuple((name, c_int32) for name in ("chunks", "starts", "victims", "rows", "padding", "slots"))


class Chunk(ctypes.Structure):
    """`edgec_chunk`."""

    _fields_ = (
        ("sequence", c_uint64),
        ("start", c_int32),
        ("count", c_int32),
        ("drafts", c_int32),
        ("samples", c_int32),
    )


class Result(ctypes.Structure):
    """`edgec_step_result`."""

    _fields_ = (("sequence", c_uint64), ("tokens", POINTER(c_int32)), ("count", c_int32), ("finish", c_int32))


class SequenceInfo(ctypes.Structure):
    """`edgec_sequence_info`."""

    _fields_ = tuple(
        (name, c_int32)
        for name in ("running", "length", "tokens", "room", "cached_tokens", "computed_before", "blocks")
    )


class Stats(ctypes.Structure):
    """`edgec_scheduler_stats`."""

    _fields_ = (
        *((name, c_int32) for name in ("waiting", "running", "batch_limit")),
        *(
            (name, c_uint64)
            for name in (
                *("steps", "retries", "releases", "preemptions", "finished", "cancelled"),
                *("prompt_tokens", "cached_tokens", "answer_tokens", "computed_tokens", "recomputed_tokens"),
                *("rejected_tokens", "padding_rows", "batch_slots", "batch_used", "kv_token_steps", "kv_slot_steps"),
                *("wait_steps", "max_wait_steps"),
            )
        ),
        ("fairness", c_double),
    )


class SimRequest(ctypes.Structure):
    """`edgec_sim_request`."""

    _fields_ = (
        ("arrival", c_double),
        ("prompt", c_int32),
        ("answer", c_int32),
        ("max_tokens", c_int32),
        ("priority", c_int32),
        ("tenant", c_uint64),
        ("weight", c_double),
        ("prefix", c_uint64),
        ("prefix_tokens", c_int32),
    )


class SimCost(ctypes.Structure):
    """`edgec_sim_cost`."""

    _fields_ = (
        ("fixed", c_double),
        ("per_row", c_double),
        ("per_sequence", c_double),
        ("table_rows", POINTER(c_double)),
        ("table_seconds", POINTER(c_double)),
        ("table_count", c_int32),
    )


class SimOutcome(ctypes.Structure):
    """`edgec_sim_outcome`."""

    _fields_ = (
        ("first_token", c_double),
        ("finish", c_double),
        ("longest_gap", c_double),
        ("answer", c_int32),
        ("admission", c_int32),
    )


class SimReport(ctypes.Structure):
    """`edgec_sim_report`."""

    _fields_ = (
        ("struct_size", c_uint32),
        ("refused", c_int32),
        *(
            (name, c_double)
            for name in (
                *("seconds", "busy_seconds", "first_token_p50", "first_token_p99", "gap_p50", "gap_p99", "gap_max"),
                *("request_p50", "request_p99", "step_p50", "step_p99"),
            )
        ),
        ("peak_blocks", c_int32),
        ("stats", Stats),
    )


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "edgec_pool_counts": PoolCounts,
    "edgec_scheduler_options": Options,
    "edgec_sequence_spec": Spec,
    "edgec_plan": PlanCounts,
    "edgec_chunk": Chunk,
    "edgec_step_result": Result,
    "edgec_sequence_info": SequenceInfo,
    "edgec_scheduler_stats": Stats,
    "edgec_sim_request": SimRequest,
    "edgec_sim_cost": SimCost,
    "edgec_sim_outcome": SimOutcome,
    "edgec_sim_report": SimReport,
}

_I32S, _U64S, _HANDLE = POINTER(c_int32), POINTER(c_uint64), c_void_p

# Every function gives a status, but the two that destroy.
_STATUS: dict[str, tuple[Any, ...]] = {
    "edgec_pool_create": (c_int32, c_int32, c_int32, c_int32, POINTER(_HANDLE)),
    "edgec_pool_allocate": (_HANDLE, _I32S),
    "edgec_pool_retain": (_HANDLE, c_int32),
    "edgec_pool_release": (_HANDLE, c_int32),
    "edgec_pool_make_writable": (_HANDLE, c_int32, _I32S),
    "edgec_pool_publish": (_HANDLE, _I32S, c_int32, _I32S, c_char_p, c_int32),
    "edgec_pool_find": (_HANDLE, _I32S, c_int32, c_char_p, c_int32, _I32S, _I32S),
    "edgec_pool_trim": (_HANDLE,),
    "edgec_prefix_key_add": (c_char_p, c_int32, c_char_p, c_char_p, c_int32, c_char_p, c_int32, _I32S),
    "edgec_pool_owners": (_HANDLE, c_int32, _I32S),
    "edgec_pool_get_counts": (_HANDLE, POINTER(PoolCounts)),
    "edgec_pool_verify": (_HANDLE,),
    "edgec_scheduler_create": (POINTER(Options), POINTER(_HANDLE)),
    "edgec_scheduler_add": (_HANDLE, POINTER(Spec), _I32S),
    "edgec_scheduler_cancel": (_HANDLE, c_uint64),
    "edgec_scheduler_finish": (_HANDLE, c_uint64),
    "edgec_scheduler_preempt": (_HANDLE, c_uint64),
    "edgec_scheduler_preempt_all_but_one": (_HANDLE, _I32S),
    "edgec_scheduler_fork": (_HANDLE, c_uint64, c_uint64, c_int32),
    "edgec_scheduler_trim": (_HANDLE,),
    "edgec_scheduler_set_draft": (_HANDLE, c_uint64, _I32S, c_int32),
    "edgec_scheduler_plan": (_HANDLE, POINTER(PlanCounts)),
    "edgec_scheduler_get_plan": (_HANDLE, POINTER(Chunk), _U64S, _U64S),
    "edgec_scheduler_reserve": (_HANDLE, _I32S, _I32S),
    "edgec_scheduler_get_copies": (_HANDLE, _I32S, _I32S),
    "edgec_scheduler_commit": (_HANDLE, POINTER(Result), c_int32, c_double),
    "edgec_scheduler_release": (_HANDLE,),
    "edgec_scheduler_sequence": (_HANDLE, c_uint64, POINTER(SequenceInfo)),
    "edgec_scheduler_contents": (_HANDLE, c_uint64, _I32S, _I32S),
    "edgec_scheduler_get_stats": (_HANDLE, POINTER(Stats)),
    "edgec_scheduler_pool": (_HANDLE, POINTER(PoolCounts)),
    "edgec_scheduler_served": (_HANDLE, c_uint64, _U64S),
    "edgec_scheduler_verify": (_HANDLE,),
    "edgec_simulate": (
        *(POINTER(Options), POINTER(SimCost), POINTER(SimRequest), c_int32),
        *(POINTER(SimOutcome), POINTER(SimReport)),
    ),
}
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    **{name: (c_int32, arguments) for name, arguments in _STATUS.items()},
    "edgec_pool_destroy": (None, (_HANDLE,)),
    "edgec_scheduler_destroy": (None, (_HANDLE,)),
}


def scheduling_library(library: ctypes.CDLL | None = None) -> ctypes.CDLL:
    """The core with the functions of edgec_scheduling.h declared; the installed one when None."""
    if library is None:
        from edgec.runtime.library import load

        library = load()
    declare(library, {**FUNCTIONS, "edgec_last_error": (c_char_p, ())})
    return library


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        raise EngineError(status_of(status), library.edgec_last_error().decode(errors="replace"))


def prefix_key(parts: Sequence[tuple[str, bytes]], library: ctypes.CDLL | None = None) -> bytes:
    """What besides its tokens a prefix is found by, for `Scheduler.add` and `Pool`: (tag, value) pairs."""
    core, key = scheduling_library(library), b""
    for tag, value in parts:
        out = ctypes.create_string_buffer(len(key) + 16 + len(tag.encode()) + len(value))
        count = c_int32()
        add = core.edgec_prefix_key_add
        _check(core, add(key, len(key), tag.encode(), value, len(value), out, len(out), byref(count)))
        key = out.raw[: count.value]
    return key


@dataclass(frozen=True)
class SchedulerConfig:
    """src/step_plan.h's `SchedulerConfig`, with its defaults.

    Args:
        blocks: KV blocks in the pool; 0 takes what `max_batch` sequences of `context` tokens need.
        context: tokens that a sequence may have.
        max_batch: sequences in a step.
        step_tokens: rows in a step; decodes first, the rest prompts.
        aging_steps: a waiting sequence gains one priority level after so many steps.
        step_slo: seconds that P99 of a step is kept to; 0: no control.
        colliding: every block gets the same hash (for tests).
    """

    blocks: int = 0
    block_size: int = 16
    first_block: int = 0
    context: int = 2048
    max_batch: int = 16
    step_tokens: int = 128
    max_waiting: int = 256
    aging_steps: int = 32
    static_batching: bool = False
    prefix_cache: bool = True
    colliding: bool = False
    step_slo: float = 0.0

    @property
    def pool_blocks(self) -> int:
        """How many blocks that is."""
        return self.blocks or self.max_batch * -(-self.context // max(self.block_size, 1))

    def to_c(self) -> Options:
        """The C struct."""
        numbers = {name: getattr(self, name) for name, _ in Options._fields_ if name not in ("struct_size", "blocks")}
        return Options(struct_size=ctypes.sizeof(Options), blocks=self.pool_blocks, **numbers)


class _Handle:
    """Owns something of the core's."""

    _kind = ""

    def __init__(self, library: ctypes.CDLL | None) -> None:
        self._library = scheduling_library(library)
        self._handle: c_void_p | None = None

    def _call(self, name: str, *arguments: Any) -> None:
        _check(self._library, getattr(self._library, f"edgec_{self._kind}_{name}")(self._handle, *arguments))

    def _number(self, name: str, *arguments: Any) -> int:
        number = c_int32()
        self._call(name, *arguments, byref(number))
        return number.value

    def close(self) -> None:
        """Free it; calling it again does nothing."""
        if self._handle:
            getattr(self._library, f"edgec_{self._kind}_destroy")(self._handle)
            self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()

    def verify(self) -> None:
        """Check the whole structure; raises EngineError with what is wrong."""
        self._call("verify")


class Pool(_Handle):
    """src/block_pool.h's `BlockPool`."""

    _kind = "pool"

    def __init__(
        self,
        blocks: int,
        block_size: int,
        first_block: int = 0,
        *,
        colliding: bool = False,
        library: ctypes.CDLL | None = None,
    ) -> None:
        super().__init__(library)
        self.block_size = block_size
        handle = c_void_p()
        create = self._library.edgec_pool_create
        _check(self._library, create(blocks, block_size, first_block, colliding, byref(handle)))
        self._handle = handle

    def allocate(self) -> int | None:
        """A block, or None when all are owned."""
        block = self._number("allocate")
        return None if block < 0 else block

    def retain(self, block: int) -> None:
        """One owner more."""
        self._call("retain", block)

    def release(self, block: int) -> None:
        """One owner less."""
        self._call("release", block)

    def make_writable(self, block: int) -> int | None:
        """Copy-on-write: the block to write to, or None when none is left."""
        own = self._number("make_writable", block)
        return None if own < 0 else own

    def publish(self, table: Sequence[int], tokens: Sequence[int], key: bytes = b"") -> list[int]:
        """Make the full blocks of `table` findable as a chain; gives the table to go on with."""
        blocks = (c_int32 * len(table))(*table)
        self._call("publish", blocks, len(table), (c_int32 * len(tokens))(*tokens), key, len(key))
        return list(blocks)

    def find(self, tokens: Sequence[int], key: bytes = b"") -> list[int]:
        """The blocks of the longest published prefix."""
        count = len(tokens) // self.block_size
        table = (c_int32 * max(count, 1))()
        found = self._number("find", (c_int32 * max(len(tokens), 1))(*tokens), count, key, len(key), table)
        return list(table[:found])

    def trim(self) -> None:
        """Forget cached prefixes."""
        self._call("trim")

    def owners(self, block: int) -> int:
        """How many own it."""
        return self._number("owners", block)

    @property
    def counts(self) -> PoolCounts:
        """free + cached + owned == total."""
        counts = PoolCounts()
        self._call("get_counts", byref(counts))
        return counts


@dataclass(frozen=True)
class Planned:
    """What a step would do."""

    chunks: tuple[Chunk, ...]
    starts: tuple[int, ...]
    victims: tuple[int, ...]
    rows: int
    padding: int
    slots: int


class Scheduler(_Handle):
    """src/scheduler.h's `Scheduler`. One plan at a time: `plan`, `reserve`, then `commit` or `release`."""

    _kind = "scheduler"

    def __init__(self, config: SchedulerConfig, library: ctypes.CDLL | None = None) -> None:
        super().__init__(library)
        self.config = config
        handle = c_void_p()
        _check(self._library, self._library.edgec_scheduler_create(byref(config.to_c()), byref(handle)))
        self._handle = handle

    def add(
        self,
        id: int,
        prompt: Sequence[int],
        *,
        priority: int = 0,
        tenant: int = 0,
        weight: float = 1.0,
        max_new_tokens: int = 0,
        key: bytes = b"",
        compute_all: bool = False,
    ) -> Admission:
        """Queue a sequence, or say why not."""
        tokens = (c_int32 * max(len(prompt), 1))(*prompt)
        spec = Spec(
            *(ctypes.sizeof(Spec), id, tokens, len(prompt), priority, tenant, weight, max_new_tokens, compute_all),
            *(key, len(key)),
        )
        return Admission(self._number("add", byref(spec)))

    def cancel(self, id: int) -> None:
        """Its blocks are back at once."""
        self._call("cancel", id)

    def finish(self, id: int) -> None:
        """The same, counted as finished."""
        self._call("finish", id)

    def preempt(self, id: int) -> None:
        """Back to waiting."""
        self._call("preempt", id)

    def preempt_all_but_one(self) -> int:
        """Keep the one with the most work done."""
        return self._number("preempt_all_but_one")

    def fork(self, parent: int, child: int, last_token: int = -1) -> None:
        """A copy that shares the parent's blocks; `last_token` replaces its last one."""
        self._call("fork", parent, child, last_token)

    def trim(self) -> None:
        """Forget cached prefixes."""
        self._call("trim")

    def set_draft(self, id: int, tokens: Sequence[int]) -> None:
        """Tokens to verify in its next step."""
        self._call("set_draft", id, (c_int32 * max(len(tokens), 1))(*tokens), len(tokens))

    def plan(self) -> Planned:
        """What the next step would do."""
        n = PlanCounts()
        self._call("plan", byref(n))
        chunks = (Chunk * max(n.chunks, 1))()
        starts, victims = (c_uint64 * max(n.starts, 1))(), (c_uint64 * max(n.victims, 1))()
        self._call("get_plan", chunks, starts, victims)
        return Planned(
            *(tuple(chunks[: n.chunks]), tuple(starts[: n.starts]), tuple(victims[: n.victims])),
            *(n.rows, n.padding, n.slots),
        )

    def reserve(self) -> tuple[StepOutcome, list[tuple[int, int]]]:
        """Reserve the latest plan: the outcome, and the block copies to perform, in order."""
        outcome, count = c_int32(), c_int32()
        self._call("reserve", byref(outcome), byref(count))
        source, to = (c_int32 * max(count.value, 1))(), (c_int32 * max(count.value, 1))()
        self._call("get_copies", source, to)
        return StepOutcome(outcome.value), list(zip(source[: count.value], to[: count.value], strict=True))

    def commit(self, results: Mapping[int, tuple[Sequence[int], bool]], seconds: float = 0.0) -> None:
        """`{sequence: (new tokens, finished)}` of every chunk that samples."""
        kept = [(c_int32 * max(len(tokens), 1))(*tokens) for tokens, _ in results.values()]
        made = (Result * max(len(results), 1))(
            *(
                Result(id, array, len(tokens), finish)
                for (id, (tokens, finish)), array in zip(results.items(), kept, strict=True)
            )
        )
        self._call("commit", made, len(results), seconds)

    def release(self) -> None:
        """Undo `reserve`."""
        self._call("release")

    def sequence(self, id: int) -> SequenceInfo:
        """Numbers of one sequence."""
        info = SequenceInfo()
        self._call("sequence", id, byref(info))
        return info

    def contents(self, id: int) -> tuple[list[int], list[int]]:
        """Its tokens (prompt and answer) and its block table."""
        info = self.sequence(id)
        tokens, table = (c_int32 * max(info.tokens, 1))(), (c_int32 * max(info.blocks, 1))()
        self._call("contents", id, tokens, table)
        return list(tokens[: info.tokens]), list(table[: info.blocks])

    @property
    def stats(self) -> Stats:
        """Counters since creation."""
        stats = Stats()
        self._call("get_stats", byref(stats))
        return stats

    @property
    def pool(self) -> PoolCounts:
        """free + cached + owned == total."""
        counts = PoolCounts()
        self._call("pool", byref(counts))
        return counts

    def served(self, tenant: int) -> int:
        """Tokens charged to a tenant."""
        tokens = c_uint64()
        self._call("served", tenant, byref(tokens))
        return tokens.value


def run_trace(
    config: SchedulerConfig,
    cost: SimCost,
    requests: ctypes.Array[SimRequest],
    library: ctypes.CDLL | None = None,
) -> tuple[SimReport, ctypes.Array[SimOutcome]]:
    """Run all requests to their end on a model that only costs time."""
    core = scheduling_library(library)
    outcomes = (SimOutcome * len(requests))()
    report = SimReport(struct_size=ctypes.sizeof(SimReport))
    _check(
        core, core.edgec_simulate(byref(config.to_c()), byref(cost), requests, len(requests), outcomes, byref(report))
    )
    return report, outcomes
