"""What an answer looks like in OpenAI's JSON: pieces shared by completions and chat."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from edgec.runtime.events import Event, Finish
from edgec.serving.backend import Backend

FINISH = {Finish.STOP: "stop", Finish.LENGTH: "length"}
_LEAST = -9999.0  # OpenAI's word for minus infinity


@dataclass
class Usage:
    """Tokens counted over all prompts and answers of a call."""

    prompt: dict[int, int] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    answer: int = 0

    def add(self, prompt: int, event: Event) -> None:
        """Count a FINISH event of prompt number `prompt`. Its `n` answers share the prompt, which counts once."""
        self.prompt[prompt] = event.prompt_tokens
        self.cached[prompt] = max(self.cached.get(prompt, 0), event.cached_tokens)
        self.answer += event.answer_tokens

    def to_dict(self) -> dict[str, Any]:
        prompt = sum(self.prompt.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.answer,
            "total_tokens": prompt + self.answer,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


@dataclass(frozen=True)
class Envelope:
    """What every chunk of an answer carries."""

    kind: str
    id: str
    created: int
    model: str

    @staticmethod
    def new(kind: str, prefix: str, model: str) -> Envelope:
        return Envelope(kind, f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model)

    def around(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": self.kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **more}


def token_name(backend: Backend, token: int, *, as_id: bool = False) -> str:
    """A token as text, bytes that are no text alone spelt out, as OpenAI does; or by its number, as vLLM does."""
    if as_id:
        return f"token_id:{token}"
    raw = backend.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LEAST)


def alternatives(event: Event) -> Iterable[tuple[int, float]]:
    """The reported alternatives, with numbers that JSON can hold."""
    return ((token, max(logprob, _LEAST)) for token, logprob in event.top)
