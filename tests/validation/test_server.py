"""References over HTTP: the ways in which servers name tokens, what they don't offer, and `edgec reference` itself."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from edgec.errors import SourceError, UsageError
from edgec.runtime.sampling import Sampling
from edgec.validation.server import ServerReference
from edgec.validation.subjects import NotOffered
from tests.conftest import Done

pytestmark = pytest.mark.slow


class Letters:
    """A tokenizer whose token n is one letter; token 3 is half a character, 4 and 5 look alike."""

    vocab_size = 8
    _bytes = (b"a", b"b", b"c", b"\xe2", b"same", b"same", b"g", b"h")

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token]


Answer = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]


@contextmanager
def serving(answer: Answer, *, models: bool = True) -> Iterator[str]:
    """A server that answers completions as `answer` says."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(*((200, {"data": [{"id": "m"}]}) if models else (404, {"error": "no such page"})))

        def do_POST(self) -> None:
            self._say(*answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

        def _say(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


NAMES = ("a", "b", "c", "bytes:\\xe2", "same", "same", "g", "h")


def lists(tokens: list[int], *, ids: bool, first: float | None = -1.0) -> dict[str, Any]:
    """Completions' parallel lists; every token has the alternatives 0 (a half) and itself."""
    name = lambda t: f"token_id:{t}" if ids else NAMES[t]  # noqa: E731
    return {
        "tokens": [name(t) for t in tokens],
        "token_logprobs": [first, *[-1.5] * (len(tokens) - 1)],
        "top_logprobs": [{name(0): math.log(0.5), name(t): -1.5} for t in tokens],
    }


def openai(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Names tokens by their texts, and knows no other fields."""
    if "return_tokens_as_token_ids" in body:
        return 400, {"error": {"message": "unknown field"}}
    prompt = list(body["prompt"])
    if body.get("echo"):
        return 200, {"choices": [{"index": 0, "text": "", "logprobs": lists(prompt, ids=False, first=None)}]}
    return 200, {"choices": [{"index": 0, "logprobs": lists([1, 2, 3], ids=False)}]}


def vllm(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Names tokens by their numbers when asked; computes a token though `max_tokens` is 0; gives 5 alternatives."""
    if body["logprobs"] > 5:
        return 400, {"error": {"message": "at most 5"}}
    ids = bool(body.get("return_tokens_as_token_ids"))
    prompt = list(body["prompt"])
    if body.get("echo"):
        return 200, {"choices": [{"index": 0, "logprobs": lists([*prompt, 6], ids=ids, first=None)}]}
    return 200, {"choices": [{"index": 0, "logprobs": lists([4, 5], ids=ids)}]}


def llama_cpp(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The chat's form, with ids; doesn't echo."""
    if body.get("echo"):
        return 400, {"error": {"message": "Only no echo is supported"}}
    row = {"id": 5, "token": "same", "logprob": -0.5, "top_logprobs": [{"id": 5, "token": "same", "logprob": -0.5}]}
    return 200, {"choices": [{"index": 0, "logprobs": {"content": [row, row]}}]}


def mute(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """No log-probabilities at all."""
    return 200, {"choices": [{"index": 0, "text": "x"}]}


GREEDY = [Sampling(max_tokens=2)]


def test_tokens_named_by_texts_are_found_in_the_vocabulary() -> None:
    with serving(openai) as url:
        server = ServerReference(url, Letters())
        assert server.generate([[0]], GREEDY)[0].tokens == [1, 2, 3]
        scores = server.score([0, 1, 2])
    assert scores.ids.tolist() == [[0, 1], [0, 2]]
    assert scores.following.tolist() == [-1.5, -1.5]
    assert (server.alternatives, server.model) == (20, "m")


def test_a_text_that_two_tokens_have_names_none() -> None:
    def ambiguous(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return 200, {"choices": [{"index": 0, "logprobs": lists([4], ids=False)}]}

    with serving(ambiguous) as url, pytest.raises(NotOffered, match="'same'"):
        ServerReference(url, Letters()).generate([[0]], GREEDY)


def test_tokens_named_by_numbers_need_no_vocabulary() -> None:
    with serving(vllm, models=False) as url:
        server = ServerReference(url, Letters())
        assert server.generate([[0]], GREEDY)[0].tokens == [4, 5]
        scores = server.score([0, 4, 5])
    assert server.alternatives == 5
    assert len(scores) == 2 and scores.ids[1].tolist() == [0, 5]


def test_a_server_without_echo_still_answers() -> None:
    said: list[str] = []
    with serving(llama_cpp) as url:
        server = ServerReference(url, Letters(), note=said.append)
        assert server.generate([[0]], GREEDY)[0].tokens == [5, 5]
        with pytest.raises(NotOffered, match="Only no echo is supported"):
            server.score([0, 1])
    assert any("scores of a text" in line for line in said)


def test_a_server_without_logprobs_offers_nothing() -> None:
    said: list[str] = []
    with serving(mute) as url:
        server = ServerReference(url, Letters(), note=said.append)
        for ask in (lambda: server.score([0, 1]), lambda: server.generate([[0]], GREEDY)):
            with pytest.raises(NotOffered, match="logprobs"):
                ask()
    assert any("`logprobs`" in line for line in said)


def test_what_is_no_server_is_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match="must be the URL"):
        ServerReference("localhost:8000", Letters())
    with pytest.raises(SourceError, match=r"127\.0\.0\.1:1"):
        ServerReference("http://127.0.0.1:1", Letters())
    said = {"error": {"message": "prompt must be a string"}}
    with serving(lambda _: (400, said)) as url, pytest.raises(SourceError, match="prompt must be a string"):
        ServerReference(url, Letters())
    with serving(lambda _: (401, {"error": {"message": "who are you"}})) as url, pytest.raises(UsageError, match="key"):
        ServerReference(url, Letters())
    with serving(openai) as url, pytest.raises(UsageError, match="no such model"):
        ServerReference(url, Letters(), name="other")


def test_a_bundle_is_validated_against_edgec_reference(good: Path, validate: Callable[..., Done]) -> None:
    numbers = ("--weights", "int8", "--activations", "int8", "--kv", "int8", "--context", "512", "--port", "0")
    words = [sys.executable, "-m", "edgec", "reference", str(good), *numbers]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        url = next(w for line in process.stdout for w in line.split() if w.startswith("http://"))
        # A server computes a token after the text that it scores, so a window must leave room for it.
        chosen = ("--reference", url.rstrip(".,"), "--window", "256", "--require", "greedy")
        done = validate(good, "--model", good, "--json", *chosen)
    finally:
        process.terminate()
        process.wait(60)
    assert done.code == 0, done.stderr
    target = done.json["targets"]["native"]
    by_name = {(f["check"], f["reference"]): f for f in target["findings"]}
    assert by_name["kl", "server"]["verdict"] == by_name["top1", "server"]["verdict"] == "pass"
    assert "a lower bound" in by_name["kl", "server"]["message"]
    assert by_name["greedy", "server"]["verdict"] == by_name["distribution", "server"]["verdict"] == "pass"
    assert by_name["sampled", "server"]["verdict"] == "unproven"
