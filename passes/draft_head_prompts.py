"""What people ask, for a target to answer while its draft head learns: questions, code, Korean, and text to go on with.

Prompts are drawn without end from forms and subjects, from the recipe's own list and texts, and from the target itself:
given nothing but the chat template's opening, an instruction model writes the user's turn as well (Xu et al., "Magpie",
2024). One subject in ten, and the last tenth of each text, are only drawn for held-out prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from edgec.runtime.chat import ChatTemplate, Message

if TYPE_CHECKING:
    from pathlib import Path

Kind = Literal["own", "chat", "code", "korean", "prose", "listed"]
SHARES: Mapping[Kind, float] = {"own": 0.2, "chat": 0.36, "code": 0.14, "korean": 0.08, "prose": 0.22, "listed": 0.3}
HELD_OUT = 10  # one in so many
OPENING = (8, 48)  # tokens of a text that a model is to go on with

SUBJECTS = (
    "the water cycle|photosynthesis|black holes|the French Revolution|compound interest|vaccines|the Roman Empire|jazz|"
    "electric cars|climate change|a good night's sleep|learning a language|the human heart|chess openings|bread baking|"
    "the stock market|machine learning|volcanoes|the moon landing|public speaking|gardening in spring|coffee|yoga|"
    "ancient Egypt|renewable energy|writing a novel|job interviews|dinosaurs|the Silk Road|time management|whales|"
    "Shakespeare|nutrition for runners|the internet|friendship|DNA|travel on a budget|Japanese food|gravity|bees|"
    "the Great Wall of China|personal finance|meditation|space telescopes|democracy|online privacy|the Olympics|tea|"
    "how airplanes fly|recycling|robots|the Renaissance|houseplants|stress at work|the ocean floor|magnets|penguins|"
    "painting with watercolors|a healthy breakfast|the Industrial Revolution|earthquakes|soccer|the brain|poetry|rain"
)
FORMS = (
    "What is {} and why does it matter?|Explain {} to a child.|Write a short story about {}.|Give me five tips on {}.|"
    "Summarize what is known about {}.|List three surprising facts about {}.|How do I get started with {}?|"
    "Write an email to a colleague about {}.|What are the pros and cons of {}?|Write a poem about {}.|"
    "Can you tell me about {}?|Compare {} with something similar.|What questions should I ask an expert about {}?|"
    "Write a paragraph about {} for a newspaper.|Make a table of key terms about {}.|Why do people care about {}?|"
    "I am writing an essay on {}. Suggest an outline.|Describe the history of {}.|Tell me a joke about {}.|"
    "What are common mistakes with {}?|Plan a weekend around {}.|Create a quiz with answers about {}."
)
TASKS = (
    "reverse a string|compute the factorial of a number|check whether a number is prime|sort a list of numbers|"
    "find the largest element of an array|count the words in a file|read a CSV file|merge two dictionaries|"
    "compute Fibonacci numbers|remove duplicates from a list|check whether a word is a palindrome|"
    "convert Celsius to Fahrenheit|binary search in a sorted list|draw a bar chart|download a web page|"
    "connect to a database|validate an email address|generate a random password|implement a stack|"
    "traverse a binary tree|flatten a nested list|find the longest common prefix|implement a linked list|"
    "parse JSON|multiply two matrices|count vowels in a sentence|simulate rolling dice|send an HTTP request|"
    "build a simple calculator|find the shortest path in a graph|make a to-do list application|group names by letter"
)
CODE_FORMS = (
    "Write a Python function to {}.|How do I {} in JavaScript?|Write a program in C++ to {}.|"
    "Show me how to {} in Python.|Write a Java method to {}, with comments.|Explain step by step how to {} in code.|"
    "Write unit tests for a function to {}."
)
KOREAN = (
    "인공지능|한국의 역사|김치|건강한 식사|여행 준비|기후 변화|우주|독서|시간 관리|커피|운동|서울|음악|친구|영어 공부|"
    "컴퓨터|바다|봄|경제|축구|영화|수면|환경 보호|요리|과학|가족|고양이|교육|인터넷|미술"
)
KOREAN_FORMS = (
    "{}에 대해 설명해 주세요.|{}에 대한 짧은 글을 써 주세요.|{}에 관한 다섯 가지 사실을 알려 주세요.|"
    "{}의 장점은 무엇인가요?|"
    "안녕하세요! {}에 대해 알고 싶어요.|{}에 대한 시를 한 편 써 줘.|{}에 대해 아이에게 설명하듯이 말해 줘."
)
OPENINGS = (
    "{} is|The history of {} begins|Many people believe that {}|# {}\n\n|Once upon a time, {}|"
    "In this article, we discuss {}|Question: What is {}?\nAnswer:|When I first heard of {}, I|"
    "The most important thing about {} is"
)


class Prompts:
    """Draws prompts as tokens, the same ones for the same seed."""

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, object],
        encode: Callable[..., list[int]],
        *,
        texts: Sequence[np.ndarray] = (),
        listed: Sequence[str] = (),
    ) -> None:
        """
        Args:
            folder: of the tokenizer's files.
            settings: what tokenizer_config.json says; with its chat template, questions are asked in it.
            encode: `encode(text, special=...)` gives tokens.
            texts: tokens of texts whose sentences are gone on with.
            listed: the recipe's own prompts.
        """
        self._template = ChatTemplate.of(folder, settings)
        self._encode = encode
        self._texts, self._listed = [t for t in texts if len(t) >= HELD_OUT * 4 * OPENING[1]], list(listed)
        kinds: list[Kind] = ["chat", "code", "korean", "prose"]
        if self._template is not None:
            kinds.append("own")
        if self._listed:
            kinds.append("listed")
        self.kinds: tuple[Kind, ...] = tuple(kinds)

    def draw(self, seed: int, *, held_out: bool = False, kinds: Sequence[Kind] = ()) -> Iterator[list[int]]:
        """Prompts without end, of all kinds by their shares, or of the given kinds evenly."""
        random = np.random.default_rng((seed, held_out))
        chosen = tuple(kinds) or self.kinds
        shares = np.array([1.0 if kinds else SHARES[kind] for kind in chosen])
        while True:
            tokens = self.one(chosen[random.choice(len(chosen), p=shares / shares.sum())], random, held_out=held_out)
            if tokens:
                yield tokens

    def one(self, kind: Kind, random: np.random.Generator, *, held_out: bool) -> list[int]:
        """One prompt of a kind."""
        if kind == "own":
            return self._opening()
        if kind == "listed":
            return self._ask(_pick(random, self._listed, held_out))
        if kind == "chat":
            return self._ask(_filled(random, FORMS, SUBJECTS, held_out))
        if kind == "code":
            return self._ask(_filled(random, CODE_FORMS, TASKS, held_out))
        if kind == "korean":
            return self._ask(_filled(random, KOREAN_FORMS, KOREAN, held_out))
        if not self._texts or random.random() < 0.3:
            return self._encode(_filled(random, OPENINGS, SUBJECTS, held_out))
        text = self._texts[random.integers(len(self._texts))]
        border = len(text) - len(text) // HELD_OUT
        low, high = (border, len(text)) if held_out else (0, border)
        count = int(random.integers(*OPENING))
        at = int(random.integers(low, high - count))
        return [int(t) for t in text[at : at + count]]

    def _ask(self, question: str) -> list[int]:
        if self._template is None:
            return self._encode(question)
        return self._template.encode([Message("user", question)], self._encode)

    def _opening(self) -> list[int]:
        """The chat template up to where the user's words begin."""
        assert self._template is not None
        mark = "\ufdef"
        text = "".join(piece for piece, _ in self._template.render([Message("user", mark)]))
        return self._encode(text.partition(mark)[0], special=True)


def _filled(random: np.random.Generator, forms: str, subjects: str, held_out: bool) -> str:
    options = forms.split("|")
    return options[random.integers(len(options))].format(_pick(random, subjects.split("|"), held_out))


def _pick(random: np.random.Generator, items: Sequence[str], held_out: bool) -> str:
    """One of the items whose turn it is; of fewer than `HELD_OUT` items, any."""
    ours = [item for i, item in enumerate(items) if (i % HELD_OUT == HELD_OUT - 1) == held_out]
    ours = ours if len(items) >= HELD_OUT else list(items)
    return ours[random.integers(len(ours))]
