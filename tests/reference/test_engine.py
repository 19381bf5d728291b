"""The engine on the CPU: whoever shares a batch, a cache or a pool, the answers are the same."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from edgec.reference.attention import attend, paged_attention
from edgec.reference.engine import ReferenceEngine
from edgec.reference.options import ReferenceOptions
from edgec.runtime.abi import EventKind, Finish, Status, StepOutcome, Trim
from edgec.runtime.driver import Driver
from edgec.runtime.events import Event, Request
from edgec.runtime.failures import EngineError
from edgec.runtime.sampling import Sampling
from tests.reference.tiny import CONTEXT, VOCAB, dense_logits, engine, prompts, tiny_model

SAMPLED = Sampling(max_tokens=24, temperature=0.9, top_p=0.95, seed=5)


def run(made: ReferenceEngine) -> list[Event]:
    """Step until idle, with the books checked after each step."""
    events: list[Event] = []
    while made.step() is not StepOutcome.IDLE:
        made.check()
        events += made.poll()
    return events + made.poll()


def tokens_of(events: list[Event], number: int, sequence: int = 0) -> list[int]:
    return [e.token for e in events if (e.request, e.sequence, e.kind) == (number, sequence, EventKind.TOKEN)]


def finish_of(events: list[Event], number: int, sequence: int = 0) -> Event:
    [found] = [e for e in events if (e.request, e.sequence, e.kind) == (number, sequence, EventKind.FINISH)]
    return found


# ---- The model through blocks


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("counts", [[1], [7], [1, 1, 1], [5, 1, 12, 1], [3, 20]])
def test_paged_attention_is_plain_attention(block_size: int, counts: list[int]) -> None:
    """In float64, for decodes, whole prompts and chunks at the end of a context; unused slots hold NaN."""
    generator = torch.Generator().manual_seed(block_size)
    heads, kv_heads, dim = 6, 2, 8
    contexts = [count + extra for count, extra in zip(counts, [0, 9, 33, 4], strict=False)]
    blocks = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(blocks) + 3, generator=generator).tolist()
    pools = [torch.full((len(order) * block_size, kv_heads, dim), float("nan"), dtype=torch.float64) for _ in "kv"]
    tables = torch.zeros(len(counts), max(blocks), dtype=torch.int32)
    queries, wanted = [], []
    for s, (count, context, own) in enumerate(zip(counts, contexts, blocks, strict=True)):
        table = [order.pop() for _ in range(own)]
        tables[s, :own] = torch.tensor(table)
        k, v = (torch.randn(context, kv_heads, dim, dtype=torch.float64, generator=generator) for _ in "kv")
        slots = [table[p // block_size] * block_size + p % block_size for p in range(context)]
        pools[0][slots], pools[1][slots] = k, v
        q = torch.randn(count, heads, dim, dtype=torch.float64, generator=generator)
        queries.append(q)
        for i in range(count):
            seen = context - count + i + 1
            for head in range(heads):
                scores = (k[:seen, head // 3] @ q[i, head]) * 0.3
                wanted.append(scores.softmax(0) @ v[:seen, head // 3])
    starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
    out = paged_attention(
        torch.cat(queries), *pools, tables, torch.tensor(contexts, dtype=torch.int32), starts, 0.3, block_size
    )
    torch.testing.assert_close(out.flatten(0, 1), torch.stack(wanted), rtol=0, atol=1e-12)


def test_a_query_sees_nothing_after_itself() -> None:
    q, k, v = torch.ones(1, 2, 2, 4), torch.ones(1, 3, 1, 4), torch.eye(3, 4)[None, :, None]
    out = attend(q, k, v, torch.tensor([[1, 2]]), 1.0)
    assert out[0, 0, 0].tolist() == [0.5, 0.5, 0, 0]
    assert out[0, 1, 1].tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])


@pytest.mark.parametrize(("block_size", "step_tokens"), [(16, 32), (4, 8), (1, 100)])
def test_logits_are_the_dense_models(block_size: int, step_tokens: int) -> None:
    [text] = prompts(1, longest=90, seed=3)
    made = engine(block_size=block_size, step_tokens=step_tokens, blocks=1024 // block_size)
    wanted = dense_logits(text)
    assert np.abs(made.logits(text) - wanted).max() < 1e-5 * np.abs(wanted).max()
    made.check()


def test_logits_of_a_text_that_does_not_fit() -> None:
    with pytest.raises(EngineError) as caught:
        engine().logits([5] * (CONTEXT + 1))
    assert caught.value.status is Status.TOO_LONG


# ---- One answer, whatever happens around it


def alone(prompt: list[int], sampling: Sampling) -> list[int]:
    """The answer of a fresh engine, and for greedy ones of the dense model."""
    [[answer]] = engine(prefix_cache=False, step_tokens=CONTEXT).answer([prompt], sampling)
    if sampling.temperature == 0:
        text = list(prompt)
        for token in answer.tokens:
            assert token == dense_logits(text)[-1].argmax()
            text.append(token)
    return answer.tokens


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [Sampling(max_tokens=24), SAMPLED])
@pytest.mark.parametrize(
    "options",
    [{}, {"block_size": 1, "blocks": 1024}, {"step_tokens": 8}, {"prefix_cache": False}, {"blocks": 14}],
    ids=["batched", "small-blocks", "chunked", "uncached", "preempted"],
)
def test_the_answer_is_the_one_that_is_given_alone(sampling: Sampling, options: dict[str, int]) -> None:
    asked = prompts(12, seed=1)
    made = engine(**options)
    numbers = [made.submit(Request(prompt, sampling)) for prompt in asked]
    events = run(made)
    assert (made.stats().preemptions > 0) == ("blocks" in options and options["blocks"] < 20)
    for number, prompt in zip(numbers, asked, strict=True):
        assert tokens_of(events, number) == alone(prompt, sampling)
    assert made.stats().blocks_owned == 0


def test_a_cached_prompt_gives_the_same_answer_and_logprobs() -> None:
    [prompt] = prompts(1, longest=200, seed=4)
    made = engine()
    sampling = Sampling(max_tokens=16, logprobs=3)
    [[first]] = made.answer([prompt], sampling)
    [[second]] = made.answer([prompt], sampling)
    assert (first.cached_tokens, second.cached_tokens) == (0, (len(prompt) - 1) // 16 * 16)
    assert second.tokens == first.tokens
    assert np.allclose(np.float64(second.logprobs), np.float64(first.logprobs), atol=1e-5)


def test_n_answers_are_the_ones_of_n_requests_that_were_drawn_by_their_number() -> None:
    [prompt] = prompts(1, seed=6)
    made = engine()
    [answers] = made.answer([prompt], Sampling(max_tokens=16, temperature=1.2, seed=9, n=5))
    made.check()
    assert len({tuple(a.tokens) for a in answers}) > 1
    assert answers[0].tokens == alone(prompt, Sampling(max_tokens=16, temperature=1.2, seed=9))
    tight = engine(blocks=(len(prompt) + 16) // 16 + 3)  # children are preempted, and start again
    [again] = tight.answer([prompt], Sampling(max_tokens=16, temperature=1.2, seed=9, n=5))
    assert [a.tokens for a in again] == [a.tokens for a in answers]


def test_salted_prompts_share_nothing() -> None:
    [prompt] = prompts(1, longest=200, seed=4)
    made = engine()
    made.answer([prompt], Sampling(max_tokens=1))
    [[salted]] = made.answer([prompt], Sampling(max_tokens=1), cache_salt=1)
    assert salted.cached_tokens == 0


def test_greater_priority_is_answered_first() -> None:
    made = engine(max_batch=1, step_tokens=64)
    low, high = (made.submit(Request([5, 6], Sampling(max_tokens=2), priority=p)) for p in (-1, 2))
    ended = [e.request for e in run(made) if e.kind is EventKind.FINISH]
    assert ended == [high, low]


# ---- Ends


def test_an_answer_ends_at_max_tokens_at_the_context_and_at_its_last_token() -> None:
    made = engine()
    [prompt] = prompts(1, longest=30, seed=2)
    [[short]] = made.answer([prompt], Sampling(max_tokens=3))
    [[full]] = made.answer([prompt], Sampling(ignore_eos=True))
    [[stopped]] = made.answer([prompt], Sampling(max_tokens=9, stop_tokens=(short.tokens[2],)))
    assert (short.finish, len(short.tokens)) == (Finish.LENGTH, 3)
    assert (full.finish, len(full.tokens) + len(prompt)) == (Finish.LENGTH, CONTEXT)
    assert (stopped.finish, stopped.tokens, stopped.answer_tokens) == (Finish.STOP, short.tokens[:2], 2)
    made.check()


def test_the_end_of_sequence_token_is_not_part_of_the_answer() -> None:
    [prompt] = prompts(1, seed=2)
    [[answer]] = engine().answer([prompt], Sampling(max_tokens=4))
    made = ReferenceEngine(tiny_model(), None, ReferenceOptions(blocks=64), eos=(answer.tokens[1],))
    [[ended]] = made.answer([prompt], Sampling(max_tokens=4))
    [[ignored]] = made.answer([prompt], Sampling(max_tokens=4, ignore_eos=True))
    assert (ended.tokens, ended.finish) == (answer.tokens[:1], Finish.STOP)
    assert ignored.tokens == answer.tokens


class Letters:
    """A tokenizer whose tokens are three letters each."""

    def detokenizer(self) -> Letters:
        return self

    def push(self, token: int) -> str:
        return f"{token:03d}"

    def flush(self) -> str:
        return ""


def test_no_event_has_a_piece_of_a_stop_string() -> None:
    [prompt] = prompts(1, seed=2)
    [[plain]] = engine().answer([prompt], Sampling(max_tokens=6))
    text = "".join(f"{t:03d}" for t in plain.tokens)
    made = ReferenceEngine(tiny_model(), Letters(), ReferenceOptions(blocks=64))
    stop = text[7:11]
    number = made.submit(Request(prompt, Sampling(max_tokens=6, stop=(stop, "never"))))
    events = run(made)
    assert finish_of(events, number).finish is Finish.STOP
    assert "".join(e.text for e in events) == text[: text.index(stop)]
    for at in range(1, len(events)):
        said = "".join(e.text for e in events[:at])
        assert not any(said.endswith(stop[:size]) and text.startswith(said + stop[size:]) for size in (1, 2, 3))
    # What looked like a stop string at the end is text after all.
    [[whole]] = made.answer([prompt], Sampling(max_tokens=6, stop=(text[-1] + "x",)))
    assert whole.text == text


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(EngineError, match="tokenizer") as caught:
        engine().submit(Request([5], Sampling(stop=("x",))))
    assert caught.value.status is Status.UNSUPPORTED


# ---- Scores


@pytest.mark.parametrize("step_tokens", [8, 64])
def test_prompt_scores_are_the_models_log_probabilities(step_tokens: int) -> None:
    [prompt] = prompts(1, seed=8)
    made = engine(step_tokens=step_tokens)
    made.answer([prompt], Sampling(max_tokens=1))  # its prefix is cached, and still every position is scored
    number = made.submit(Request(prompt, Sampling(max_tokens=1, logprobs=2), score_prompt=True))
    scores = [e for e in run(made) if e.request == number and e.kind is EventKind.PROMPT_SCORE]
    exact = torch.from_numpy(dense_logits(prompt)).double().log_softmax(-1)
    assert [(e.position, e.token) for e in scores] == list(enumerate(prompt))
    assert scores[0].logprob is None
    wanted = [float(exact[p, t]) for p, t in enumerate(prompt[1:])]
    assert [e.logprob for e in scores[1:]] == pytest.approx(wanted, abs=1e-4)
    assert [e.top[0][0] for e in scores[1:]] == exact.argmax(-1)[:-1].tolist()


def test_scores_survive_preemption_once_each() -> None:
    asked = prompts(4, longest=60, seed=9)
    made = engine(blocks=8, block_size=8, step_tokens=8)
    numbers = [made.submit(Request(p, Sampling(max_tokens=20), score_prompt=True)) for p in asked if len(p) < 40]
    events = run(made)
    assert made.stats().preemptions > 0
    for number in numbers:
        positions = [e.position for e in events if e.request == number and e.kind is EventKind.PROMPT_SCORE]
        assert positions == list(range(len(positions)))


# ---- Refusals


@pytest.mark.parametrize(
    ("request_", "status", "about"),
    [
        (Request([]), Status.INVALID_ARGUMENT, "no tokens"),
        (Request([VOCAB]), Status.INVALID_ARGUMENT, "vocabulary"),
        (Request([-1]), Status.INVALID_ARGUMENT, "vocabulary"),
        (Request([5], priority=8), Status.INVALID_ARGUMENT, "priority"),
        (Request([5], Sampling(n=9, temperature=1.0)), Status.INVALID_ARGUMENT, "max_batch"),
        (Request([5], Sampling(top_p=2.0)), Status.INVALID_ARGUMENT, "top_p"),
        (Request([5], tenant_weight=2.0), Status.UNSUPPORTED, "weight"),
        (Request([5] * CONTEXT), Status.TOO_LONG, "context"),
    ],
)
def test_what_can_never_run_is_refused_at_once(request_: Request, status: Status, about: str) -> None:
    made = engine()
    with pytest.raises(EngineError, match=about) as caught:
        made.submit(request_)
    assert caught.value.status is status
    assert made.step() is StepOutcome.IDLE


def test_a_prompt_that_the_whole_pool_can_not_hold_is_too_long() -> None:
    made = engine(blocks=2)
    with pytest.raises(EngineError) as caught:
        made.submit(Request([5] * 32))
    assert caught.value.status is Status.TOO_LONG
    [[answer]] = made.answer([[5] * 31], Sampling(ignore_eos=True))
    assert (answer.finish, len(answer.tokens)) == (Finish.LENGTH, 1)


def test_a_full_queue_says_so() -> None:
    made = engine(max_waiting=2)
    made.submit(Request([5]))
    made.submit(Request([5]))
    with pytest.raises(EngineError) as caught:
        made.submit(Request([5]))
    assert caught.value.status is Status.QUEUE_FULL


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "int4"},
        {"block_size": 0},
        {"max_batch": 100, "step_tokens": 99},
        {"kv": "fp8"},
        {"blocks": 0},
        {"context": CONTEXT + 1},
    ],
)
def test_wrong_options_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(EngineError, match=next(iter(wrong))) as caught:
        engine(**wrong)
    assert caught.value.status is Status.INVALID_ARGUMENT


def test_memory_bounds_the_pool() -> None:
    made = engine(blocks=None, memory=1 << 20)
    assert (
        made.description["memory"]["pools"] <= 1 << 20 < made.description["memory"]["pools"] + 16 * 2 * 2 * 2 * 16 * 4
    )
    with pytest.raises(EngineError) as caught:
        engine(blocks=None, memory=100)
    assert caught.value.status is Status.OVER_BUDGET


# ---- Cancelling, failing, closing


def test_cancelling_at_every_step_returns_every_block() -> None:
    [prompt] = prompts(1, longest=60, seed=5)
    for steps in range(12):
        made = engine(step_tokens=16, max_batch=8)
        number = made.submit(Request(prompt, Sampling(max_tokens=8, temperature=1.0, n=3)))
        for _ in range(steps):
            made.step()
        was_there = made.cancel(number)
        made.check()
        assert made.stats().blocks_owned == 0
        finishes = [e.finish for e in run(made) if e.kind is EventKind.FINISH]
        assert len(finishes) == 3
        assert (Finish.CANCELLED in finishes) == was_there


def test_cancelling_while_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine()
    asked = prompts(2, seed=5)
    gone, stays = (made.submit(Request(p, Sampling(max_tokens=4))) for p in asked)
    forward = made._runner.forward

    def interrupted(batch: object) -> torch.Tensor:
        made.cancel(gone)
        made.stats()
        return forward(batch)  # type: ignore[arg-type]

    monkeypatch.setattr(made._runner, "forward", interrupted)
    events = run(made)
    assert finish_of(events, gone).finish is Finish.CANCELLED
    assert tokens_of(events, gone) == []
    assert tokens_of(events, stays) == alone(asked[1], Sampling(max_tokens=4))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("kernel"), MemoryError()])
def test_a_model_that_fails_ends_those_in_the_step(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    made = engine(max_batch=2)
    asked = prompts(3, seed=5)
    numbers = [made.submit(Request(p, Sampling(max_tokens=4))) for p in asked]

    def broken(_: object) -> torch.Tensor:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(made._runner, "forward", broken)
        assert made.step() is StepOutcome.FAILED
    made.check()
    assert type(error).__name__ in made.failure
    events = made.poll() + run(made)
    finishes = [finish_of(events, number).finish for number in numbers]
    assert finishes.count(Finish.FAILED) >= 1
    assert finishes[2] is Finish.LENGTH
    assert tokens_of(events, numbers[2]) == alone(asked[2], Sampling(max_tokens=4))
    assert made.stats().failures == 1


def test_a_logit_that_is_no_number_fails_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it computed is not found by the next one with the same prompt."""
    made = engine()
    bad, good = [[7] * 40, [9] * 40]
    layers = made._runner.layers

    def poisoned(batch: object) -> torch.Tensor:
        x = layers(batch)  # type: ignore[arg-type]
        made._runner.pools[0][1][batch.slots[batch.tokens == 7]] = float("nan")  # type: ignore[attr-defined]
        x[batch.tokens == 7] = float("nan")  # type: ignore[attr-defined]
        return x

    with monkeypatch.context() as patch:
        patch.setattr(made._runner, "layers", poisoned)
        numbers = [made.submit(Request(p, Sampling(max_tokens=4))) for p in (bad, good)]
        events = run(made)
    assert [finish_of(events, n).finish for n in numbers] == [Finish.FAILED, Finish.LENGTH]
    [[answer], [other]] = made.answer([bad, good], Sampling(max_tokens=4))
    assert answer.cached_tokens == 0
    assert answer.tokens == alone(bad, Sampling(max_tokens=4))
    assert other.tokens == alone(good, Sampling(max_tokens=4))


def test_a_driver_steps_it_while_many_threads_ask() -> None:
    made = engine(blocks=24)
    driver = Driver(made)
    driver.start()
    asked = prompts(16, seed=7)
    heard: dict[int, list[Event]] = {}
    done = [threading.Event() for _ in asked]

    def ask(i: int) -> None:
        heard[i] = []

        def deliver(events: object) -> None:
            heard[i].extend(events)  # type: ignore[arg-type]
            if any(e.kind is EventKind.FINISH for e in heard[i]):
                done[i].set()

        driver.submit(Request(asked[i], Sampling(max_tokens=12)), deliver)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(event.wait(60) for event in done)
    driver.stop()
    made.check()
    for i, prompt in enumerate(asked):
        assert [e.token for e in heard[i] if e.kind is EventKind.TOKEN] == alone(prompt, Sampling(max_tokens=12))


def test_trim_forgets_prefixes_and_preempts_all_but_one() -> None:
    made = engine()
    numbers = [made.submit(Request(p, Sampling(max_tokens=30))) for p in prompts(4, seed=3)]
    made.step()
    made.step()
    made.trim(Trim.CRITICAL)
    assert (made.stats().running, made.stats().blocks_cached) == (1, 0)
    events = made.poll() + run(made)
    assert all(finish_of(events, n).finish is Finish.LENGTH for n in numbers)


def test_closing_ends_what_is_left() -> None:
    made = engine()
    number = made.submit(Request([5, 6]))
    made.close()
    made.close()
    assert finish_of(made.poll(), number).finish is Finish.CANCELLED
    with pytest.raises(EngineError, match="closed"):
        made.submit(Request([5]))
    with pytest.raises(EngineError, match="closed"):
        made.step()


def test_two_engines_share_a_model_and_not_their_options() -> None:
    model = tiny_model()
    [text] = prompts(1, seed=3)
    rounded = ReferenceEngine(model, None, ReferenceOptions(blocks=64, kv="int8")).logits(text)
    half = ReferenceEngine(model, None, ReferenceOptions(blocks=64, dtype="bfloat16")).logits(text)
    plain = ReferenceEngine(model, None, ReferenceOptions(blocks=64)).logits(text)
    wanted = dense_logits(text)
    assert np.abs(plain - wanted).max() < 1e-5 * np.abs(wanted).max()
    assert 1e-3 < np.abs(rounded - wanted).max() / np.abs(wanted).max() < 0.2
    assert 1e-3 < np.abs(half - wanted).max() / np.abs(wanted).max() < 0.2
