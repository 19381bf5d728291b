"""vllm#5898, #9567: output depends on the batch size. llama.rn#258: parallel requests contaminate each other.

Right behaviour: a request's tokens and log-probabilities are bitwise those that it has alone, for 1 to 16 batch-mates.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from edgec.runtime.engine import Engine, EngineOptions
from edgec.runtime.events import Event, EventKind, Request
from edgec.runtime.sampling import Sampling
from tests.tiny_bundle import write_tiny_bundle

pytestmark = pytest.mark.slow  # the core has to be compiled


def request(i: int) -> Request:
    sampling = Sampling(max_tokens=15, temperature=0.0 if i % 2 else 0.9, seed=i, logprobs=2, ignore_eos=True)
    return Request([(i + 3 * k) % 250 for k in range(4 + 5 * i)], sampling)


def said(events: list[Event], number: int) -> list[tuple[object, ...]]:
    tokens = [e for e in events if e.request == number and e.kind is EventKind.TOKEN]
    return [(e.token, e.logprob, e.top, e.text) for e in tokens]


def together(engine: Engine, count: int) -> list[list[tuple[object, ...]]]:
    numbers = [engine.submit(request(i)) for i in range(count)]
    events: list[Event] = []
    while engine.stats().running or engine.stats().waiting:
        engine.step()
        events += engine.poll()
    return [said(events, number) for number in numbers]


def test_batched_equals_alone_from_one_to_sixteen(tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path)
    with Engine(bundle, EngineOptions(max_batch=16, prefix_cache=False)) as engine:
        alone = []
        for i in range(16):
            number = engine.submit(request(i))
            events: list[Event] = []
            while engine.stats().running or engine.stats().waiting:
                engine.step()
                events += engine.poll()
            alone.append(said(events, number))
        assert all(len(answer) == 15 for answer in alone)
        for count in range(1, 17):
            assert together(engine, count) == alone[:count]
