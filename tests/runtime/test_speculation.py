"""Speculation on SmolLM2: no bit changes at temperature 0, nor at 1 where nothing is drawn; never the distribution."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from edgec.targets.native import NativeOptions, convert

from edgec.context import Context
from edgec.model import Program
from edgec.plan import make_plan
from edgec.recipe import load_recipe
from edgec.registry import get_target
from edgec.runtime.abi import EventKind, Speculation
from edgec.runtime.compile import host
from edgec.runtime.engine import Engine
from edgec.runtime.events import Request
from edgec.runtime.sampling import Sampling
from edgec.runtime.speculative import PROMPTS
from edgec.store import Store, default_root
from tests.drafting import NGRAM, ask, open_engine
from tests.tiny_bundle import write_tiny_bundle

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The native artefact of the recipe's exported program."""
    from edgec.reference.load import load

    store, recipe = Store(default_root()), load_recipe(ROOT / "recipes/smollm2-135m.yaml")
    alone = replace(recipe, targets=tuple(t for t in recipe.targets if not get_target(t.name).twin))
    entries = [make_plan(r, store, until="export").stages[-1].entry for r in (recipe, alone)]
    if not any(entries):
        load(recipe.path, weights="int8", store=store)  # runs the stages that are missing
        entries = [make_plan(alone, store, until="export").stages[-1].entry]
    exported = next(entry for entry in entries if entry is not None)
    folder = tmp_path_factory.mktemp("smollm2") / "native"
    folder.mkdir()
    context = Context(seed=0, threads=1, work=folder, recipe_dir=folder, cache=folder, out=folder)
    convert(Program.open(exported.out), NativeOptions.model_validate({"libraries": [host().name]}), context)
    return folder


def tokens_of(engine: Engine, texts: Sequence[str]) -> list[list[int]]:
    return [engine.encode_prompt(text) for text in texts]


@pytest.mark.network
def test_smollm2_says_bitwise_the_same_at_temperature_0(smollm2: Path) -> None:
    """For every length, in batches of 1 and 8: prose, code, Korean, what repeats itself, and ends inside a word."""
    texts = [text for name, _, text in PROMPTS if name not in ("advice", "list")]
    texts[texts.index(next(t for t in texts if t.startswith("one two")))] = "one two three four " * 60 + "one two"
    sampling = Sampling(max_tokens=32, logprobs=0, ignore_eos=True)
    with open_engine(smollm2, context=512) as engine:
        asked = tokens_of(engine, texts)
        assert len(asked) == 8
        plain = ask(engine, asked, sampling, batch=8)
    for length in range(1, 9):
        with open_engine(smollm2, NGRAM, length, context=512) as engine:
            for batch in (1, 8):
                assert ask(engine, asked, sampling, batch) == plain
            stats = engine.stats()
            assert sum(stats.draft_kept) > 30 and stats.draft_kept[length - 1] > 0
            assert stats.drafted_tokens > sum(stats.draft_kept)  # and some are rejected


@pytest.mark.network
def test_smollm2_keeps_its_seeds_words_at_temperature_1(smollm2: Path) -> None:
    """By default, as many proposals as pay: when they are made depends on the clock, what is said doesn't."""
    texts = ["one two three four " * 40, *(text for _, templated, text in PROMPTS if not templated)]
    sampling = Sampling(max_tokens=40, temperature=1.0, seed=11, logprobs=0, ignore_eos=True)
    with open_engine(smollm2, context=512) as engine:
        asked = tokens_of(engine, texts)
        plain = ask(engine, asked, sampling, batch=3)
        assert engine.stats().drafted_tokens == 0
    with open_engine(smollm2, Speculation.AUTO, context=512) as engine:
        assert [ask(engine, asked, sampling, batch) for batch in (1, 3)] == [plain, plain]
        assert sum(engine.stats().draft_kept) > 5


@pytest.mark.network
def test_smollm2s_next_tokens_are_distributed_as_without(smollm2: Path) -> None:
    """The digits of " 1, 3": nobody knows the next, but the space before it and the comma are sure to be proposed."""
    text = "1, 2, 1, 3, 1, 2, 1, 4, 1, 2, 1, 3, 1, 2, 1,"
    plain, speculative = (drawn(smollm2, who, text, 800) for who in (Speculation.OFF, NGRAM))
    for place in (1, 4):
        a, b = (Counter(tokens[place] for tokens in answers) for answers in (plain, speculative))
        assert apart(a, b) < 4.5
        greedy = Counter({a.most_common(1)[0][0]: 240})  # three answers in ten from a greedy verifier
        assert apart(Counter({t: int(0.7 * n) for t, n in a.items()}) + greedy, b) > 4.5


def drawn(bundle: Path, who: Speculation, text: str, count: int) -> list[list[int]]:
    """Answers of five tokens."""
    found: list[list[int]] = []
    with open_engine(bundle, who, 3 if who is NGRAM else 0, context=512, max_batch=50) as engine:
        [prompt] = tokens_of(engine, [text])
        for seed in range(count // 50):
            sampling = Sampling(max_tokens=5, temperature=1.0, seed=2 * seed + (who is NGRAM), n=50, ignore_eos=True)
            [answers] = engine.answer([prompt], replace(sampling, speculate=who is NGRAM))
            found += [answer.tokens for answer in answers]
        stats = engine.stats()
        assert (stats.drafted_tokens > count) == (who is NGRAM)
    if who is NGRAM:
        assert 0 < sum(stats.draft_kept) < stats.drafted_tokens
    return found


def apart(a: Counter[int], b: Counter[int]) -> float:
    """χ² of two samples, in standard deviations above its mean; tokens that are rare in both count as one."""
    common = [t for t in a | b if a[t] + b[t] >= 12]
    assert len(common) >= 3
    cells = [(a[t], b[t]) for t in common]
    cells.append((a.total() - sum(x for x, _ in cells), b.total() - sum(y for _, y in cells)))
    scale = math.sqrt(b.total() / a.total())
    statistic = sum((x * scale - y / scale) ** 2 / (x + y) for x, y in cells if x + y)
    return (statistic - (len(cells) - 1)) / math.sqrt(2 * (len(cells) - 1))


def test_n_answers_get_their_first_tokens_before_any_proposal(tmp_path: Path) -> None:
    """The prompt's last token comes alone in its step, and n-grams know how it goes on."""
    bundle = write_tiny_bundle(tmp_path)
    prompt = [40 + i % 3 * 7 for i in range(33)]
    sampling = Sampling(max_tokens=6, temperature=1.1, seed=9, n=3, ignore_eos=True, speculate=True)
    said = []
    for who in (Speculation.OFF, NGRAM):
        with open_engine(bundle, who, 3 if who is NGRAM else 0, step_tokens=32) as engine:
            number = engine.submit(Request(prompt, sampling))
            events = []
            while engine.stats().running or engine.stats().waiting:
                engine.step()
                events += engine.poll()
            assert engine.stats().blocks_owned == 0
        tokens = [e for e in events if e.request == number and e.kind is EventKind.TOKEN]
        by_answer = [[e for e in tokens if e.sequence == i] for i in range(3)]
        assert [[e.position for e in mine] for mine in by_answer] == [list(range(33, 39))] * 3
        said.append([mine[0].token for mine in by_answer])
    assert said[0] == said[1]
