"""POST /v1/completions, over a core that repeats its prompt."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.serving.conftest import Connect


def post(client: TestClient, **body: Any) -> Any:
    return client.post("/v1/completions", json=body)


def events(response: Any) -> list[Any]:
    """The chunks of a stream; the last must be [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames[-1] == "" and frames[-2] == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def test_an_answer_has_openai_s_shape(client: TestClient) -> None:
    response = post(client, model="parrot", prompt="hello")
    assert response.status_code == 200
    answer = response.json()
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-") and answer["model"] == "parrot"
    assert answer["choices"] == [{"text": "hello", "index": 0, "logprobs": None, "finish_reason": "stop"}]
    usage = {k: answer["usage"][k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert usage == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}


def test_a_stream_adds_up_to_the_whole(client: TestClient) -> None:
    text = "한글 🙂 and text"
    chunks = events(post(client, prompt=text, stream=True, max_tokens=100))
    assert "".join(c["choices"][0]["text"] for c in chunks) == text
    assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "stop"
    assert {c["id"] for c in chunks} == {chunks[0]["id"]}


def test_usage_comes_last_when_it_is_asked_for(client: TestClient) -> None:
    chunks = events(post(client, prompt="ab", stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 2
    assert all(c["usage"] is None for c in chunks[:-1])


def test_several_prompts_and_n_are_numbered_as_openai_does(client: TestClient) -> None:
    answer = post(client, prompt=["one", "two"], n=2).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "one"), (1, "one"), (2, "two"), (3, "two")]
    assert answer["usage"]["prompt_tokens"] == 6 and answer["usage"]["completion_tokens"] == 12
    chunks = events(post(client, prompt=["one", "two"], n=2, stream=True))
    texts = ["", "", "", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["one", "one", "two", "two"]


@pytest.mark.parametrize(("prompt", "text"), [([104, 105], "hi"), ([[104], [105]], "h")])
def test_a_prompt_may_be_tokens(client: TestClient, prompt: Any, text: str) -> None:
    assert post(client, prompt=prompt).json()["choices"][0]["text"] == text


def test_max_tokens_is_sixteen_unless_given(client: TestClient) -> None:
    answer = post(client, prompt="x" * 40).json()["choices"][0]
    assert answer["text"] == "x" * 16 and answer["finish_reason"] == "length"
    assert post(client, prompt="x" * 40, max_tokens=None).json()["choices"][0]["text"] == "x" * 16


def test_a_stop_string_ends_the_answer(client: TestClient) -> None:
    assert post(client, prompt="one, two", stop=",").json()["choices"][0]["text"] == "one"


def test_logprobs_are_parallel_lists_and_hold_the_token_itself(client: TestClient) -> None:
    logprobs = post(client, prompt="ab", logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b"] and logprobs["text_offset"] == [0, 1]
    assert logprobs["token_logprobs"] == [-0.5, -0.75]
    assert logprobs["top_logprobs"][0] == {"a": -0.5, "b": -1.5}


def test_tokens_go_by_their_numbers_when_asked(client: TestClient) -> None:
    body = {"prompt": "ab", "logprobs": 2, "echo": True, "return_tokens_as_token_ids": True}
    logprobs = post(client, **body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:97", "token_id:98"] * 2 and logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["top_logprobs"][2] == {"token_id:97": -0.5, "token_id:98": -1.5}


def test_streamed_logprobs_are_the_whole_ones(client: TestClient) -> None:
    body = {"prompt": "añb", "logprobs": 1, "echo": True}
    whole = post(client, **body).json()["choices"][0]
    joined: dict[str, list[Any]] = {}
    text = ""
    for chunk in events(post(client, **body, stream=True)):
        choice = chunk["choices"][0]
        text += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            joined.setdefault(name, []).extend(values)
    assert joined == whole["logprobs"] and text == whole["text"] == "añbañb"
    assert joined["tokens"][1] == "bytes:\\xc3"


def test_echo_scores_the_prompt(client: TestClient) -> None:
    choice = post(client, prompt="abc", echo=True, logprobs=1, max_tokens=1).json()["choices"][0]
    assert choice["text"] == "abca"
    assert choice["logprobs"]["token_logprobs"] == [None, -0.75, -1.0, -0.5]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]


def test_a_prompt_can_be_scored_without_an_answer(client: TestClient) -> None:
    """How evaluation harnesses ask for log-likelihoods."""
    answer = post(client, prompt="abc", echo=True, logprobs=1, max_tokens=0).json()
    choice = answer["choices"][0]
    assert choice["text"] == "abc" and choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 0


REFUSED = [
    ({"prompt": "a", "temprature": 1}, "temprature"),
    ({"prompt": "a", "best_of": 3}, "best_of"),
    ({"prompt": "a", "suffix": "x"}, "suffix"),
    ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "temperature": 3}, "temperature"),
    ({"prompt": "a", "top_p": 0}, "top_p"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "n": 100}, "n"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
    ({"prompt": "a", "stop": ""}, "stop"),
    ({"prompt": "a", "stop": 5}, "stop"),
    ({"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "a", "stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"prompt": "a", "seed": 2**64}, "seed"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ["a"] * 65}, "prompt"),
    ({}, "prompt"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=[f"{p}-{i}" for i, (_, p) in enumerate(REFUSED)])
def test_what_can_not_be_honoured_is_refused_by_name(client: TestClient, body: dict[str, Any], param: str) -> None:
    response = post(client, **body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param and param.split(".")[-1] in error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_misspelt_field_names_the_right_one(client: TestClient) -> None:
    assert "did you mean `temperature`" in post(client, prompt="a", temprature=1).json()["error"]["message"]


def test_another_model_is_not_found(client: TestClient) -> None:
    response = post(client, prompt="a", model="../../etc/passwd")
    assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"


def test_a_prompt_that_does_not_fit_is_400(client: TestClient) -> None:
    response = post(client, prompt="x" * 600)
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"


def test_a_full_queue_is_429_and_says_when_to_come_back(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgec.runtime.engine import EngineOptions

    client = connect(options=EngineOptions(max_waiting=2))
    monkeypatch.setenv("FAKE_STEP_US", "20000")
    response = post(client, prompt=["x" * 30] * 12)
    assert response.status_code == 429 and 1 <= int(response.headers["retry-after"]) <= 60
    assert response.json()["error"]["type"] == "rate_limit_error"


def test_of_a_call_that_was_refused_nothing_is_left_in_the_engine(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first prompts of the call were accepted before the queue was full."""
    from edgec.runtime.engine import EngineOptions

    client = connect(options=EngineOptions(max_waiting=2))
    monkeypatch.setenv("FAKE_STEP_US", "20000")
    assert post(client, prompt=["x" * 30] * 12, ignore_eos=True, max_tokens=400).status_code == 429
    monkeypatch.setenv("FAKE_STEP_US", "0")
    backend = client.app.state.server.backend  # type: ignore[attr-defined]
    while backend._driver.open_requests:
        pass
    assert backend._engine.stats().requests_finished == 0


def test_an_engine_that_fails_is_500_and_goes_on(client: TestClient) -> None:
    response = post(client, prompt=[1, 1])
    assert response.status_code == 500 and response.json()["error"]["code"] == "engine_failed"
    assert post(client, prompt="ok").status_code == 200


def test_a_stream_that_fails_says_so_in_the_stream(client: TestClient) -> None:
    frames = post(client, prompt=[1, 1], stream=True).text.strip().split("\n\n")
    assert json.loads(frames[-1].removeprefix("data: "))["error"]["code"] == "engine_failed"


def test_an_engine_that_broke_is_503_and_unhealthy(client: TestClient) -> None:
    assert post(client, prompt=[2, 2]).status_code == 500
    assert post(client, prompt="ok").status_code == 503
    health = client.get("/health")
    assert health.status_code == 503 and "bytes 2" in health.json()["reason"]
