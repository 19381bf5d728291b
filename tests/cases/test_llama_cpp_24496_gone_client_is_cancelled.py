"""llama.cpp#24496: a client that goes away keeps its slot until its answer would have been complete.

Here: its request is cancelled within one step, streamed or not, and the slot serves the next client. Steps last a tenth
of a second, so that what is counted are steps and not how fast the machine is.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.raw_http import Served, read_until, send, wait_for
from tests.serving.conftest import edgec_serve, fake_bundle, fake_library  # noqa: F401 - fixtures
from tests.serving.test_process import LONG

STEP_US = 100_000


def test_a_stream_s_request_ends_within_one_step(edgec_serve: Callable[..., Served]) -> None:  # noqa: F811
    served = edgec_serve(step_us=STEP_US)
    connection = send(served, LONG | {"stream": True})
    seen = b""
    while (tokens := seen.count(b'"text":')) < 3:
        seen += read_until(connection, b"\n\n")
    connection.close()
    found = wait_for(served, lambda m: m["edgec_requests_cancelled_total"] == 1)
    # The step that ran when the client left, and at most one that had begun before the loop saw it.
    assert found["edgec_answer_tokens_total"] <= tokens + 2


@pytest.mark.parametrize("stream", [True, False])
def test_the_slot_is_free_for_the_next_client(edgec_serve: Callable[..., Served], stream: bool) -> None:  # noqa: F811
    served = edgec_serve("--max-batch", "1", step_us=20_000)
    gone = send(served, LONG | {"stream": stream})
    wait_for(served, lambda m: m['edgec_requests{state="running"}'] == 1)
    waiting = send(served, {"prompt": "next", "stream": True})
    gone.close()
    assert b"[DONE]" in read_until(waiting, b"[DONE]")
    assert wait_for(served, lambda m: m["edgec_requests_finished_total"] == 1)["edgec_requests_cancelled_total"] == 1
