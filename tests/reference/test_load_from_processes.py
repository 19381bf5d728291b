"""Several client processes at once: every answer is the one that the prompt has alone, and nothing is left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgec.reference.tokenizer import ReferenceTokenizer
from tests.raw_http import Served, metrics, read_until, send, wait_for
from tests.reference.conftest import Serve
from tests.reference.expected import greedy
from tests.reference.load_client import REQUESTS, asked

CLIENTS = 4


def ask_for_more_than_there_is(served: Served, blocks: float) -> int:
    """Sequences of one request, which are there together however slowly clients start, and don't fit together."""
    sequences, tokens = 8, 60
    assert sequences * tokens // 4 > blocks  # of four tokens
    body = {"prompt": "Once upon a time ", "max_tokens": tokens, "n": sequences, "temperature": 1, "ignore_eos": True}
    connection = send(served, body)
    assert read_until(connection, b'"usage"').count(b'"finish_reason":"length"') == sequences
    connection.close()
    return sequences


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--memory", "100 kB", "--step-tokens", "64", "--block-size", "4")])
def test_answers_under_load_are_those_of_each_prompt_alone(
    edgec_reference: Serve, tiny_llama: Path, arguments: tuple[str, ...]
) -> None:
    """With room for everybody, and with so little that sequences push one another out."""
    served = edgec_reference(*arguments)
    total = metrics(served)['edgec_kv_blocks{state="free"}']
    command = [sys.executable, "-m", "tests.reference.load_client", served.url]
    clients = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for i in range(CLIENTS)
    ]
    answered = CLIENTS * REQUESTS + (ask_for_more_than_there_is(served, total) if arguments else 0)
    tokenizer = ReferenceTokenizer.open(tiny_llama)
    assert tokenizer is not None
    for number, client in enumerate(clients):
        output, errors = client.communicate(timeout=300)
        assert client.returncode == 0, errors[-2000:]
        answers = json.loads(output)
        assert [(prompt, tokens) for prompt, tokens, _ in answers] == asked(number)
        for prompt, tokens, text in answers:
            wanted = tokenizer.decode(greedy(tokenizer.encode(prompt), tokens))
            assert text == wanted, prompt
    # The counters are a moment old, until the engine rests.
    found = wait_for(served, lambda m: m["edgec_requests_finished_total"] >= answered)
    assert found["edgec_requests_finished_total"] == answered
    assert found['edgec_kv_blocks{state="owned"}'] == 0
    assert found['edgec_kv_blocks{state="free"}'] + found['edgec_kv_blocks{state="cached"}'] == total
    assert found["edgec_cached_tokens_total"] > 0
    if arguments:
        assert found["edgec_preemptions_total"] > 0
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(60) == 0  # the engine's own check of its books is part of a clean end
