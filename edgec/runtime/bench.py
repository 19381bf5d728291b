"""Measures a bundle: prefill, decode, batched decode, time to first token, and what is wasted on the way.

Every figure is the median of several runs. Prompts are pseudo-random tokens from a fixed seed, and each request has a
salt of its own, so that the prefix cache can't help. Decoding is held against its bound: a step reads every weight
once, so no engine can make more steps a second than memory bandwidth over the bytes that a token reads.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from edgec.errors import UsageError
from edgec.runtime.bandwidth import read_bandwidth
from edgec.runtime.engine import Engine
from edgec.runtime.events import Event, EventKind, Finish, Request
from edgec.runtime.sampling import Sampling
from edgec.runtime.stats import Stats

_MIX_MEAN = 48  # answer tokens; exponential, as the lengths of chat answers are
_MIX_PROMPT = (16, 96)


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    prompts: tuple[int, ...] = (128, 512)
    decode: int = 64
    """Tokens of each measured answer."""
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    repeats: int = 3
    mix: int = 32
    """Requests of the mixed load, on which occupancy and utilisation are measured."""


@dataclass(frozen=True)
class Prefill:
    """A prompt's computation."""

    tokens: int
    tokens_per_second: float
    first_token_ms: float


@dataclass(frozen=True)
class Decode:
    """Answers that are computed together."""

    batch: int
    tokens_per_second: float
    step_ms: float
    """Wall time between tokens: a step, and the host's part."""
    bound: float | None
    """Tokens a second if the weights were read at the memory's full speed and nothing else took time."""
    of_bound: float | None
    scheduling: float | None
    """Share of the steps' time outside the model and the sampler."""


@dataclass(frozen=True)
class Mix:
    """Many requests of different lengths, more than fit a batch."""

    requests: int
    tokens_per_second: float
    occupancy: float | None
    utilisation: float | None
    scheduling: float | None
    recomputed: float | None
    host: float
    """Share of the wall time outside of `step`: this Python loop, which an app doesn't have."""
    step_p50_ms: float
    step_p99_ms: float


@dataclass
class Report:
    """All of it."""

    engine: dict[str, Any]
    bandwidth: float
    """Bytes a second."""
    bytes_per_token: int
    prefill: list[Prefill] = field(default_factory=list)
    decode: list[Decode] = field(default_factory=list)
    mix: Mix | None = None
    skipped: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The document of `bench --json`, from which `edgec simulate` takes what a step costs."""
        return asdict(self)


def bench(engine: Engine, plan: Plan, progress: Callable[[str], None] = lambda _: None) -> Report:
    """Measure. What the bundle's context or batch is too small for is skipped, and listed."""
    about = engine.description
    threads = int(about.get("threads") or 1)
    progress("memory bandwidth")
    report = Report(about, read_bandwidth(threads), int(about.get("bytes_per_token_read") or 0))
    runner = _Runner(engine, about)
    runner.run([runner.request(8, 4)])  # threads are up, pages are there
    for tokens in plan.prompts:
        if tokens + 1 > engine.context:
            report.skipped.append(f"prefill of {tokens}: the context has {engine.context}")
            continue
        progress(f"prefill of {tokens} tokens")
        seconds = statistics.median(runner.run([runner.request(tokens, 1)]).first[0] for _ in range(plan.repeats))
        report.prefill.append(Prefill(tokens, tokens / seconds, seconds * 1e3))
    for batch in plan.batches:
        if batch > int(about["max_batch"]):
            report.skipped.append(f"batch of {batch}: the bundle was opened for {about['max_batch']}")
            continue
        progress(f"decoding, batch {batch}")
        report.decode.append(_decode(runner, plan, batch, report))
    progress("mixed load")
    report.mix = _mix(runner, plan)
    return report


def _decode(runner: _Runner, plan: Plan, batch: int, report: Report) -> Decode:
    length = min(plan.decode, runner.context - 17)
    runs = [runner.run([runner.request(16, length) for _ in range(batch)]) for _ in range(plan.repeats)]
    # From when all decode until the first ends: the batch is full for the whole of it.
    step = statistics.median(run.full_seconds / run.full_tokens * batch for run in runs)
    shares = [run.stats.scheduling for run in runs if run.stats.scheduling is not None]
    bound = report.bandwidth / report.bytes_per_token * batch if report.bytes_per_token else None
    rate = batch / step
    return Decode(
        batch, rate, step * 1e3, bound, rate / bound if bound else None, statistics.median(shares) if shares else None
    )


def _mix(runner: _Runner, plan: Plan) -> Mix:
    lengths = random.Random(0)
    room = runner.context - _MIX_PROMPT[1]

    def requests() -> list[Request]:
        made = []
        for _ in range(plan.mix):
            prompt = min(lengths.randint(*_MIX_PROMPT), runner.context // 2)
            answer = min(1 + round(lengths.expovariate(1 / _MIX_MEAN)), max(1, room))
            made.append(runner.request(prompt, answer))
        return made

    run = runner.run(requests())
    stats = run.stats
    return Mix(
        requests=plan.mix,
        tokens_per_second=run.tokens / run.seconds,
        occupancy=stats.occupancy,
        utilisation=stats.utilisation,
        scheduling=stats.scheduling,
        recomputed=stats.recomputed,
        host=max(0.0, 1 - stats.step_seconds / run.seconds),
        step_p50_ms=stats.step_p50_ms,
        step_p99_ms=stats.step_p99_ms,
    )


@dataclass
class _Run:
    """One measured load."""

    seconds: float
    tokens: int
    first: list[float]
    """Seconds to each request's first token."""
    full_seconds: float
    full_tokens: int
    stats: Stats


class _Runner:
    """Submits a load and steps until it is done."""

    def __init__(self, engine: Engine, about: dict[str, Any]) -> None:
        self._engine = engine
        self._random = random.Random(0)
        self._special = set(about.get("eos", ()))
        self._vocabulary = int(about["vocab_size"])
        self._salt = 0
        self.context = engine.context

    def request(self, prompt: int, answer: int) -> Request:
        self._salt += 1
        tokens = [self._random.randrange(min(self._vocabulary, 32000)) for _ in range(prompt)]
        clean = [t if t not in self._special else 100 % self._vocabulary for t in tokens]
        return Request(clean, Sampling(max_tokens=answer, ignore_eos=True), cache_salt=self._salt)

    def run(self, requests: Sequence[Request]) -> _Run:
        """Raises UsageError when an answer has another length than was asked for: figures of it would mislead."""
        engine = self._engine
        before = engine.stats()
        start = time.perf_counter()
        arrivals: list[tuple[float, Event]] = []
        open_requests = {engine.submit(request): request for request in requests}
        order = {number: i for i, number in enumerate(open_requests)}
        while open_requests:
            engine.step()
            events = engine.poll()
            now = time.perf_counter()
            for event in events:
                arrivals.append((now, event))
                if event.kind is EventKind.FINISH and event.request in open_requests:
                    asked = open_requests.pop(event.request)
                    if event.finish is not Finish.LENGTH:
                        raise UsageError(
                            f"an answer of {asked.sampling.max_tokens} tokens ended early ({event.finish.name.lower()})"
                        )
        end = time.perf_counter()
        first: dict[int, float] = {}
        for now, event in arrivals:
            if event.kind is EventKind.TOKEN:
                first.setdefault(event.request, now)
        begun = max(first.values())
        ended = min(now for now, event in arrivals if event.kind is EventKind.FINISH)
        tokens = [now for now, event in arrivals if event.kind is EventKind.TOKEN]
        return _Run(
            seconds=end - start,
            tokens=len(tokens),
            first=[first[number] - start for number in sorted(first, key=order.__getitem__)],
            full_seconds=max(ended - begun, math.ulp(1.0)),
            full_tokens=max(1, sum(begun < now <= ended for now in tokens)),
            stats=engine.stats().since(before),
        )
