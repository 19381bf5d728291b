"""The runtime in Python: open a bundle, submit requests, step, and read what happened.

    with Engine(Path("out/smollm2-135m")) as engine:
        for piece in engine.stream("The moon is", Sampling(max_tokens=32)):
            print(piece, end="", flush=True)

`generate`, `stream` and `answer` step the engine themselves, on the caller's thread; several of them may be open at a
time and then share steps. For a server, `edgec.runtime.driver.Driver` steps in a thread of its own instead.

Threads: as in edgec.h, `submit`, `cancel` and the text functions from any thread, the rest from one at a time. `close`
waits for calls that are inside.
"""

from __future__ import annotations

import ctypes
import json
import threading
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from edgec.errors import UsageError
from edgec.runtime import abi
from edgec.runtime.abi import Batching, EventKind, Finish, KvType, LogLevel, Speculation, Status, StepOutcome, Trim
from edgec.runtime.events import Answer, Event, Request, collect
from edgec.runtime.failures import EngineError, status_of
from edgec.runtime.library import load_for
from edgec.runtime.locate import native_folder
from edgec.runtime.sampling import Sampling, float32, int32
from edgec.runtime.settings import read_settings, token_text
from edgec.runtime.stats import Stats

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_EVENTS = 256  # taken out per call of `poll`
_PATIENCE = 1000  # fruitless steps in a row, after which something is wrong
_MAX_TEXT = 2**31 - 1


@dataclass(frozen=True)
class EngineOptions:
    """How to open a bundle. Zero and None mean the default, or the bundle's own value."""

    threads: int = 0
    block_size: int = 0
    context: int = 0
    max_batch: int = 0
    step_tokens: int = 0
    max_waiting: int = 0
    kv: KvType = KvType.INT8
    batching: Batching = Batching.CONTINUOUS
    prefix_cache: bool = True
    aging_steps: int = 0
    memory_budget: int = 0
    """Bytes for weights, keys and values, and scratch together."""
    step_slo_ms: float = 0.0
    """P99 of a step's time that the batch is kept small enough for; 0: no limit."""
    kernel: str | None = None
    log: Callable[[LogLevel, str], None] | None = None
    thermal: Callable[[], int] | None = None
    """Asked before each step: the share of time (0–100) to spend idle because the device is hot."""
    speculation: Speculation = Speculation.AUTO
    """Who proposes tokens for a pass to verify; AUTO: n-grams, and the bundle's draft head when it has one."""
    draft_length: int = 0
    """Tokens to propose, 1–8; 0: as many as pays."""
    draft_width: int = 0
    """The head's candidates for a place: 1, a chain, verified by rejection sampling; 2–4, a tree, verified against the
    token that plain decoding draws; 0: a chain when `draft_length` is fixed, else a tree."""


class Engine:
    """An open bundle."""

    def __init__(
        self, bundle: Path | str, options: EngineOptions | None = None, *, library: ctypes.CDLL | None = None
    ) -> None:
        """Open a bundle: the output folder of `edgec build`, the bundle in it, or its `native` folder.

        Args:
            library: the core to use; by default the installed one (`edgec.runtime.library.load_for`).

        Raises:
            EngineError: the bundle can't be opened, or does not fit the memory budget.
            ToolMissing: the core has to be compiled, and there is no compiler.
        """
        self._handle: int | None = None
        self._gate = threading.Condition()
        self._inside = 0
        self.folder = native_folder(Path(bundle))
        self._core = library or load_for(self.folder)
        self._options, self._callbacks = _options_to_c(options or EngineOptions())
        handle = ctypes.c_void_p()
        self._check(
            self._core.edgec_engine_create(str(self.folder).encode(), ctypes.byref(self._options), ctypes.byref(handle))
        )
        self._handle = handle.value
        self._turn = threading.Lock()  # who steps, polls or trims
        self._polled = (abi.Event * _EVENTS)()
        self._events: dict[int, deque[Event]] = {}  # of requests that `generate` waits for

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_gate", None) is not None:
            self.close()

    def close(self) -> None:
        """Give everything back. Calls that are inside are waited for; later ones are refused. May be called again."""
        with self._gate:
            handle, self._handle = self._handle, None
            self._gate.wait_for(lambda: self._inside == 0)
        if handle is not None:
            self._core.edgec_engine_destroy(handle)

    # ---- Requests ----

    def submit(self, request: Request) -> int:
        """Queue a request; gives its number. From any thread.

        Raises:
            EngineError: it is refused: too long, the queue is full, or an option is wrong.
        """
        tokens = _int32s("tokens", request.tokens)
        sampling = request.sampling.to_c()
        made = abi.Request(
            struct_size=ctypes.sizeof(abi.Request),
            tokens=tokens,
            token_count=len(tokens),
            priority=int32("priority", request.priority),
            tenant=request.tenant,
            tenant_weight=float32("tenant_weight", request.tenant_weight),
            cache_salt=request.cache_salt,
            score_prompt=request.score_prompt,
            sampling=sampling,
        )
        number = ctypes.c_uint64()
        with self._use() as handle:
            self._check(self._core.edgec_engine_submit(handle, ctypes.byref(made), ctypes.byref(number)))
        return number.value

    def cancel(self, request: int) -> bool:
        """Cancel in any state; its last event says so. False when it has finished already. From any thread."""
        with self._use() as handle:
            status = status_of(self._core.edgec_engine_cancel(handle, request))
            if status is Status.NOT_FOUND:
                return False
            self._check(status)
        return True

    # ---- Steps and events ----

    def step(self) -> StepOutcome:
        """Run one iteration: plan, reserve, run, commit."""
        outcome = ctypes.c_int32()
        with self._mine() as handle:
            self._check(self._core.edgec_engine_step(handle, ctypes.byref(outcome)))
        return StepOutcome(outcome.value)

    def poll(self) -> list[Event]:
        """What has happened since the last call, in order."""
        found: list[Event] = []
        count = ctypes.c_int32(_EVENTS)
        with self._mine() as handle:
            while count.value == _EVENTS:
                self._check(self._core.edgec_engine_poll(handle, self._polled, _EVENTS, ctypes.byref(count)))
                found.extend(_event(self._polled[i]) for i in range(count.value))
        return found

    def generate(self, prompt: str | Sequence[int], sampling: Sampling | None = None, **request: Any) -> Generation:
        """Submit a prompt and yield its events, stepping as long as they are asked for. Closing the iterator cancels.

        The request is submitted by this call, not by the first `next`: what is refused is refused here.

        Args:
            prompt: text, which is encoded without looking for special tokens; or tokens.
            request: further fields of `Request`.
        """
        tokens = self.encode_prompt(prompt) if isinstance(prompt, str) else prompt
        wanted = Request(tokens, sampling or Sampling(), **request)
        number = self.submit(wanted)
        self._events[number] = deque()
        events = self._drain(number, wanted.sampling.n)
        next(events)  # into its `try`: from here on, dropping the iterator cancels the request
        return Generation(number, events)

    def stream(self, prompt: str | Sequence[int], sampling: Sampling | None = None, **request: Any) -> Iterator[str]:
        """The text of a single answer, in pieces of whole characters."""
        if (sampling or Sampling()).n != 1:
            raise UsageError("stream gives one answer; use generate or answer for n > 1")
        return (e.text for e in self.generate(prompt, sampling, **request) if e.text)

    def answer(
        self, prompts: Sequence[str | Sequence[int]], sampling: Sampling | None = None, **request: Any
    ) -> list[list[Answer]]:
        """All answers to all prompts, computed together: for each prompt, `n` of them."""
        asked = [self.generate(prompt, sampling, **request) for prompt in prompts]
        return [collect(events, (sampling or Sampling()).n) for events in asked]

    def _drain(self, number: int, open_sequences: int) -> Generator[Event, None, None]:
        mine = self._events[number]
        fruitless = 0
        try:
            yield Event(number, 0, EventKind.TOKEN)  # never seen: `generate` takes it
            while open_sequences:
                while mine:
                    event = mine.popleft()
                    open_sequences -= event.kind is EventKind.FINISH
                    if event.finish is Finish.FAILED:
                        raise EngineError(Status.INTERNAL, f"the engine failed: {self._last_error()}")
                    yield event
                if open_sequences:
                    outcome = self.step()
                    fruitless = 0 if outcome is StepOutcome.COMMITTED else fruitless + 1
                    self._sort_events()
                    if fruitless > (_PATIENCE if outcome is not StepOutcome.FAILED else 3):
                        raise EngineError(Status.INTERNAL, f"no step succeeds ({outcome.name}): {self._last_error()}")
        finally:
            if open_sequences and self._handle is not None:
                self.cancel(number)
                self._sort_events()
            self._events.pop(number, None)

    def _sort_events(self) -> None:
        for event in self.poll():
            if (waiting := self._events.get(event.request)) is not None:
                waiting.append(event)

    # ---- Memory and numbers ----

    def trim(self, level: Trim = Trim.CACHE) -> None:
        """Give memory back to the system."""
        with self._mine() as handle:
            self._check(self._core.edgec_engine_trim(handle, level))

    def stats(self) -> Stats:
        """The counters since the engine was opened."""
        raw = abi.Stats(struct_size=ctypes.sizeof(abi.Stats))
        with self._mine() as handle:
            self._check(self._core.edgec_engine_stats(handle, ctypes.byref(raw)))
        return Stats.from_c(raw)

    @cached_property
    def description(self) -> dict[str, Any]:
        """What the engine settled on: vocab_size, context, block_size, kernel, threads, memory and more."""
        with self._use() as handle:
            text: bytes = self._core.edgec_engine_describe(handle)
        made: dict[str, Any] = json.loads(text)
        return made

    @property
    def context(self) -> int:
        """Positions that a sequence may have."""
        return int(self.description["context"])

    @property
    def version(self) -> str:
        """The core's version and kernels."""
        text: bytes = self._core.edgec_version()
        return text.decode()

    # ---- Text ----

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The bundle's tokenizer_config.json; empty when it has none."""
        return read_settings(self.folder)

    def encode_prompt(self, text: str) -> list[int]:
        """A plain prompt's tokens, with the beginning-of-sequence token where the model wants one."""
        begin = token_text(self.settings.get("bos_token")) if self.settings.get("add_bos_token") else ""
        return [*self.encode(begin, special=True), *self.encode(text)]

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Text to tokens; `special` recognises special tokens that are written out in it. From any thread."""
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"the text is not valid Unicode: {error.reason} at {error.start}") from error
        if not raw:
            return []
        tokens = (ctypes.c_int32 * len(raw))()  # a token has at least one byte
        count = ctypes.c_int32()
        with self._use() as handle:
            self._check(
                self._core.edgec_tokenizer_encode(
                    self._core.edgec_engine_tokenizer(handle),
                    raw,
                    len(raw),
                    special,
                    tokens,
                    len(raw),
                    ctypes.byref(count),
                )
            )
        return tokens[: count.value]

    def decode_bytes(self, tokens: Sequence[int], *, skip_special: bool = False) -> bytes:
        """Tokens to bytes, which may end inside a character. From any thread."""
        given = _int32s("tokens", tokens)
        size = ctypes.c_size_t(16 * len(given) + 64)
        with self._use() as handle:
            tokenizer = self._core.edgec_engine_tokenizer(handle)
            while True:
                text = ctypes.create_string_buffer(size.value)
                status = status_of(
                    self._core.edgec_tokenizer_decode(
                        tokenizer, given, len(given), skip_special, text, len(text), ctypes.byref(size)
                    )
                )
                if status is not Status.BUFFER_TOO_SMALL or size.value <= len(text) or size.value > _MAX_TEXT:
                    break
            self._check(status)
        return text.raw[: size.value]

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Tokens to text; bytes that are no character become U+FFFD. From any thread."""
        return self.decode_bytes(tokens, skip_special=skip_special).decode(errors="replace")

    # ---- The model alone ----

    def forward(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        slots: NDArray[np.int32],
        sequence: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        *,
        hidden_size: int = 0,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """One pass over rows that the caller placed himself, as in the paged step graph. Not to be mixed with requests.

        Args:
            tokens, positions, slots, sequence: (rows) each; `sequence` names a row of `block_tables`.
            block_tables: (sequences, width).
            hidden_size: when given, the last hidden states are returned too.

        Returns:
            Logits (rows, vocab), and hidden states (rows, hidden_size) or None.
        """
        import numpy as np

        rows = [np.ascontiguousarray(a, np.int32).ravel() for a in (tokens, positions, slots, sequence)]
        tables = np.ascontiguousarray(block_tables, np.int32)
        count = len(rows[0])
        if any(len(r) != count for r in rows) or tables.ndim != 2:
            raise UsageError("forward: tokens, positions, slots and sequence have one entry a row; tables are 2-D")
        logits = np.empty((count, int(self.description["vocab_size"])), np.float32)
        hidden = np.empty((count, hidden_size), np.float32) if hidden_size else None

        def pointer(values: NDArray[Any] | None, kind: Any) -> Any:
            return None if values is None else values.ctypes.data_as(ctypes.POINTER(kind))

        with self._mine() as handle:
            self._check(
                self._core.edgec_engine_forward(
                    handle,
                    *(pointer(r, ctypes.c_int32) for r in rows),
                    count,
                    pointer(tables, ctypes.c_int32),
                    *tables.shape,
                    pointer(logits, ctypes.c_float),
                    pointer(hidden, ctypes.c_float),
                )
            )
        return logits, hidden

    # ---- The door to C ----

    @contextmanager
    def _use(self) -> Iterator[int]:
        """The handle, which `close` won't take away meanwhile."""
        with self._gate:
            if self._handle is None:
                raise EngineError(Status.INVALID_ARGUMENT, "the engine is closed")
            handle = self._handle
            self._inside += 1
        try:
            yield handle
        finally:
            with self._gate:
                self._inside -= 1
                self._gate.notify_all()

    @contextmanager
    def _mine(self) -> Iterator[int]:
        """The handle, for what one thread at a time may do."""
        with self._turn, self._use() as handle:
            yield handle

    def _last_error(self) -> str:
        text: bytes = self._core.edgec_last_error()
        return text.decode(errors="replace")

    def _check(self, status: int) -> None:
        if status != Status.OK:
            message = self._last_error() or f"the runtime returned {status}"
            raise EngineError(status_of(status), message)


class Generation(Iterator[Event]):
    """A request's events, as they happen; `number` is the request's. Closing or dropping it cancels what is left."""

    def __init__(self, number: int, events: Generator[Event, None, None]) -> None:
        self.number = number
        self._events = events

    def __next__(self) -> Event:
        return next(self._events)

    def close(self) -> None:
        self._events.close()


def _options_to_c(options: EngineOptions) -> tuple[abi.EngineOptions, tuple[Any, ...]]:
    """The struct, and the callbacks in it, which must live as long as the engine."""
    made = abi.EngineOptions(struct_size=ctypes.sizeof(abi.EngineOptions))
    for name in (
        "threads",
        "block_size",
        "context",
        "max_batch",
        "step_tokens",
        "max_waiting",
        "aging_steps",
        "draft_length",
        "draft_width",
    ):
        setattr(made, name, int32(name, getattr(options, name)))
    if not 0 <= options.memory_budget < 2**64:
        raise UsageError(f"memory_budget: {options.memory_budget} is no number of bytes")
    made.memory_budget = options.memory_budget
    made.kv_dtype, made.batching = options.kv, options.batching
    made.prefix_cache = 0 if options.prefix_cache else -1
    made.speculation = options.speculation
    made.step_slo_ms = float32("step_slo_ms", options.step_slo_ms)
    made.kernel = options.kernel.encode() if options.kernel else None
    log, thermal = options.log, options.thermal
    made.log = abi.LogFunction(
        (lambda _, level, line: log(LogLevel(level), line.decode(errors="replace"))) if log else 0
    )
    made.thermal = abi.ThermalFunction((lambda _: thermal()) if thermal else 0)
    return made, (made.log, made.thermal)


def _int32s(name: str, values: Sequence[int]) -> ctypes.Array[ctypes.c_int32]:
    """An array for C; a number that does not fit is refused, where ctypes would cut it."""
    try:
        numbers = array("i", values)
    except (OverflowError, TypeError) as error:
        raise UsageError(f"{name}: not all are 32-bit integers") from error
    return (ctypes.c_int32 * len(numbers)).from_buffer(numbers)


def _event(raw: abi.Event) -> Event:
    """A copy of an event, whose pointers end with the next poll."""
    text, logprob, top = "", raw.logprob, raw.top_count
    if raw.text_bytes:
        text = ctypes.string_at(raw.text, raw.text_bytes).decode(errors="replace")
    return Event(
        raw.request,
        raw.sequence,
        _KINDS[raw.kind],
        raw.token,
        raw.position,
        None if logprob != logprob else logprob,  # NaN
        _FINISHES[raw.finish],
        text,
        tuple((raw.top[i].token, raw.top[i].logprob) for i in range(top)) if top else (),
        raw.prompt_tokens,
        raw.cached_tokens,
        raw.answer_tokens,
    )


_KINDS = tuple(EventKind)  # by number: they count from 0
_FINISHES = tuple(Finish)
