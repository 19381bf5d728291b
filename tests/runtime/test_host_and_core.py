"""The host's side together with the real core: API, chat, server and commands on a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from edgec.errors import Reason
from edgec.runtime import Engine, EngineOptions, Request, Sampling
from edgec.runtime.abi import EventKind, Finish, Trim
from edgec.runtime.backend import NativeBackend
from edgec.runtime.chat import Chat, Message
from edgec.runtime.failures import EngineError
from edgec.serving.app import create_app
from tests.tiny_bundle import HIDDEN, VOCABULARY, write_tiny_bundle

pytestmark = pytest.mark.slow  # the first one compiles the core


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bundle(tmp_path_factory.mktemp("tiny") / "out")


@pytest.fixture
def engine(tiny: Path) -> Iterator[Engine]:
    with Engine(tiny) as opened:
        yield opened


@pytest.fixture
def client(tiny: Path) -> Iterator[TestClient]:
    with TestClient(create_app(NativeBackend(Engine(tiny)))) as connected:
        yield connected


def whole(engine: Engine) -> bool:
    stats = engine.stats()
    return stats.blocks_owned == 0 and stats.blocks_free + stats.blocks_cached == stats.blocks_total


def test_the_stream_is_the_answer(engine: Engine) -> None:
    sampling = Sampling(max_tokens=40, ignore_eos=True)
    (answer,) = engine.answer(["hello"], sampling)[0]
    assert "".join(engine.stream("hello", sampling)) == answer.text and len(answer.tokens) == 40
    assert answer.text == engine.decode(answer.tokens) and whole(engine)


def test_logprobs_are_those_of_the_model(tiny: Path, engine: Engine) -> None:
    """Of a pass over the same tokens, placed by hand in an engine of their own."""
    prompt = engine.encode("The moon is")
    sampling = Sampling(max_tokens=6, logprobs=3, ignore_eos=True)
    events = [e for e in engine.generate(prompt, sampling, score_prompt=True) if e.kind is not EventKind.FINISH]
    tokens = np.array([e.token for e in events], np.int32)
    assert tokens[: len(prompt)].tolist() == prompt
    positions = np.arange(len(tokens), dtype=np.int32)
    with Engine(tiny) as alone:
        first = int(alone.description.get("first_block", 1))
        table = np.array([[first, first + 1]], np.int32)
        slots = positions + first * 16
        logits, hidden = alone.forward(tokens, positions, slots, 0 * slots, table, hidden_size=HIDDEN)
    assert logits.shape == (len(tokens), VOCABULARY) and hidden is not None and np.isfinite(hidden).all()
    wide = logits.astype(np.float64)
    wide -= wide.max(1, keepdims=True)
    log_softmax = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    for row, event in enumerate(events[1:]):
        assert event.logprob == pytest.approx(log_softmax[row, event.token], abs=1e-5)
        best = np.argsort(-wide[row], kind="stable")[:3]
        assert [t for t, _ in event.top] == best.tolist() if event.top else row < len(prompt)
        if event.position >= len(prompt):
            assert event.token == best[0]


def test_dropping_answers_gives_every_block_back(engine: Engine) -> None:
    sampling = Sampling(n=2, temperature=1, ignore_eos=True)
    streams = [engine.generate("x" * (20 * i + 1), sampling) for i in range(6)]
    for stream in streams:
        next(stream)
    del stream, streams
    while engine.stats().running or engine.stats().waiting:
        engine.step()
    assert whole(engine)
    engine.trim(Trim.IDLE)
    assert engine.stats().blocks_free == engine.stats().blocks_total


def test_the_next_turn_of_a_chat_is_cached(engine: Engine) -> None:
    chat = Chat.of(engine)
    talk = [Message("system", "be brief and kind"), Message("user", "hello there")]
    (first,) = engine.answer([chat.tokens(talk)], Sampling(max_tokens=16, ignore_eos=True))[0]
    talk += [Message("assistant", first.text), Message("user", "and?")]
    (second,) = engine.answer([chat.tokens(talk)], Sampling(max_tokens=4))[0]
    assert first.cached_tokens == 0 and second.cached_tokens >= 48


def test_a_budget_that_is_too_small_is_refused(tiny: Path) -> None:
    with pytest.raises(EngineError) as refused:
        Engine(tiny, EngineOptions(memory_budget=100_000))
    assert refused.value.reason is Reason.OUT_OF_MEMORY


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=-1),
        Sampling(top_p=0.0),
        Sampling(min_p=1.0),
        Sampling(n=0),
        Sampling(logprobs=21),
        Sampling(frequency_penalty=3),
        Sampling(logit_bias={VOCABULARY: 1.0}),
        Sampling(stop=("x" * 300,)),
    ],
)
def test_what_is_out_of_range_is_refused_at_once(engine: Engine, sampling: Sampling) -> None:
    with pytest.raises(EngineError) as refused:
        engine.generate("x", sampling)
    assert refused.value.reason is Reason.BAD_OPTION and whole(engine)


def test_a_context_that_is_full_ends_with_length(tiny: Path) -> None:
    with Engine(tiny, EngineOptions(context=64)) as engine:
        (answer,) = engine.answer(["x" * 60], Sampling(ignore_eos=True))[0]
        assert answer.finish is Finish.LENGTH and 60 + len(answer.tokens) in (64, 65)
        with pytest.raises(EngineError) as refused:
            engine.generate("x" * 65)
        assert refused.value.reason is Reason.TOO_LONG and whole(engine)


def test_sixteen_clients_at_once_get_the_answer_of_one(client: TestClient) -> None:
    body: dict[str, Any] = {"prompt": "once upon a time", "max_tokens": 48, "logprobs": 2, "ignore_eos": True}

    def ask(options: dict[str, Any]) -> Any:
        return client.post("/v1/completions", json=body | options).json()["choices"]

    for options in ({"temperature": 0}, {"temperature": 1, "seed": 7}):
        alone = ask(options)
        with ThreadPoolExecutor(16) as pool:
            others = [{"prompt": f"noise {i}", "seed": i} if i % 2 else options for i in range(32)]
            together = list(pool.map(ask, others))
        assert all(answer == alone for answer in together[::2])


def test_chat_over_http_streams_the_whole_answer(client: TestClient) -> None:
    from tests.serving.test_completions import events

    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "temperature": 0}
    text = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    chunks = events(client.post("/v1/chat/completions", json=body | {"stream": True}))
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == text


def test_a_call_that_is_cancelled_leaves_no_block_owned(tiny: Path) -> None:
    backend = NativeBackend(Engine(tiny))
    backend.start()
    ended: list[Finish] = []
    for i in range(20):
        number = backend.submit(
            Request([65 + i] * (1 + 7 * i), Sampling(ignore_eos=True)),
            lambda events: ended.extend(e.finish for e in events if e.kind is EventKind.FINISH),
        )
        if i % 3:
            time.sleep(0.001 * (i % 5))
        backend.cancel(number)
    while len(ended) < 20:
        time.sleep(0.001)
    assert set(ended) <= {Finish.CANCELLED, Finish.LENGTH} and whole(backend._engine)
    backend.stop()


def test_the_commands_work_on_a_bundle(tiny: Path) -> None:
    def edgec(*words: str) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "edgec", words[0], str(tiny), *words[1:]]
        return subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, env=os.environ, timeout=300)

    warm = [
        edgec("run", "hello", "--temperature", "1", "--max-tokens", "30", *more) for more in ((), (), ("--seed", "1"))
    ]
    assert warm[0].stdout != warm[1].stdout
    assert warm[2].stdout == edgec("run", "hello", "--temperature", "1", "--max-tokens", "30", "--seed", "1").stdout
    runs = [edgec("run", "hello", "--max-tokens", "20", "--stats", "--threads", n) for n in ("1", "2")]
    assert runs[0].returncode == 0 and runs[0].stdout == runs[1].stdout and b"KV utilisation" in runs[0].stderr
    assert edgec("run", "hello", "--kernel", "scalar", "--max-tokens", "20").stdout == runs[0].stdout
    bench = edgec("bench", "--repeats", "1", "--batches", "1,4", "--prompts", "32", "--decode", "16")
    assert bench.returncode == 0 and b"of bound" in bench.stdout
