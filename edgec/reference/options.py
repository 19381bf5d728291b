"""What a reference engine can be told."""

from __future__ import annotations

from dataclasses import dataclass

from edgec.runtime.abi import MOST_DRAFTS, Status
from edgec.runtime.failures import EngineError

DTYPES = ("float32", "bfloat16", "float16")
NUMBERS = ("float", "int8")
SPECULATIONS = ("off", "head", "ngram", "both")


@dataclass(frozen=True)
class ReferenceOptions:
    """How to run a model. Numbers of 0 and None mean the default, or the model's own value."""

    device: str = "cpu"
    """"cpu", "cuda" or "cuda:1"."""
    dtype: str = "float32"
    """Of weights and activations: float32, bfloat16 or float16."""
    kv: str = "float"
    """Keys and values: "float", the dtype's; or "int8": rounded per token and head, as the native engine keeps them."""
    activations: str = "float"
    """"float"; or "int8": quantised per row and group of 32 before each quantised layer, and everything computed in the
    native engine's order, to the last bit. Slow: for holding an engine against."""
    block_size: int = 16
    blocks: int | None = None
    """Of the pool; None: what `memory` holds, or enough for `max_batch` full contexts, whichever is less."""
    memory: int | None = None
    """Bytes for the pools of keys and values."""
    max_batch: int = 64
    step_tokens: int = 512
    """Tokens of prompts and answers that go through the model in a step."""
    context: int = 0
    """Positions that a sequence may have; 0: the model's."""
    prefix_cache: bool = True
    cuda_graphs: bool = True
    max_waiting: int = 1024
    speculation: str = "off"
    """Who proposes tokens that one pass then verifies: "head", the model's draft head; "ngram", the text itself; or
    "both", the text where its ending was there before, else the head."""
    draft_length: int = 4
    """Tokens to propose, 1 to 8. The native engine adapts this to what it measures; here it stays as it is."""

    def __post_init__(self) -> None:
        for name, known in (
            ("dtype", DTYPES),
            ("kv", NUMBERS),
            ("activations", NUMBERS),
            ("speculation", SPECULATIONS),
        ):
            if getattr(self, name) not in known:
                raise _bad(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}")
        for name in ("block_size", "max_batch", "step_tokens", "max_waiting"):
            if getattr(self, name) < 1:
                raise _bad(f"{name} is {getattr(self, name)}, and must be at least 1")
        for name in ("blocks", "memory"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise _bad(f"{name} is {value}, and must be at least 1")
        if not 1 <= self.draft_length <= MOST_DRAFTS:
            raise _bad(f"draft_length is {self.draft_length}, and must be between 1 and {MOST_DRAFTS}")
        if self.context < 0:
            raise _bad(f"context is {self.context}, and must not be negative")
        if self.step_tokens < self.max_batch:
            raise _bad(
                f"step_tokens is {self.step_tokens} and max_batch {self.max_batch}: each sequence of a step has a token"
            )


def _bad(what: str) -> EngineError:
    return EngineError(Status.INVALID_ARGUMENT, what)
