"""OpenAI's own client talks to a running `edgec reference`; answers are compared with the dense model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from edgec.reference.tokenizer import ReferenceTokenizer
from tests.raw_http import Served, wait_for
from tests.reference.conftest import servers
from tests.reference.expected import greedy, log_probabilities

PLAIN = {"ignore_eos": True}  # a field of vLLM's, which goes by `extra_body`


@pytest.fixture(scope="module")
def served(tiny_llama: Path) -> Iterator[Served]:
    with servers(tiny_llama) as start:
        yield start("--name", "little")


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> ReferenceTokenizer:
    found = ReferenceTokenizer.open(tiny_llama)
    assert found is not None
    return found


def complete(client: openai.OpenAI, prompt: Any, **options: Any) -> Any:
    options = {"model": "little", "temperature": 0, "extra_body": PLAIN, **options}
    return client.completions.create(prompt=prompt, **options)


@pytest.mark.slow
def test_it_names_its_model(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["little"]
    assert client.models.retrieve("little").owned_by == "edgec"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")


def test_a_completion_is_the_dense_model_s(client: openai.OpenAI, tokenizer: ReferenceTokenizer) -> None:
    answer = complete(client, "Call me Ishmael.", max_tokens=24)
    tokens = greedy(tokenizer.encode("Call me Ishmael."), 24)
    assert answer.choices[0].text == tokenizer.decode(tokens)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (16, 24)


def test_a_stream_adds_up(client: openai.OpenAI) -> None:
    whole = complete(client, "a b c", max_tokens=20).choices[0].text
    chunks = list(complete(client, "a b c", max_tokens=20, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole
    assert chunks[-1].usage.completion_tokens == 20


def test_several_prompts_as_text_and_as_tokens(client: openai.OpenAI, tokenizer: ReferenceTokenizer) -> None:
    prompts = ["one", "two", "three"]
    texts = [c.text for c in complete(client, prompts, max_tokens=8).choices]
    assert texts == [tokenizer.decode(greedy(tokenizer.encode(p), 8)) for p in prompts]
    assert [c.text for c in complete(client, [tokenizer.encode(p) for p in prompts], max_tokens=8).choices] == texts


def test_a_prompt_is_scored_with_echo(client: openai.OpenAI, tokenizer: ReferenceTokenizer) -> None:
    text = "It was the best of times, it was the worst of times"
    choice = complete(client, text, max_tokens=0, echo=True, logprobs=3).choices[0]
    tokens = tokenizer.encode(text)
    wanted = log_probabilities(tokens)
    assert choice.text == text and choice.logprobs.tokens == list(text)
    assert choice.logprobs.token_logprobs[0] is None
    for position, (token, found) in enumerate(zip(tokens[1:], choice.logprobs.token_logprobs[1:], strict=True)):
        assert found == pytest.approx(float(wanted[position, token]), abs=1e-4)
    top = choice.logprobs.top_logprobs[5]
    assert max(top.values()) == pytest.approx(float(wanted[4].max()), abs=1e-4) and len(top) in (3, 4)


def test_an_answer_s_logprobs_are_the_dense_model_s(client: openai.OpenAI, tokenizer: ReferenceTokenizer) -> None:
    logprobs = complete(client, "x y", max_tokens=6, logprobs=0).choices[0].logprobs
    prompt = tokenizer.encode("x y")
    answer = greedy(prompt, 6)
    wanted = log_probabilities(prompt + answer)
    for i, found in enumerate(logprobs.token_logprobs):
        assert found == pytest.approx(float(wanted[len(prompt) + i - 1, answer[i]]), abs=1e-4)


def test_a_seed_repeats_and_another_one_does_not(client: openai.OpenAI) -> None:
    def sampled(seed: int) -> list[str]:
        return [c.text for c in complete(client, "once", temperature=1, seed=seed, n=3, max_tokens=12).choices]

    first = sampled(1)
    assert first == sampled(1) != sampled(2)
    assert len(set(first)) == 3  # n answers are n different ones


def test_a_stop_string_and_a_bias_are_honoured(client: openai.OpenAI, tokenizer: ReferenceTokenizer) -> None:
    banned = tokenizer.encode("q")[0]
    choice = complete(client, "hello", max_tokens=5, logit_bias={str(banned): 100}, stop="qqq").choices[0]
    assert choice.text == "" and choice.finish_reason == "stop"
    choice = complete(client, "hello", max_tokens=5, logit_bias={str(banned): 100}).choices[0]
    assert choice.text == "qqqqq"


def test_chat_uses_the_model_s_template(client: openai.OpenAI, tokenizer: ReferenceTokenizer) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    options: Any = {"model": "little", "temperature": 0, "max_tokens": 10, "extra_body": PLAIN}
    prompt = tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", special=True)
    wanted = tokenizer.decode(greedy(prompt, 10))
    whole = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=2, **options)
    assert whole.choices[0].message.content == wanted
    assert whole.choices[0].logprobs is not None and len(whole.choices[0].logprobs.content or ()) == 10
    pieces = client.chat.completions.create(messages=messages, stream=True, **options)
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == wanted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"best_of": 2}, "not supported"),
        ({"temperature": 3}, "less than or equal to 2"),
        ({"logit_bias": {"9999": 1}}, "no token 9999"),
        ({"extra_body": {"topk": 3}}, "did you mean `top_k`"),
        ({"prompt": "x" * 5000}, "context"),
        ({"prompt": [[1, 2], [300]]}, "300"),
    ],
)
def test_what_is_wrong_is_refused_by_name(client: openai.OpenAI, options: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        complete(client, options.pop("prompt", "x"), **options)


def test_nothing_is_left_behind(client: openai.OpenAI, served: Served) -> None:
    complete(client, "x", max_tokens=1)
    wait_for(served, lambda m: m['edgec_kv_blocks{state="owned"}'] == 0)  # the counters are a moment old
