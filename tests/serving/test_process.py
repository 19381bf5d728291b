"""`edgec serve` as a process: clients that leave, signals, limits of the HTTP layer itself."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable

import pytest

from tests.raw_http import Served, metrics, read_all, read_until, send, wait_for

pytestmark = pytest.mark.slow  # each test starts a server

Serve = Callable[..., Served]


LONG = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_cancelled(edgec_serve: Serve, stream: bool) -> None:
    served = edgec_serve(step_us=10_000)  # the answer would take four seconds
    connection = send(served, LONG | {"stream": stream})
    if stream:
        read_until(connection, b"data: ")
    else:
        wait_for(served, lambda m: m['edgec_requests{state="running"}'] == 1)
    connection.close()
    found = wait_for(served, lambda m: m["edgec_requests_cancelled_total"] == 1)
    assert found["edgec_requests_finished_total"] == 0 and found["edgec_clients_gone_total"] == 1


def test_a_client_that_leaves_with_n_answers_frees_them_all(edgec_serve: Serve) -> None:
    served = edgec_serve(step_us=10_000)
    connection = send(served, LONG | {"n": 3, "prompt": ["a", "b", "c"], "stream": True})
    read_until(connection, b"data: ")
    connection.close()
    found = wait_for(served, lambda m: m["edgec_requests_cancelled_total"] == 3)
    assert found['edgec_requests{state="running"}'] == found['edgec_requests{state="waiting"}'] == 0


def test_a_client_that_resets_is_cancelled_too(edgec_serve: Serve) -> None:
    served = edgec_serve(step_us=10_000)
    connection = send(served, LONG | {"stream": True})
    read_until(connection, b"data: ")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    wait_for(served, lambda m: m["edgec_requests_cancelled_total"] == 1)


def test_others_go_on_when_one_leaves(edgec_serve: Serve) -> None:
    served = edgec_serve(step_us=5_000)
    leaving = send(served, LONG | {"stream": True})
    staying = send(served, {"prompt": "x" * 50, "max_tokens": 50, "stream": True})
    read_until(leaving, b"data: ")
    leaving.close()
    frames = read_until(staying, b"[DONE]").decode()
    texts = re.findall(r'"text":"([^"]*)"', frames)
    assert "".join(texts) == "x" * 50


def test_the_event_loop_answers_while_a_step_runs(edgec_serve: Serve) -> None:
    """Steps of a second: /health must not wait for one to end."""
    served = edgec_serve(step_us=1_000_000)
    connection = send(served, {"prompt": "xy", "stream": True})
    before = metrics(served)["edgec_steps_total"]
    for _ in range(20):
        urllib.request.urlopen(f"{served.url}/health", timeout=30).read()
    assert metrics(served)["edgec_steps_total"] <= before + 1
    connection.close()


def test_sigterm_lets_an_answer_end_and_exits_with_0(edgec_serve: Serve) -> None:
    served = edgec_serve("--grace", "20", step_us=10_000)
    connection = send(served, {"prompt": "y" * 60, "max_tokens": 60, "stream": True})
    read_until(connection, b"data: ")
    served.process.send_signal(signal.SIGTERM)
    rest = read_all(connection).decode()
    assert "[DONE]" in rest and '"finish_reason":"length"' in rest
    assert served.process.wait(30) == 0


def test_after_the_grace_an_answer_is_ended_and_told_why(edgec_serve: Serve) -> None:
    served = edgec_serve("--grace", "0.2", step_us=50_000)
    connection = send(served, LONG | {"stream": True})
    read_until(connection, b"data: ")
    served.process.send_signal(signal.SIGTERM)
    rest = read_all(connection).decode()
    assert "shutting_down" in rest and "[DONE]" not in rest
    assert served.process.wait(30) == 0


def test_a_server_that_stops_takes_no_new_connection(edgec_serve: Serve) -> None:
    served = edgec_serve("--grace", "20", step_us=20_000)
    connection = send(served, LONG | {"stream": True})
    read_until(connection, b"data: ")
    served.process.send_signal(signal.SIGTERM)
    with pytest.raises(OSError):
        while True:
            socket.create_connection((served.host, served.port), timeout=30).close()
            time.sleep(0.01)
    served.process.send_signal(signal.SIGTERM)  # a second one ends it at once
    assert served.process.wait(30) == 0


def test_ctrl_c_is_a_clean_end(edgec_serve: Serve) -> None:
    served = edgec_serve()
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(30) == 0
    assert served.process.stderr is not None and "Traceback" not in served.process.stderr.read()


def test_headers_that_never_end_are_refused(edgec_serve: Serve) -> None:
    served = edgec_serve()
    connection = socket.create_connection((served.host, served.port), timeout=30)
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * 100_000)
    try:
        answer = read_all(connection)
    except ConnectionResetError:
        answer = b""
    assert b"200 OK" not in answer
    assert metrics(served)["edgec_steps_total"] == 0  # and it lives on


def test_prompts_are_not_logged(edgec_serve: Serve) -> None:
    served = edgec_serve("--access-log")
    read_until(send(served, {"prompt": "my secret"}), b"finish_reason")
    read_until(send(served, {"prompt": "my secret", "x": 1}), b"unknown field")
    served.process.send_signal(signal.SIGTERM)
    output, errors = served.process.communicate(timeout=30)
    assert "secret" not in f"{output}{errors}"


def test_a_port_in_use_is_one_line_and_exit_code_2(edgec_serve: Serve) -> None:
    served = edgec_serve()
    command = [*served.process.args[:-2], "--port", str(served.port)]  # type: ignore[index]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "can't listen" in done.stderr and "Traceback" not in done.stderr


def test_the_openai_client_works(edgec_serve: Serve) -> None:
    openai = pytest.importorskip("openai")
    served = edgec_serve()
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    assert [m.id for m in client.models.list()] == ["parrot"]
    messages = [{"role": "user", "content": "hi"}]
    answer = client.chat.completions.create(model="parrot", messages=messages, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == " user\nhi \n assistant\n"
    pieces = client.chat.completions.create(model="parrot", messages=messages, stream=True)
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == answer.choices[0].message.content
    completion = client.completions.create(model="parrot", prompt="hello", logprobs=1, echo=True)
    assert completion.choices[0].text == "hellohello"
    with pytest.raises(openai.BadRequestError, match="not supported"):
        client.completions.create(model="parrot", prompt="x", best_of=2)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt", prompt="x")
