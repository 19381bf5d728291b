"""Speculation in the reference: at temperature 0 it changes no token, above it not the distribution."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from edgec.architectures.draft_head import DraftShape, Head, build
from edgec.architectures.llama import Llama, LlamaConfig
from edgec.architectures.rope import inverse_frequencies
from edgec.reference import uses
from edgec.reference.engine import ReferenceEngine
from edgec.reference.load import dequantised, head_of, load
from edgec.reference.native_weights import read_native
from edgec.reference.options import ReferenceOptions
from edgec.reference.philox import ACCEPT, RESIDUAL, uniform
from edgec.reference.request import Answer
from edgec.reference.sampler import History, Proposal, Row, Sampled, distribution, draw, propose, sample, verify
from edgec.reference.speculation import Drafter, continuation, find_ngram, may_speculate
from edgec.runtime.abi import Finish, KvType, Speculation, Status, StepOutcome
from edgec.runtime.engine import Engine, EngineOptions
from edgec.runtime.events import Answer as Collected
from edgec.runtime.events import Request
from edgec.runtime.failures import EngineError
from edgec.runtime.sampling import Sampling
from edgec.runtime.speculative import PROMPTS
from tests import tiny_bundle
from tests.reference.tiny import CONFIG, prompts
from tests.tiny_bundle import write_tiny_bundle

pytestmark = pytest.mark.slow  # some seconds each

WHO = ("head", "ngram", "both")


@cache
def tiny_head() -> Head:
    """Random in every weight."""
    head = build(CONFIG, DraftShape("recurrent", (64, 32), 160))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
    head.token_map.copy_(torch.randperm(CONFIG.vocab_size, generator=generator)[:160].sort().values)
    return head.eval()


@cache
def talker() -> Llama:
    """Random weights that are small enough for it to say the same things again and again."""
    return random_model(CONFIG, seed=0)


def random_model(config: LlamaConfig, seed: int) -> Llama:
    generator = torch.Generator().manual_seed(seed)
    model = Llama(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
    return model.eval()


def engine(**options: Any) -> ReferenceEngine:
    """One that decodes plainly."""
    return speculative("off", **options)


def speculative(who: str = "both", length: int = 4, **options: Any) -> ReferenceEngine:
    chosen = {"max_batch": 8, "step_tokens": 128, "blocks": 64, "speculation": who, "draft_length": length, **options}
    return ReferenceEngine(talker(), None, ReferenceOptions(**chosen), eos=(1,), draft=tiny_head())


def asked() -> list[list[int]]:
    """Some that repeat themselves, some that don't."""
    loops = [[40 + i * 7 % (5 + k) for i in range(20 + k)] for k in range(4)]
    return [prompt for pair in zip(prompts(4, seed=3), loops, strict=True) for prompt in pair]  # each its own length


def answers(made: ReferenceEngine, sampling: Sampling, batch: int = 8) -> list[list[int]]:
    given: list[list[int]] = []
    for first in range(0, 8, batch):
        given += [answer.tokens for [answer] in made.answer(asked()[first : first + batch], sampling)]
        made.check()
    assert made.stats().blocks_owned == 0
    return given


class Oracle(Drafter):
    """Knows the plain answer, and proposes it, but for one token of each run, at `wrong`; in runs of `length`."""

    def __init__(self, plain: dict[int, list[int]], wrong: int | None, length: int) -> None:
        super().__init__(ReferenceOptions(speculation="ngram"), None, torch.nn.Identity())
        self.plain, self.wrong, self.run_length = plain, wrong, length

    def propose(self, answers: Sequence[tuple[Answer, Sequence[int], int]]) -> dict[Answer, list[Proposal]]:
        proposals = {}
        for answer, _, room in answers:
            # What comes after the end is verified, too, and thrown away.
            rest = [*self.plain[len(answer.owner.prompt)], *[7] * 8][answer.tokens :][: min(self.run_length, room)]
            tokens = [t if i != self.wrong else (t + 1) % 300 for i, t in enumerate(rest)]
            proposals[answer] = [Proposal.certain(token) for token in tokens]
        return proposals


# ---- Temperature 0


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("length", range(1, 9))
def test_at_temperature_0_it_is_plain_decoding(who: str, length: int) -> None:
    sampling = Sampling(max_tokens=24, ignore_eos=True)
    plain = answers(engine(), sampling)
    for batch in (1, 3, 8):
        made = speculative(who, length)
        assert answers(made, sampling, batch) == plain
        stats = made.stats()
        assert stats.drafted_tokens > 0
        assert stats.answer_tokens == sum(map(len, plain))
        if who != "head":  # a random head is hardly ever right
            assert sum(stats.draft_kept) > 10 and (stats.tokens_per_run or 0) > 1


@pytest.mark.parametrize("wrong", [*range(8), None])
def test_a_rejection_at_each_place_leaves_nothing_behind(wrong: int | None) -> None:
    """The next token would see keys and values of rejected ones, and blocks would be missing."""
    sampling = Sampling(max_tokens=40, ignore_eos=True)
    text = prompts(6, longest=40, seed=11)
    plain = [answer.tokens for [answer] in engine().answer(text, sampling)]
    made = engine(block_size=4, blocks=200)
    made._drafter = Oracle({len(p): a for p, a in zip(text, plain, strict=True)}, wrong, 8)
    assert len({len(p) for p in text}) == len(text)
    assert [answer.tokens for [answer] in made.answer(text, sampling)] == plain
    made.check()
    stats = made.stats()
    assert stats.blocks_owned == 0
    kept = [8] * 8 if wrong is None else [wrong]
    assert stats.tokens_per_run == pytest.approx(1 + kept[0], abs=0.6 if wrong is not None else 2.5)
    # Where the last run was kept, and the cache holds only what is right: again, from the cache.
    assert [answer.tokens for [answer] in made.answer(text, sampling)] == plain


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=26, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, ignore_eos=True),
        Sampling(max_tokens=9, logit_bias={7: 2.0, 31: -3.0}, logprobs=3, ignore_eos=True),
        Sampling(max_tokens=1),
        Sampling(max_tokens=2),
        Sampling(ignore_eos=True),  # until there is no room
    ],
    ids=["penalties", "bias and logprobs", "one token", "two tokens", "whole pool"],
)
def test_options_and_limits_are_kept(sampling: Sampling) -> None:
    def given(made: ReferenceEngine) -> list[Collected]:
        return [answer for [answer] in made.answer(asked(), sampling)]

    blocks = 256 if sampling.max_tokens else 6  # of 16 positions; then one request at a time
    wanted = given(engine(blocks=blocks))
    knowing = engine(blocks=blocks)
    knowing._drafter = Oracle({len(p): a.tokens for p, a in zip(asked(), wanted, strict=True)}, 4, 6)
    for made in (*(speculative(length=length, blocks=blocks) for length in (1, 4, 8)), knowing):
        found = given(made)
        for a, b in zip(found, wanted, strict=True):
            assert (a.tokens, a.finish, a.answer_tokens) == (b.tokens, b.finish, b.answer_tokens)
            assert np.allclose(np.float64(a.logprobs), np.float64(b.logprobs), atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("cut", [2, 3, 7, 12])
def test_an_answer_ends_inside_a_run(cut: int) -> None:
    text = asked()[1]
    [[plain]] = engine().answer([text], Sampling(max_tokens=30, ignore_eos=True))
    stop = plain.tokens[cut]
    first = plain.tokens.index(stop)
    for sampling in (Sampling(max_tokens=cut), Sampling(max_tokens=30, stop_tokens=(stop,))):
        made = engine()
        made._drafter = Oracle({len(text): plain.tokens}, None, 8)
        [[answer]] = made.answer([text], sampling)
        wanted = cut if not sampling.stop_tokens else first
        assert answer.tokens == plain.tokens[:wanted]
        assert answer.finish is (Finish.STOP if sampling.stop_tokens else Finish.LENGTH)
        assert answer.answer_tokens == wanted
        assert made.stats().answer_tokens == wanted  # only what counts is counted
        made.check()


# ---- With everything else


def test_preemption_chunks_and_small_blocks_change_nothing() -> None:
    sampling = Sampling(max_tokens=30, ignore_eos=True)
    plain = answers(engine(), sampling)
    tight = speculative(blocks=14)
    assert answers(tight, sampling) == plain
    assert tight.stats().preemptions > 0
    for options in ({"step_tokens": 8}, {"block_size": 1, "blocks": 1024}, {"prefix_cache": False}):
        assert answers(speculative(**options), sampling) == plain


@pytest.mark.parametrize("who", WHO)
def test_a_cached_prompt_is_drafted_for_as_a_computed_one(who: str) -> None:
    """The head's state is the last row's hidden state, which is always computed."""
    made = speculative(who, 3)
    sampling = Sampling(max_tokens=20, ignore_eos=True)
    runs = []
    for _ in range(2):
        before = made.stats()
        given = [a for [a] in made.answer([asked()[1], asked()[4]], sampling)]
        runs.append(([a.tokens for a in given], made.stats().since(before).draft_kept))
    assert given[0].cached_tokens > 0
    assert runs[0] == runs[1]


def test_mixed_batches_serve_each_as_it_asked() -> None:
    made = speculative()
    kinds = [None, True, False]
    numbers = [
        made.submit(Request(prompt, Sampling(max_tokens=16, temperature=t, seed=s, speculate=k, ignore_eos=True)))
        for prompt in asked()[:2]
        for t, s in ((0.0, None), (0.9, 5), (0.9, None))
        for k in kinds
    ]
    drafted: set[int] = set()
    real = made._drafter.propose
    made._drafter.propose = lambda rows: drafted.update(a.owner.number for a, _, _ in rows) or real(rows)  # type: ignore
    while made.step() is not StepOutcome.IDLE:
        made.check()
    speculated = [number in drafted for number in numbers]
    assert speculated == [True, True, False, False, True, False, True, True, False] * 2
    assert may_speculate(Sampling(seed=3)) and not may_speculate(Sampling(temperature=1.0, seed=3))


def test_a_seed_keeps_its_tokens_unless_it_is_told_not_to() -> None:
    sampling = Sampling(max_tokens=24, temperature=0.9, seed=5, ignore_eos=True)
    made = speculative()
    assert answers(made, sampling) == answers(engine(), sampling)
    assert made.stats().drafted_tokens == 0
    told = Sampling(max_tokens=24, temperature=0.9, seed=5, ignore_eos=True, speculate=True)
    other = answers(speculative(), told, batch=1)
    assert other != answers(engine(), sampling)
    assert other == answers(speculative(), told, batch=1)  # alone, nothing else plays a part


@pytest.mark.parametrize("step_tokens", [9, 64])
def test_n_answers_fork_from_one_prompt(step_tokens: int) -> None:
    """Also when the prompt's last token comes alone, where n-grams could be proposed for all of them at once."""
    text = [40 + i % 3 for i in range(28)]
    sampling = Sampling(max_tokens=12, temperature=1.1, seed=9, n=3, ignore_eos=True, speculate=True)
    made = speculative("both", 3, step_tokens=step_tokens)
    [given] = made.answer([text], sampling)
    made.check()
    assert [len(a.tokens) for a in given] == [12, 12, 12]
    assert len({tuple(a.tokens) for a in given}) == 3
    first = [a.tokens[0] for a in given]
    [plain] = engine().answer([text], Sampling(max_tokens=1, temperature=1.1, seed=9, n=3))
    assert first == [a.tokens[0] for a in plain]


def test_each_of_n_answers_is_drafted_for_at_once() -> None:
    """From the state that they share: the prompt's last row."""
    made = speculative("head", 3)
    made.submit(Request(asked()[0], Sampling(max_tokens=12, temperature=1.1, n=3, ignore_eos=True)))
    while not made.stats().answer_tokens:
        made.step()
    made.step()
    assert (made.stats().draft_runs, made.stats().drafted_tokens) == (3, 9)


def test_cancelling_at_every_step_returns_every_block() -> None:
    text = asked()[1]
    for steps in range(10):
        made = speculative("both", 5, block_size=4, blocks=64)
        number = made.submit(Request(text, Sampling(max_tokens=20, temperature=1.0, n=3, ignore_eos=True)))
        for _ in range(steps):
            made.step()
        made.cancel(number)
        made.check()
        assert made.stats().blocks_owned == 0


def test_cancelling_while_proposals_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    made = speculative("ngram", 5)
    gone, stays = (made.submit(Request(p, Sampling(max_tokens=20, ignore_eos=True))) for p in (asked()[1], asked()[3]))
    forward = made._runner.forward

    def interrupted(batch: Any) -> torch.Tensor:
        if made.stats().answer_tokens > 8:
            made.cancel(gone)
        return forward(batch)

    monkeypatch.setattr(made._runner, "forward", interrupted)
    events = []
    while made.step() is not StepOutcome.IDLE:
        made.check()
        events += made.poll()
    said = [e.token for e in events if e.request == stays and e.finish is Finish.NONE]
    [[plain]] = engine().answer([asked()[3]], Sampling(max_tokens=20, ignore_eos=True))
    assert said == plain.tokens


def test_a_head_that_gives_no_numbers_proposes_nothing() -> None:
    head = build(CONFIG, DraftShape("recurrent", (32,), 32))
    torch.nn.init.constant_(head.norm.weight, float("nan"))
    made = ReferenceEngine(talker(), None, ReferenceOptions(blocks=64, speculation="head"), draft=head)
    sampling = Sampling(max_tokens=10, ignore_eos=True)
    assert [a.tokens for [a] in made.answer(asked(), sampling)] == answers(engine(), sampling)
    assert made.stats().drafted_tokens == 0


def test_a_head_that_fails_ends_those_it_drafts_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = speculative("head", 3)
    number = made.submit(Request(asked()[0], Sampling(max_tokens=10, ignore_eos=True)))
    made.step()

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("head")

    monkeypatch.setattr(made._drafter._head, "step", broken)
    assert made.step() is StepOutcome.FAILED
    assert [e.finish for e in made.poll() if e.request == number][-1] is Finish.FAILED
    assert "head" in made.failure
    made.check()
    assert made.stats().blocks_owned == 0


@pytest.mark.parametrize(
    ("wrong", "about"),
    [
        ({"speculation": "eagle"}, "speculation"),
        ({"draft_length": 0}, "draft_length"),
        ({"draft_length": 9}, "1 and 8"),
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, Any], about: str) -> None:
    with pytest.raises(EngineError, match=about) as caught:
        ReferenceOptions(**wrong)
    assert caught.value.status is Status.INVALID_ARGUMENT


def test_a_head_that_is_not_there_is_refused() -> None:
    for who in ("head", "both"):
        with pytest.raises(EngineError, match="draft head") as caught:
            ReferenceEngine(talker(), None, ReferenceOptions(blocks=8, speculation=who))
        assert caught.value.status is Status.INVALID_ARGUMENT
    other = build(CONFIG, DraftShape("attentive", (96,), 64))
    with pytest.raises(EngineError, match="attentive") as caught:
        ReferenceEngine(talker(), None, ReferenceOptions(blocks=8, speculation="head"), draft=other)
    assert caught.value.status is Status.UNSUPPORTED


# ---- Above temperature 0: a game of 12 words, whose every probability is known

WORDS, SHORT, ANSWER = 12, [0, 2, 3, 4, 6, 9, 11], 4
WARM = Sampling(max_tokens=ANSWER, temperature=0.8, ignore_eos=True)
GAME = LlamaConfig(
    vocab_size=WORDS, hidden_size=32, intermediate_size=32, layers=1, heads=2, kv_heads=1, head_dim=16, max_positions=64
)
PROMPT = [3, 1, 4, 1, 5]


class ShortHead:
    """A draft head of seven words, which looks at nothing but the last one."""

    token_map = torch.tensor(SHORT, dtype=torch.int32)

    def step(self, state: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return embedded

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        return state[:, :7] * 1.5 + torch.tensor([1.0, 0.0, 0.5, -0.5, 1.0, 0.0, 0.5])


@cache
def game() -> Llama:
    return random_model(GAME, seed=4)


@cache
def exact() -> NDArray[np.float64]:
    """Probability of every answer, (12, 12, 12, 12)."""
    p = np.ones((WORDS,) * ANSWER)
    for place in range(ANSWER):
        heads = list(itertools.product(range(WORDS), repeat=place))
        with torch.no_grad():
            logits = game()(torch.tensor([[*PROMPT, *head] for head in heads]))[:, -1].double() / WARM.temperature
        p *= logits.softmax(-1).numpy().reshape((WORDS,) * (place + 1) + (1,) * (ANSWER - place - 1))
    return p


def drawn(count: int) -> NDArray[np.int64]:
    """Answers of the engine to as many seeds, (count, 4)."""
    options = ReferenceOptions(
        max_batch=64, blocks=512, speculation="head", draft_length=2, step_tokens=512, max_waiting=count
    )
    model_head = build(LlamaConfig(**{**GAME.to_dict(), "vocab_size": 32}), DraftShape("recurrent", (32,), 32))
    made = ReferenceEngine(game(), None, options, draft=model_head)
    made._drafter._head = ShortHead()
    numbers = [
        made.submit(Request(PROMPT, Sampling(**{**vars(WARM), "seed": 977 * i + 3, "speculate": True})))
        for i in range(count)
    ]
    said: dict[int, list[int]] = {number: [] for number in numbers}
    while made.step() is not StepOutcome.IDLE:
        for event in made.poll():
            if event.finish is Finish.NONE:
                said[event.request].append(event.token)
    assert sum(made.stats().draft_kept) > count / 10
    return np.array([said[number] for number in numbers])


def deviation(tokens: NDArray[np.int64]) -> tuple[float, float]:
    """The greatest over places 1 … 3 of the answer: χ² in standard deviations, and total variation."""
    worst, apart = 0.0, 0.0
    for place in range(1, ANSWER):
        p = exact().sum(axis=tuple(i for i in range(ANSWER) if i != place))
        counts = np.bincount(tokens[:, place], minlength=WORDS)
        statistic = ((counts - p * len(tokens)) ** 2 / (p * len(tokens))).sum()
        worst = max(worst, (statistic - (WORDS - 1)) / np.sqrt(2 * (WORDS - 1)))
        apart = max(apart, 0.5 * np.abs(counts / len(tokens) - p).sum())
    return float(worst), float(apart)


# χ² with 11 degrees of freedom is 4.5 standard deviations above its mean once in a thousand times, and total variation
# of 3000 draws over 12 words is 0.02 ± 0.005 when all is right.
RUNS, MOST_CHI, MOST_APART = 3000, 4.5, 0.045


def greedy_verifier(row: Row, sampling: Sampling, history: History, proposal: Proposal, **_: Any) -> Sampled:
    """Keeps what the target finds likeliest, else takes that."""
    return Sampled(int(row.argmax()))


def residual_not_renormalised(
    row: Row, sampling: Sampling, history: History, proposal: Proposal, *, seed: int, answer: int, position: int
) -> Sampled:
    """Draws from max(0, p − q) as if it summed to 1: what is missing falls to the last word."""
    tokens, weights = distribution(row, sampling, history)
    p, q = np.zeros(len(row)), np.zeros(len(row))
    p[tokens], q[proposal.tokens] = weights / weights.sum(), proposal.weights / proposal.weights.sum()
    token = proposal.token
    if uniform(seed, answer, position, ACCEPT) * q[token] < p[token]:
        return Sampled(token)
    sums = np.cumsum(np.maximum(p - q, 0))
    at = int(np.searchsorted(sums, uniform(seed, answer, position, RESIDUAL), side="right"))
    return Sampled(min(at, len(row) - 1))


def bonus_from_the_draft(
    row: Row, sampling: Sampling, history: History, *, seed: int, answer: int, position: int
) -> Sampled | None:
    """Takes the word after kept proposals from the draft's own distribution."""
    if position == len(PROMPT):  # the first word has no run in front of it
        return sample(row, sampling, history, seed=seed, answer=answer, position=position)
    short = ShortHead().logits(torch.zeros(1, 7))[0].numpy()
    tokens, weights = distribution(short, sampling, History())
    return Sampled(SHORT[draw(tokens, weights, uniform(seed, answer, position))])


def test_the_distribution_is_the_targets() -> None:
    chi, apart = deviation(drawn(RUNS))
    assert chi < MOST_CHI
    assert apart < MOST_APART


@pytest.mark.parametrize(
    ("name", "bug"),
    [("verify", greedy_verifier), ("verify", residual_not_renormalised), ("sample", bonus_from_the_draft)],
    ids=["greedy verifier", "residual not renormalised", "bonus from the draft"],
)
def test_a_wrong_verifier_is_caught(name: str, bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uses, name, bug)
    chi, apart = deviation(drawn(RUNS))
    assert chi > MOST_CHI
    assert apart > MOST_APART


@pytest.mark.parametrize(
    "options",
    [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.15}, {"logit_bias": {2: 1.5, 3: -2.0, 10: 1.0}}, {"temperature": 2.0}],
    ids=str,
)
@pytest.mark.parametrize("certain", [False, True])
def test_every_option_keeps_its_distribution(options: dict[str, Any], certain: bool) -> None:
    """Of one verified token: proposals that were drawn, and proposals that could not have been others."""
    random = np.random.default_rng(8)
    target = random.normal(0, 1.2, WORDS).astype(np.float32)
    draft = random.normal(0, 1.2, len(SHORT)).astype(np.float32)
    sampling = Sampling(**{"temperature": 1.3, **options})
    tokens, weights = distribution(target, sampling, History())
    p = np.zeros(WORDS)
    p[tokens] = weights / weights.sum()
    second = int(np.argsort(p)[-2])
    counts, kept = np.zeros(WORDS), 0
    for seed in range(4000):
        where = {"seed": seed * 977 + 3, "answer": 0, "position": 0}
        proposal = Proposal.certain(second) if certain else propose(draft, np.array(SHORT), sampling, **where)
        assert proposal is not None
        found = verify(target, sampling, History(), proposal, **where)
        assert found is not None
        counts[found.token] += 1
        kept += found.token == proposal.token
    assert counts[p == 0].sum() == 0
    assert 0 < kept < 4000
    expected = 4000 * p[p > 0]
    freedom = len(expected) - 1
    assert (((counts[p > 0] - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom) < MOST_CHI


@pytest.mark.parametrize("alpha", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_expected_tokens_are_the_papers(alpha: float, gamma: int) -> None:
    """Target and draft over two words, with Σ min(p, q) = α by construction."""
    target = np.log(np.array([alpha, 1 - alpha], np.float32))
    sure, sampling, runs, tokens = np.array([0.0, -80.0], np.float32), Sampling(temperature=1.0), 4000, 0
    for seed in range(runs):
        for position in range(gamma + 1):
            tokens += 1
            where = {"seed": seed * 7919 + 1, "answer": 0, "position": position}
            proposal = propose(sure, np.arange(2), sampling, **where)
            assert proposal is not None
            found = verify(target, sampling, History(), proposal, **where)
            if position == gamma or found is None or found.token != proposal.token:
                break
    assert tokens / runs == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha), rel=0.02)


# ---- N-grams


def test_the_longest_and_latest_ending_is_found() -> None:
    text = [1, 2, 3, 9, 2, 3, 7, 8, 2, 3]
    assert find_ngram(text) == 6
    assert find_ngram([5, 1, 2, 3, 4, 1, 9, 2, 3, 0, 1, 2, 3]) == 4
    assert find_ngram([1, 2, 3]) is None
    assert find_ngram([4, 4]) is None
    assert find_ngram(text, window=3) is None
    assert find_ngram([4, 4, 4], least=2) == 2
    assert continuation(text, 6, 3) == [7, 8, 2]
    assert continuation([1, 2, 1, 2], 2, 5) == [1, 2, 1, 2, 1]
    assert continuation([4, 4, 4], 2, 3) == [4, 4, 4]


# ---- Against the native engine


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a head; and with the frequencies that PyTorch gives (see test_exact.py)."""
    made = write_tiny_bundle(tmp_path_factory.mktemp("speculation"), draft=True)
    path = made / "bundle/native/model.safetensors"
    tensors = load_file(path)
    tensors["rope.frequencies"] = inverse_frequencies(tiny_bundle.HEAD, 10000.0, None)[0]
    save_file(tensors, path)
    return made


@pytest.mark.slow  # the core has to be compiled
@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("length", [1, 3, 8])
def test_the_same_seed_gives_the_native_engines_tokens(bundle: Path, who: str, length: int) -> None:
    """The same proposals, the same draws, the same rollback: token for token above temperature 0."""
    found = read_native(bundle / "bundle/native")
    model, quantised = dequantised(found.config, found.state, "the bundle")
    assert found.draft is not None
    head = head_of(found.config, found.draft)
    options = ReferenceOptions(
        kv="int8", activations="int8", context=512, blocks=64, speculation=who, draft_length=length
    )
    native_options = EngineOptions(
        kv=KvType.INT8, threads=1, context=512, speculation=Speculation[who.upper()], draft_length=length
    )
    reference = ReferenceEngine(model, None, options, eos=(tiny_bundle.END,), quantised=quantised, draft=head)
    text = [[40 + i * 7 % 11 for i in range(33)], [(7 * i * i + 3) % 250 for i in range(21)]]
    samplings = [
        Sampling(max_tokens=40, temperature=t, seed=seed, ignore_eos=True, speculate=True, **more)
        for seed, t, more in ((1, 0.2, {}), (2, 1.0, {"top_p": 0.9, "repetition_penalty": 1.1}), (3, 0.7, {"top_k": 4}))
    ]
    with Engine(bundle, native_options) as native:
        for sampling in samplings:
            for prompt in text:
                [[wanted]], [[found]] = native.answer([prompt], sampling), reference.answer([prompt], sampling)
                assert found.tokens == wanted.tokens
        theirs, own = native.stats(), reference.stats()
    assert (own.draft_reached, own.draft_kept) == (theirs.draft_reached, theirs.draft_kept)
    assert (own.drafted_tokens, own.draft_runs) == (theirs.drafted_tokens, theirs.draft_runs)
    assert 0 < sum(own.draft_kept) < own.drafted_tokens


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("numbers", ["float", "int8"])
def test_smollm2_says_the_same_at_temperature_0(numbers: str) -> None:
    """Prose, code, Korean, what repeats itself, and what ends inside a word, in one batch."""
    loaded = load(Path(__file__).parent.parent.parent / "recipes/smollm2-135m.yaml", weights="int8")
    assert loaded.tokenizer is not None
    texts = [text for name, _, text in PROMPTS if name in ("code", "prose", "Korean", "JSON")]
    asked = [loaded.tokenizer.encode(text) for text in [*texts, "one two three four " * 40 + "one two"]]
    given = []
    for who in ("off", "ngram"):
        options = ReferenceOptions(
            kv=numbers, activations=numbers, context=512, max_batch=8, blocks=200, speculation=who, draft_length=5
        )
        made = ReferenceEngine(loaded.model, None, options, quantised=loaded.quantised)
        given.append([a.tokens for [a] in made.answer(asked, Sampling(max_tokens=16, ignore_eos=True))])
        made.check()
        assert (sum(made.stats().draft_kept) > 10) == (who == "ngram")
    assert given[0] == given[1]
