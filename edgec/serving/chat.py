"""/v1/chat/completions: messages to the next one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from edgec.runtime.events import Event, EventKind, Request
from edgec.serving.backend import Backend
from edgec.serving.generation import Generation
from edgec.serving.openai import ChatRequest
from edgec.serving.replies import FINISH, Envelope, Usage, alternatives, finite, token_name
from edgec.serving.stream import DONE


class ChatCompletion:
    """One call's answers, from the engine's events; streamed, or whole."""

    def __init__(self, asked: ChatRequest, backend: Backend, model: str) -> None:
        self._asked = asked
        self._backend = backend
        self._envelope = Envelope.new("chat.completion.chunk" if asked.stream else "chat.completion", "chatcmpl", model)
        self._usage = Usage()

    def requests(self) -> list[Request]:
        """The one request; its `n` answers share the prompt."""
        asked = self._asked
        alternatives_asked = (asked.top_logprobs or 0) if asked.logprobs else None
        return [
            Request(
                tokens=self._backend.chat([m.message for m in asked.messages]),
                sampling=asked.sampling(asked.limit or 0, alternatives_asked),
                priority=asked.priority,
                tenant=asked.tenant,
                cache_salt=asked.salt,
            )
        ]

    async def chunks(self, generation: Generation) -> AsyncIterator[dict[str, Any] | str]:
        """The streamed answer."""
        more = {"usage": None} if self._asked.wants_usage else {}
        begun: set[int] = set()
        async for _, event in generation.events():
            if event.sequence not in begun:
                begun.add(event.sequence)
                yield self._envelope.around([_delta(event.sequence, {"role": "assistant", "content": ""})], **more)
            scores = self._scores(event)
            if event.text or scores:
                yield self._envelope.around([_delta(event.sequence, {"content": event.text}, scores)], **more)
            if event.kind is EventKind.FINISH:
                self._usage.add(0, event)
                yield self._envelope.around([_delta(event.sequence, {}, None, FINISH[event.finish])], **more)
        if self._asked.wants_usage:
            yield self._envelope.around([], usage=self._usage.to_dict())
        yield DONE

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """The answer in one piece."""
        n = self._asked.n
        texts: list[list[str]] = [[] for _ in range(n)]
        scores: list[list[dict[str, Any]]] = [[] for _ in range(n)]
        reasons = [""] * n
        async for _, event in generation.events():
            texts[event.sequence].append(event.text)
            scores[event.sequence] += self._scores(event) or []
            if event.kind is EventKind.FINISH:
                self._usage.add(0, event)
                reasons[event.sequence] = FINISH[event.finish]
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": "".join(texts[i]), "refusal": None},
                "logprobs": {"content": scores[i], "refusal": None} if self._asked.logprobs else None,
                "finish_reason": reasons[i],
            }
            for i in range(n)
        ]
        return self._envelope.around(choices, usage=self._usage.to_dict())

    def _scores(self, event: Event) -> list[dict[str, Any]] | None:
        if not self._asked.logprobs or event.kind is not EventKind.TOKEN:
            return None
        top = [self._score(token, logprob) for token, logprob in alternatives(event)]
        return [{**self._score(event.token, finite(event.logprob)), "top_logprobs": top}]

    def _score(self, token: int, logprob: float | None) -> dict[str, Any]:
        name = token_name(self._backend, token, as_id=self._asked.return_tokens_as_token_ids)
        return {"token": name, "logprob": logprob, "bytes": list(self._backend.token_bytes(token))}


def _delta(
    index: int, delta: dict[str, Any], scores: list[dict[str, Any]] | None = None, reason: str | None = None
) -> dict[str, Any]:
    logprobs = {"content": scores, "refusal": None} if scores else None
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
