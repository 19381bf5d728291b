"""What clients do wrong, and what runs out: the pool stays whole, and the others get what they would get alone."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edgec.reference.tokenizer import ReferenceTokenizer
from tests.raw_http import Served, metrics, read_all, read_until, send, send_raw, wait_for
from tests.reference.conftest import Serve, servers
from tests.reference.expected import greedy

pytestmark = pytest.mark.slow  # each test starts a server

LONG = {"prompt": "hello", "max_tokens": 4000, "temperature": 0, "ignore_eos": True}
ASKED = {"prompt": "the others", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def served(tiny_llama: Path) -> Iterator[Served]:
    with servers(tiny_llama) as start:
        served = start("--max-batch", "8")
        yield served
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(60) == 0  # after all of it: the engine's own check of its books


@pytest.fixture(scope="module")
def wanted(tiny_llama: Path) -> str:
    """What ASKED is answered with."""
    tokenizer = ReferenceTokenizer.open(tiny_llama)
    assert tokenizer is not None
    return tokenizer.decode(greedy(tokenizer.encode(str(ASKED["prompt"])), 40))


def text_of(stream: bytes) -> str:
    """The text of a stream's chunks."""
    body = stream.decode().partition("\r\n\r\n")[2]
    frames = re.findall(r"data: (\{.*?\})\r?\n", body)
    return "".join(choice["text"] for frame in frames for choice in json.loads(frame)["choices"])


def assert_whole(served: Served) -> None:
    """Nothing is owned once nobody runs."""
    found = wait_for(
        served, lambda m: m['edgec_requests{state="running"}'] == m['edgec_requests{state="waiting"}'] == 0
    )
    assert found['edgec_kv_blocks{state="owned"}'] == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_cancelled_and_the_others_go_on(served: Served, wanted: str, stream: bool) -> None:
    before = metrics(served)
    leaving = send(served, LONG | {"stream": stream, "n": 2, "temperature": 1})
    if stream:
        read_until(leaving, b"data: ")
    else:
        wait_for(served, lambda m: m['edgec_requests{state="running"}'] >= 1)
    staying = send(served, ASKED)
    read_until(staying, b"data: ")
    leaving.close()
    found = wait_for(
        served, lambda m: m["edgec_requests_cancelled_total"] == before["edgec_requests_cancelled_total"] + 2
    )
    assert found["edgec_clients_gone_total"] == before["edgec_clients_gone_total"] + 1
    assert read_until(staying, b"[DONE]")
    assert text_of(read_whole(served)) == wanted
    assert_whole(served)


def read_whole(served: Served) -> bytes:
    """The answer to ASKED, as it came."""
    return read_until(send(served, ASKED), b"[DONE]")


MALFORMED = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"prompt"',
    b'{"prompt": "x", "max_tokens": "many"}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": {"a": 1}}',
    b'{"prompt": [[1], "x"]}',
    b'{"prompt": [-1]}',
    b'{"prompt": [99999]}',
    b'{"prompt": ""}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "x", "n": 9}',
    b'{"prompt": "x", "n": 1000000}',
    b'{"prompt": "x", "logprobs": 21}',
    b'{"prompt": "x", "stop": [""]}',
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b'{"prompt": "' + b"x" * 5000 + b'"}',
]


def test_malformed_bodies_are_refused_while_others_are_served(served: Served, wanted: str) -> None:
    before = metrics(served)
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda _: text_of(read_whole(served)), range(4))
        statuses = []
        for body in MALFORMED:
            head = read_until(send_raw(served, body), b"\r\n")
            statuses.append(int(head.split()[1]))
        assert list(answers) == [wanted] * 4
    assert set(statuses) == {400}, list(zip(MALFORMED, statuses, strict=True))
    after = metrics(served)
    for status, count in ((200, 4), (400, len(MALFORMED))):
        name = f'edgec_http_requests_total{{route="/v1/completions",status="{status}"}}'
        assert after[name] == before.get(name, 0) + count
    assert_whole(served)


def test_a_body_that_is_cut_short_costs_nothing(served: Served, wanted: str) -> None:
    cut = send_raw(served, b'{"prompt": "x"', length=1000)
    cut.shutdown(socket.SHUT_WR)
    cut.close()
    assert text_of(read_whole(served)) == wanted
    assert_whole(served)


def test_an_oversized_prompt_is_refused_and_the_largest_that_fits_is_not(edgec_reference: Serve) -> None:
    served = edgec_reference("--context", "64")
    fits = send(served, {"prompt": "x" * 63, "max_tokens": 9, "ignore_eos": True})
    assert b'"completion_tokens":1,' in read_until(fits, b"}}")
    refused = read_until(send(served, {"prompt": "x" * 64}), b"}}")
    assert b" 400 " in refused and b"context_length_exceeded" in refused
    assert_whole(served)


def test_out_of_blocks_everybody_gets_the_answer_that_he_would_have_alone(
    edgec_reference: Serve, tiny_llama: Path
) -> None:
    """Eight answers of 240 positions in a pool of some 500: they take turns."""
    served = edgec_reference("--memory", "128 kB", "--max-batch", "8", "--step-tokens", "32")
    tokenizer = ReferenceTokenizer.open(tiny_llama)
    assert tokenizer is not None
    bodies = [LONG | {"prompt": f"number {i}: ", "max_tokens": 230, "stream": True} for i in range(8)]
    connections = [send(served, body) for body in bodies]
    texts = [text_of(read_until(c, b"[DONE]")) for c in connections]
    alone = [text_of(read_until(send(served, body), b"[DONE]")) for body in bodies]
    assert texts == alone
    assert texts[3] == tokenizer.decode(greedy(tokenizer.encode("number 3: "), 230))
    assert metrics(served)["edgec_preemptions_total"] > 0
    assert_whole(served)


def test_a_full_queue_says_when_to_come_back(edgec_reference: Serve) -> None:
    served = edgec_reference("--max-batch", "1", "--max-waiting", "1", "--step-tokens", "16")
    running = send(served, LONG | {"stream": True})
    read_until(running, b"data: ")
    waiting = send(served, ASKED)
    wait_for(served, lambda m: m['edgec_requests{state="waiting"}'] == 1)
    refused = read_until(send(served, ASKED), b"}}").decode().lower()
    assert " 429 " in refused and "retry-after: " in refused
    running.close()  # and now the one that waited is served
    assert read_until(waiting, b"[DONE]")
    assert_whole(served)


def test_sigterm_under_load_ends_every_answer_and_checks_the_pool(edgec_reference: Serve) -> None:
    """Some are done within the grace, the rest are told; the exit code says that no block was lost."""
    served = edgec_reference("--max-batch", "6", "--grace", "1")
    short = [send(served, ASKED | {"max_tokens": 5}) for _ in range(3)]
    long = [send(served, LONG | {"stream": True, "prompt": f"{i}"}) for i in range(8)]  # more than run at a time
    leaving = send(served, LONG | {"stream": True})
    begun = {connection: read_until(connection, b"data: ") for connection in (*short, long[0])}
    served.process.send_signal(signal.SIGTERM)
    leaving.close()
    for connection in short:
        assert b"[DONE]" in begun[connection] + read_all(connection)  # a short answer may have come whole already
    for connection in long:
        ended = begun.get(connection, b"") + read_all(connection)
        assert b"shutting_down" in ended or b"[DONE]" in ended
    assert served.process.wait(60) == 0
    assert served.process.stderr is not None and "Traceback" not in served.process.stderr.read()
