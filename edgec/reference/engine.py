"""Requests in, events out: the reference engine."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from edgec.architectures.llama import Llama
from edgec.reference.options import ReferenceOptions
from edgec.reference.text import TextTokenizer
from edgec.runtime.abi import StepOutcome
from edgec.runtime.events import Event, Request
from edgec.runtime.stats import Stats


class ReferenceEngine:
    """The same surface as `edgec.runtime.engine.Engine`, over a PyTorch model."""

    def __init__(
        self,
        model: Llama,
        tokenizer: TextTokenizer | None,
        options: ReferenceOptions,
        *,
        eos: Sequence[int] = (),
        quantised: Collection[str] = (),
    ) -> None:
        raise NotImplementedError

    def submit(self, request: Request) -> int:
        raise NotImplementedError

    def cancel(self, number: int) -> bool:
        raise NotImplementedError

    def step(self) -> StepOutcome:
        raise NotImplementedError

    def poll(self) -> list[Event]:
        raise NotImplementedError

    def stats(self) -> Stats:
        raise NotImplementedError

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        raise NotImplementedError

    def check(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
