"""/v1/completions: prompts to text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from edgec.runtime.events import Event, EventKind, Request
from edgec.serving.backend import Backend
from edgec.serving.generation import Generation
from edgec.serving.openai import CompletionRequest
from edgec.serving.replies import FINISH, Envelope, Usage, alternatives, finite, token_name
from edgec.serving.stream import DONE


class Completion:
    """One call's answers, from the engine's events; streamed, or whole."""

    def __init__(self, asked: CompletionRequest, backend: Backend, model: str) -> None:
        self._asked = asked
        self._backend = backend
        self._envelope = Envelope.new("text_completion", "cmpl", model)
        self._usage = Usage()
        self._prompts: list[str | list[int]] = asked.prompts
        self._scores = [_Logprobs() for _ in self._prompts]  # of each prompt's own tokens, for `echo`
        self._scored: dict[int, int] = {}  # characters of each prompt that are scored, for text_offset
        self._echoed: set[int] = set()
        self._lengths: dict[int, int] = {}  # characters of each choice so far, for text_offset

    def requests(self) -> list[Request]:
        """One for each prompt."""
        asked = self._asked
        # The engine always computes a token. Asked for none, which is how prompts are scored, it is dropped again.
        sampling = asked.sampling(max(asked.max_tokens, 1), asked.logprobs)
        return [
            Request(
                tokens=self._backend.encode(prompt) if isinstance(prompt, str) else prompt,
                sampling=sampling,
                priority=asked.priority,
                tenant=asked.tenant,
                cache_salt=asked.salt,
                score_prompt=asked.echo and asked.logprobs is not None,
            )
            for prompt in self._prompts
        ]

    async def chunks(self, generation: Generation) -> AsyncIterator[dict[str, Any] | str]:
        """The streamed answer."""
        more = {"usage": None} if self._asked.wants_usage else {}
        async for choice in self._choices(generation):
            yield self._envelope.around([choice], **more)
        if self._asked.wants_usage:
            yield self._envelope.around([], usage=self._usage.to_dict())
        yield DONE

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """The answer in one piece."""
        count = len(self._prompts) * self._asked.n
        texts: list[list[str]] = [[] for _ in range(count)]
        logprobs = [_Logprobs() for _ in range(count)]
        reasons: list[str | None] = [None] * count
        async for choice in self._choices(generation):
            index = choice["index"]
            texts[index].append(choice["text"])
            if choice["logprobs"] is not None:
                logprobs[index].extend(choice["logprobs"])
            reasons[index] = choice["finish_reason"] or reasons[index]
        wanted = self._asked.logprobs is not None
        choices = [
            {
                "text": "".join(texts[i]),
                "index": i,
                "logprobs": logprobs[i].to_dict() if wanted else None,
                "finish_reason": reasons[i],
            }
            for i in range(count)
        ]
        return self._envelope.around(choices, usage=self._usage.to_dict())

    async def _choices(self, generation: Generation) -> AsyncIterator[dict[str, Any]]:
        """Each event that says something, as a `choices` entry."""
        score_only = self._asked.max_tokens == 0
        async for prompt, event in generation.events():
            index = prompt * self._asked.n + event.sequence
            if event.kind is EventKind.PROMPT_SCORE:
                if event.sequence == 0:  # all sequences of a prompt share it
                    self._score(self._scores[prompt], event, self._scored.get(prompt, 0))
                    self._scored[prompt] = self._scored.get(prompt, 0) + len(token_name(self._backend, event.token))
                continue
            if self._asked.echo and index not in self._echoed:
                self._echoed.add(index)
                yield self._echo(prompt, index)
            if event.kind is EventKind.FINISH:
                self._usage.add(prompt, event)
                if score_only:
                    self._usage.answer -= event.answer_tokens
                reason = "length" if score_only else FINISH[event.finish]
                yield self._choice(index, "" if score_only else event.text, None, reason)
            elif not score_only and (event.text or self._asked.logprobs is not None):
                logprobs = None
                if self._asked.logprobs is not None:
                    logprobs = _Logprobs()
                    self._score(logprobs, event, self._lengths.get(index, 0))
                yield self._choice(index, event.text, logprobs, None)

    def _echo(self, prompt: int, index: int) -> dict[str, Any]:
        given = self._prompts[prompt]
        if not isinstance(given, str):
            given = b"".join(map(self._backend.token_bytes, given)).decode(errors="replace")
        scored = self._scores[prompt] if self._asked.logprobs is not None else None
        return self._choice(index, given, scored, None)

    def _choice(self, index: int, text: str, logprobs: _Logprobs | None, reason: str | None) -> dict[str, Any]:
        self._lengths[index] = self._lengths.get(index, 0) + len(text)
        scores = None if logprobs is None else logprobs.to_dict()
        return {"text": text, "index": index, "logprobs": scores, "finish_reason": reason}

    def _score(self, to: _Logprobs, event: Event, offset: int) -> None:
        as_id = self._asked.return_tokens_as_token_ids
        name = token_name(self._backend, event.token, as_id=as_id)
        to.tokens.append(name)
        to.token_logprobs.append(finite(event.logprob))
        to.text_offset.append(offset)
        if not self._asked.logprobs or event.logprob is None:
            to.top_logprobs.append(None)
            return
        top = {token_name(self._backend, token, as_id=as_id): logprob for token, logprob in alternatives(event)}
        top.setdefault(name, max(event.logprob, -9999.0))  # OpenAI: the token itself is always among them
        to.top_logprobs.append(top)


@dataclass
class _Logprobs:
    """OpenAI's parallel lists."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def extend(self, other: dict[str, Any]) -> None:
        for name, values in other.items():
            getattr(self, name).extend(values)

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }
