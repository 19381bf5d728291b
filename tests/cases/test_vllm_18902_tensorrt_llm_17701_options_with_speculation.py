"""vllm#18902, TensorRT-LLM#17701: penalties, min-p or logit bias are silently ignored when speculation is on.

Right behaviour: each option means what it means without; what can't be combined is refused.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from edgec.runtime.abi import Batching, Speculation, Status
from edgec.runtime.engine import EngineOptions
from edgec.runtime.failures import EngineError
from edgec.runtime.sampling import Sampling
from tests.drafting import BOTH, NGRAM, WHO, ask, open_engine, prompts
from tests.tiny_bundle import write_tiny_bundle

pytestmark = pytest.mark.slow  # the core has to be compiled


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bundle(tmp_path_factory.mktemp("options"), draft=True)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=30, repetition_penalty=1.3, ignore_eos=True),
        Sampling(max_tokens=30, frequency_penalty=0.6, presence_penalty=0.4, logprobs=1, ignore_eos=True),
        Sampling(max_tokens=30, frequency_penalty=-0.8, ignore_eos=True),  # rewards repeating: long runs are kept
        Sampling(max_tokens=30, logit_bias={7: 2.0, 31: -3.0, 40: 1.0}, ignore_eos=True),
    ],
    ids=["repetition", "frequency and presence", "reward", "bias"],
)
def test_greedy_answers_are_those_without_speculation(bundle: Path, sampling: Sampling) -> None:
    with open_engine(bundle) as engine:
        plain = ask(engine, prompts(), sampling, batch=4)
        ignored = Sampling(max_tokens=30, logprobs=sampling.logprobs, ignore_eos=True)
        assert ask(engine, prompts(), ignored, batch=4) != plain  # the option does something
    for who in WHO:
        for length in (1, 4, 8):
            with open_engine(bundle, who, length) as engine:
                assert ask(engine, prompts(), sampling, batch=4) == plain
                # A penalty may leave nothing that repeats itself, so n-grams alone may have nothing to propose.
                assert engine.stats().drafted_tokens > 0 or who is NGRAM


@pytest.mark.parametrize("who", WHO)
def test_no_token_is_drawn_that_an_option_excludes(bundle: Path, who: Speculation) -> None:
    def drawn(**options: object) -> list[tuple[object, ...]]:
        sampling = Sampling(
            max_tokens=40, temperature=1.0, seed=6, logprobs=20, ignore_eos=True, speculate=True, **options
        )  # type: ignore[arg-type]
        with open_engine(bundle, who, 4) as engine:
            tokens = [token for said in ask(engine, prompts(), sampling, batch=8) for token in said[:-1]]
            assert engine.stats().drafted_tokens > 0
        return tokens

    for _, logprob, top, _ in drawn(min_p=0.4):
        assert logprob >= top[0][1] + math.log(0.4) - 1e-5  # type: ignore[index, operator]
    for token, _, top, _ in drawn(top_k=3):
        assert token in [t for t, _ in top[:3]]  # type: ignore[index]
    for token, _, top, _ in drawn(top_p=0.3):
        before = 0.0
        for other, logprob in top:  # type: ignore[attr-defined]
            if other == token:
                break
            before += math.exp(logprob)
        assert before < 0.3 + 1e-5
    banned = {t for t in range(300) if t % 3}
    assert not banned & {token for token, *_ in drawn(logit_bias=dict.fromkeys(banned, -100.0))}


def test_what_can_not_be_combined_is_refused(bundle: Path, tmp_path: Path) -> None:
    plain = write_tiny_bundle(tmp_path / "without a head")
    for who in (Speculation.HEAD, BOTH):
        with pytest.raises(EngineError, match="no draft head") as refused:
            open_engine(plain, who)
        assert refused.value.status is Status.INVALID_ARGUMENT
    with pytest.raises(EngineError, match="speculation") as refused:
        open_engine(bundle, NGRAM, batching=Batching.STATIC)
    assert refused.value.status is Status.INVALID_ARGUMENT
    with pytest.raises(EngineError, match="draft_length"):
        open_engine(bundle, NGRAM, 9)
    assert EngineOptions().speculation is Speculation.AUTO
