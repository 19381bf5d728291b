"""Another engine behind the same HTTP layer: thirty lines of Python that know nothing of the C++ core."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from starlette.testclient import TestClient

from edgec.errors import EdgecError, Reason
from edgec.runtime.chat import Message
from edgec.runtime.events import Event, EventKind, Finish, Request
from edgec.runtime.stats import Stats
from edgec.serving.app import create_app
from edgec.serving.backend import Backend, Deliver, ModelInfo


class Counting:
    """Answers with the numbers from 1 on, a token each."""

    info = ModelInfo("counting", context=64, vocab_size=1000, created=0, chat=True, engine="python")
    stats = Stats()
    failure = None

    def __init__(self) -> None:
        self.cancelled: list[int] = []

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def chat(self, messages: Sequence[Message]) -> list[int]:
        return [len(m.content) for m in messages]

    def token_bytes(self, token: int) -> bytes:
        return b" %d" % token

    def submit(self, request: Request, deliver: Deliver) -> int:
        if len(request.tokens) > 3:
            raise EdgecError("too long", reason=Reason.TOO_LONG)

        def answer() -> None:
            for i in range(1, request.sampling.max_tokens + 1):
                deliver([Event(7, 0, EventKind.TOKEN, token=i, position=i, text=f" {i}", logprob=-float("inf"))])
            deliver([Event(7, 0, EventKind.FINISH, finish=Finish.LENGTH, prompt_tokens=len(request.tokens))])

        threading.Thread(target=answer).start()
        return 7

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)


@pytest.fixture
def backend() -> Counting:
    return Counting()


def test_it_answers_completions_and_chat(backend: Counting) -> None:
    typed: Backend = backend
    with TestClient(create_app(typed)) as client:
        body = {"prompt": "4 5", "max_tokens": 3, "logprobs": 1}
        choice = client.post("/v1/completions", json=body).json()["choices"][0]
        assert choice["text"] == " 1 2 3" and choice["finish_reason"] == "length"
        assert choice["logprobs"]["token_logprobs"] == [-9999.0] * 3  # JSON has no infinity
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        assert client.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"] == " 1 2"
        assert client.get("/v1/models").json()["data"][0]["id"] == "counting"
        assert client.get("/metrics").status_code == 200
    assert backend.cancelled == []  # what has ended is not cancelled


def test_its_refusals_become_the_same_errors(backend: Counting) -> None:
    with TestClient(create_app(backend)) as client:
        response = client.post("/v1/completions", json={"prompt": "1 2 3 4"})
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
