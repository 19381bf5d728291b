"""Measures speculation: the same prompts with it and without, in turns, on one engine.

Beside the measured speed-up stands the one that the paper predicts (Leviathan et al., 2023, Theorem 3.8),

    (1 − α^(γ+1)) / ((1 − α)(cγ + 1))

with α the mean acceptance, γ the mean run of proposals and c a proposal's cost over a plain step's. It takes the pass
that verifies γ + 1 positions to cost what a plain step does; where arithmetic is short and not bandwidth, it costs
more, and the measured figure is lower.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from edgec.errors import UsageError
from edgec.runtime.chat import Chat, Message
from edgec.runtime.engine import Engine
from edgec.runtime.events import Event, EventKind, Request
from edgec.runtime.sampling import Sampling

PROMPTS: tuple[tuple[str, bool, str], ...] = (
    ("question", True, "What is the difference between weather and climate? Explain it to a child."),
    ("advice", True, "Give me five tips for learning a new language."),
    ("story", True, "Write a short story about a lighthouse keeper and a whale."),
    ("summary", True, "Summarise in three sentences why the printing press mattered."),
    ("list", True, "List the months of the year, one per line, with the number of days of each."),
    ("code", False, "def fibonacci(n):\n    if n <= 1:\n        return n\n    return fibonacci(n - 1) + "),
    (
        "prose",
        False,
        "The old man walked slowly along the harbour, looking at the boats that had come in during the ni",
    ),
    ("Korean", False, "대한민국의 수도는 서울이고, 가장 큰 항구 도시는"),
    ("repetitive", False, "one two three four one two three four one two three four one two three"),
    ("JSON", False, '[{"name": "Anna", "age": 31}, {"name": "Ben", "age": 28}, {"name": "Clara", "age": '),
)
"""What people ask: name, whether the chat template applies, and the text. Some end inside a word."""


@dataclass(frozen=True)
class Pair:
    """One prompt, without speculation and with it."""

    prompt: str
    plain: float
    """Tokens a second while it decodes."""
    speculative: float
    tokens_per_run: float | None
    same: bool
    """Whether both gave the same tokens; at temperature 0, and where trees are grown, they must."""

    @property
    def ratio(self) -> float:
        return self.speculative / self.plain


@dataclass
class SpeculationReport:
    """All prompts of one batch size and temperature."""

    batch: int
    temperature: float
    speculation: str
    draft_length: int
    pairs: list[Pair] = field(default_factory=list)
    acceptance: tuple[float | None, ...] = ()
    """α by place."""
    tokens_per_run: float | None = None
    wasted: float | None = None
    """Share of the verified proposals that were thrown away."""
    cost: float | None = None
    """c: seconds of drafting for a place over seconds of a plain step. None when nobody proposed."""
    mean_length: float | None = None
    """γ: places of a run that had proposals, one behind the other."""
    mean_rows: float | None = None
    """Proposals of a run, all branches together."""
    predicted: float | None = None

    @property
    def ratio(self) -> float:
        """The measured speed-up: the median over prompts."""
        return statistics.median(pair.ratio for pair in self.pairs)

    def to_dict(self) -> dict[str, Any]:
        pairs = [asdict(pair) | {"ratio": pair.ratio} for pair in self.pairs]
        return asdict(self) | {"pairs": pairs, "ratio": self.ratio}


def measure(
    engine: Engine,
    *,
    batch: int = 1,
    temperature: float = 0.0,
    tokens: int = 128,
    repeats: int = 3,
    prompts: Sequence[tuple[str, bool, str]] = PROMPTS,
    progress: Callable[[str], None] = lambda _: None,
) -> SpeculationReport:
    """Each prompt with and without speculation, alternately; medians of `repeats`.

    Args:
        batch: copies of a prompt that are answered at the same time; above temperature 0 each has its own seed.

    Raises:
        UsageError: the engine does not speculate, or answers differ that must not (which would be a bug).
    """
    about = engine.description
    if about.get("speculation", "off") == "off":
        raise UsageError("this engine does not speculate: give --speculation ngram, or a bundle with a draft head")
    report = SpeculationReport(batch, temperature, str(about["speculation"]), int(about["draft_length"]))
    chat = Chat.of(engine)
    start, plain_steps = engine.stats(), []
    for name, templated, text in prompts:
        progress(f"{name}, batch {batch}, temperature {temperature:g}")
        if templated and chat.available:
            prompt = chat.tokens([Message("user", text)])
        else:
            prompt = engine.encode_prompt(text)
        rates: dict[bool, list[float]] = {False: [], True: []}
        answers: dict[bool, list[list[int]]] = {}
        before = engine.stats()
        for repeat in range(repeats):
            for speculate in (False, True):
                sampling = [
                    Sampling(
                        max_tokens=tokens,
                        temperature=temperature,
                        seed=None if temperature == 0 else 1000 * repeat + i,
                        ignore_eos=True,
                        speculate=speculate,
                    )
                    for i in range(batch)
                ]
                answers[speculate], rate = _decode(engine, prompt, sampling)
                rates[speculate].append(rate)
                if not speculate:
                    plain_steps.append(batch / rate)
        same = answers[False] == answers[True]
        if not same and (temperature == 0 or int(about["draft_width"]) > 1):
            raise UsageError(f"prompt `{name}`: speculation changed the answer, which is a bug")
        here = engine.stats().since(before)  # plain answers count no draft
        report.pairs.append(
            Pair(name, statistics.median(rates[False]), statistics.median(rates[True]), here.tokens_per_run, same)
        )
    total = engine.stats().since(start)
    report.acceptance, report.tokens_per_run, report.wasted = (
        total.acceptance,
        total.tokens_per_run,
        total.wasted_drafts,
    )
    if total.draft_runs:
        places = total.draft_places / total.draft_runs
        step = statistics.median(plain_steps)
        report.mean_length = places
        report.mean_rows = total.drafted_tokens / total.draft_runs
        report.cost = total.draft_seconds / (total.draft_places / batch) / step
        report.predicted = predicted(sum(total.draft_kept) / sum(total.draft_reached), places, report.cost)
    return report


def predicted(alpha: float, gamma: float, cost: float) -> float:
    """The paper's speed-up for acceptance α, γ proposals a run, and c a proposal's cost over a step's."""
    expected = gamma + 1 if alpha >= 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
    return expected / (cost * gamma + 1)


def _decode(engine: Engine, prompt: Sequence[int], samplings: Sequence[Sampling]) -> tuple[list[list[int]], float]:
    """The answers' tokens, and tokens a second from when all have begun until the first ends."""
    numbers = [engine.submit(Request(prompt, sampling)) for sampling in samplings]
    answers: dict[int, list[int]] = {number: [] for number in numbers}
    open_requests, begun, ended = set(numbers), 0.0, 0.0
    counted = 0
    while open_requests:
        engine.step()
        now = time.perf_counter()
        events: list[Event] = engine.poll()
        fresh = [event for event in events if event.kind is EventKind.TOKEN and event.request in answers]
        for event in fresh:
            answers[event.request].append(event.token)
        finished = {event.request for event in events if event.kind is EventKind.FINISH}
        if begun and not ended:
            counted += len(fresh)
        if not begun and all(answers.values()):
            begun = now
        if finished & open_requests and not ended:
            ended = now
        open_requests -= finished
    return [answers[number] for number in numbers], counted / (ended - begun)
