"""What tests of speculation on the native engine share: prompts that repeat themselves and prompts that don't."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgec.runtime.abi import EventKind, Finish, KvType, Speculation
from edgec.runtime.engine import Engine, EngineOptions
from edgec.runtime.events import Event, Request
from edgec.runtime.sampling import Sampling

HEAD, NGRAM, BOTH = Speculation.HEAD, Speculation.NGRAM, Speculation.BOTH
WHO = (HEAD, NGRAM, BOTH)

Said = list[tuple[object, ...]]
"""Every token with its log-probability, alternatives and text, and how the answer ended: equal when all bits are."""


def prompts(count: int = 8) -> list[list[int]]:
    """For the tiny bundle."""
    return [
        [40 + i % (1 + k % 4) * 7 for i in range(20 + k)]
        if k % 2
        else [(i * i + 31 * k) % 250 for i in range(5 + 3 * k)]
        for k in range(count)
    ]


def open_engine(bundle: Path, who: Speculation = Speculation.OFF, length: int = 0, **options: object) -> Engine:
    made = EngineOptions(kv=KvType.INT8, threads=1, speculation=who, draft_length=length, **options)  # type: ignore[arg-type]
    return Engine(bundle, made)


def ask(engine: Engine, asked: Sequence[Sequence[int]], sampling: Sampling, batch: int = 1) -> list[Said]:
    """The answers to all prompts, `batch` at a time; afterwards no block has an owner.

    Raises:
        AssertionError: one has.
    """
    given: list[Said] = []
    for first in range(0, len(asked), batch):
        numbers = [engine.submit(Request(prompt, sampling)) for prompt in asked[first : first + batch]]
        events: list[Event] = []
        while engine.stats().running or engine.stats().waiting:
            engine.step()
            events += engine.poll()
        for number in numbers:
            mine = [e for e in events if e.request == number]
            tokens = [(e.token, e.logprob, e.top, e.text) for e in mine if e.kind is EventKind.TOKEN]
            given.append([*tokens, *((e.finish, e.text) for e in mine if e.finish is not Finish.NONE)])
    assert engine.stats().blocks_owned == 0
    return given
