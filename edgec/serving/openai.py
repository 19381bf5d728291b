"""OpenAI's requests, as far as the engine does what they ask; the rest is refused by name, never ignored.

Beyond OpenAI's fields, with the names that vLLM gave them: top_k, min_p, repetition_penalty, ignore_eos,
stop_token_ids, priority, cache_salt, and return_tokens_as_token_ids (tokens among log-probabilities go by `token_id:N`,
because two may have one text). `user` names the tenant, among whom the engine is shared fairly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import from_json

from edgec.runtime.chat import Message
from edgec.runtime.sampling import Sampling
from edgec.serving.errors import ApiError

Token = Annotated[int, Field(ge=0, lt=2**31)]
_SEED = Annotated[int, Field(ge=-(2**63), lt=2**64)]

# Fields of OpenAI's that this server knows and does not do, and what they would be for.
_UNSUPPORTED = {
    "tools": "calling tools",
    "tool_choice": "calling tools",
    "parallel_tool_calls": "calling tools",
    "functions": "calling tools",
    "function_call": "calling tools",
    "best_of": "choosing among more answers than are returned; ask for `n`",
    "suffix": "inserting text",
    "audio": "audio",
    "modalities": "anything but text",
    "prediction": "predicted outputs",
    "reasoning_effort": "reasoning effort",
    "store": "storing answers",
    "metadata": "storing answers",
    "web_search_options": "searching",
}


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Body):
    """How to stream."""

    include_usage: bool = False


class _Generation(_Body):
    """What completions and chat share."""

    model: str | None = Field(None, max_length=256)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    n: int = Field(1, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] = Field(default_factory=list)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, float] = Field(default_factory=dict)
    seed: _SEED | None = None
    user: str = Field("", max_length=512)
    # vLLM's names
    top_k: int = Field(0, ge=-1, lt=2**31)
    min_p: float = Field(0.0, ge=0, lt=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    ignore_eos: bool = False
    stop_token_ids: list[Token] = Field(default_factory=list, max_length=64)
    priority: int = Field(0, ge=-8, le=7)
    cache_salt: str = Field("", max_length=512)
    return_tokens_as_token_ids: bool = False

    @field_validator("logit_bias")
    @classmethod
    def _biases(cls, value: dict[str, float]) -> dict[str, float]:
        for token, bias in value.items():
            if not (token.isascii() and token.isdigit() and len(token) < 10):
                raise ValueError(f"{token[:40]!r} is no token number")
            if not -100 <= bias <= 100:
                raise ValueError(f"the bias of token {token} is not within −100…100")
        return value

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: str | list[str]) -> str | list[str]:
        strings = [value] if isinstance(value, str) else value
        if len(strings) > 16 or any(not s or len(s.encode()) > 256 or "\0" in s for s in strings):
            raise ValueError("at most 16 strings, each of 1 to 256 bytes, without NUL")
        return value

    @property
    def tenant(self) -> int:
        return _number(self.user)

    @property
    def salt(self) -> int:
        return _number(self.cache_salt)

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_tokens: int, logprobs: int | None) -> Sampling:
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            seed=self.seed,
            logprobs=logprobs,
            ignore_eos=self.ignore_eos,
            n=self.n,
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()},
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_tokens=tuple(self.stop_token_ids),
        ).with_seed()


class CompletionRequest(_Generation):
    """POST /v1/completions."""

    prompt: str | list[str] | list[Token] | list[list[Token]]
    max_tokens: int = Field(16, ge=0, lt=2**31)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[t for t in self.prompt if isinstance(t, int)]]
        return [p for p in self.prompt if not isinstance(p, int)]


class TextPart(_Body):
    """A part of a message's content; only text."""

    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """One message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    @property
    def message(self) -> Message:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return Message("system" if self.role == "developer" else self.role, text)


class ResponseFormat(_Body):
    """The only format that there is."""

    type: Literal["text"]


class ChatRequest(_Generation):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


T = TypeVar("T", CompletionRequest, ChatRequest)


def parse(kind: type[T], body: bytes) -> T:
    """A request's body as its class.

    Raises:
        ApiError: 400, with the name of the field that is wrong, unknown or not supported.
    """
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from error
    if not isinstance(data, Mapping):
        raise ApiError(400, "the body must be a JSON object")
    given = {name: value for name, value in data.items() if value is not None}  # null is OpenAI's "not given"
    for name in given:
        if name in _UNSUPPORTED and name not in kind.model_fields:
            raise ApiError(
                400, f"`{name}` is not supported: {_UNSUPPORTED[name]}", param=name, code="unsupported_value"
            )
    try:
        request = kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(error, kind) from error
    _check_together(request)
    return request


def _check_together(request: _Generation) -> None:
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "`stream_options` is only for `stream: true`", param="stream_options")
    if isinstance(request, ChatRequest):
        if request.top_logprobs is not None and not request.logprobs:
            raise ApiError(400, "`top_logprobs` needs `logprobs: true`", param="top_logprobs")
        if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
            raise ApiError(400, "`max_tokens` and `max_completion_tokens` disagree", param="max_tokens")
    elif isinstance(request, CompletionRequest) and not all(request.prompts or [""]):
        raise ApiError(400, "`prompt` is empty", param="prompt")


def _refusal(error: ValidationError, kind: type[BaseModel]) -> ApiError:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    first = found[0]
    where = [str(part) for part in first["loc"]]
    top = where[0] if where else ""
    if top in ("prompt", "stop") and len(found) > 1:  # a union: each of its forms has its own complaint
        return ApiError(400, f"`{top}` has none of the forms that it can have", param=top, code="invalid_value")
    path = ".".join(where) or "body"
    if first["type"] == "extra_forbidden":
        import difflib

        close = difflib.get_close_matches(where[-1], kind.model_fields, n=1) if len(where) == 1 else []
        hint = f"; did you mean `{close[0]}`?" if close else ""
        return ApiError(400, f"unknown field `{path[:200]}`{hint}", param=path[:200], code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"`{path}` is missing", param=path, code="missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"`{path[:200]}`: {message}", param=top, code="invalid_value")


def _number(name: str) -> int:
    """A name as 64 bits; the empty one is 0."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") if name else 0
