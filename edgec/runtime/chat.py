"""Chat templates: messages to the tokens that a model was trained to answer.

The template (tokenizer_config.json, or chat_template.jinja) comes with the model and is run in jinja's sandbox, with
the settings of Hugging Face's `apply_chat_template`.

What a user typed stays text: a `<|im_end|>` in a message must not end the message. So the template is rendered a second
time with each message's content between two marks, which shows the parts of the text that are the template's own; only
in those are special tokens recognised. For harmless messages the tokens are those of Hugging Face.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from edgec.errors import Reason, UsageError
from edgec.runtime.abi import Status
from edgec.runtime.failures import EngineError
from edgec.runtime.settings import token_text

if TYPE_CHECKING:
    from jinja2 import Template

    from edgec.runtime.engine import Engine

Role = Literal["system", "user", "assistant"]
_MARKS = [chr(c) for c in range(0xFDD0, 0xFDF0)]  # noncharacters: no text has a use for them
_MAX_TEMPLATE = 1 << 20


@dataclass(frozen=True)
class Message:
    """One turn."""

    role: Role
    content: str


class ChatTemplate:
    """A model's chat template."""

    def __init__(self, source: str, special: Sequence[str], variables: Mapping[str, Any]) -> None:
        """
        Args:
            source: the jinja template.
            special: the tokenizer's special tokens as text.
            variables: what the template may use besides the messages (bos_token, eos_token).
        """
        if len(source) > _MAX_TEMPLATE:
            raise EngineError(Status.CORRUPT, f"the chat template has {len(source)} characters")
        self._source = source
        self._variables = dict(variables)
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @staticmethod
    def of(folder: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
        """The template of a bundle; None when it has none.

        Args:
            folder: with tokenizer.json, and perhaps chat_template.jinja.
            settings: what tokenizer_config.json says.
        """
        source = template_source(folder, settings)
        if source is None:
            return None
        try:
            added = json.loads((folder / "tokenizer.json").read_bytes()).get("added_tokens", [])
            special = [str(token["content"]) for token in added if token.get("special")]
        except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
            raise EngineError(Status.CORRUPT, f"{folder / 'tokenizer.json'}: {error}") from error
        return ChatTemplate(source, special, template_variables(settings))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[tuple[str, bool]]:
        """The prompt as pieces of text, each with whether it is a special token (True) or plain text.

        Raises:
            UsageError: the template refuses these messages, or a message can't be told from the template's own text.
        """
        plain = self._run([_as_dict(m, m.content) for m in messages], add_generation_prompt)
        begin, end = self._marks(messages)
        marked = self._run([_as_dict(m, _Marked(m.content, begin, end)) for m in messages], add_generation_prompt)
        own = _template_spans(marked, begin, end)
        if own is None or re.sub(f"[{begin}{end}]", "", marked) != plain:
            # The template did something with the content that hides where it went.
            if any(self._special.search(m.content) for m in messages):
                raise UsageError(
                    "a message has the text of a special token, and this chat template hides where messages go",
                    hint="leave that text out",
                )
            own = [(0, len(plain))]
        pieces: list[tuple[str, bool]] = []
        done = 0
        for found in self._special.finditer(plain):
            if any(a <= found.start() and found.end() <= b for a, b in own):
                pieces += [(plain[done : found.start()], False), (found.group(), True)]
                done = found.end()
        return [piece for piece in [*pieces, (plain[done:], False)] if piece[0]]

    def encode(self, messages: Sequence[Message], encode: Callable[..., list[int]]) -> list[int]:
        """The prompt's tokens; `encode(text, special=...)` is the engine's."""
        return [token for text, special in self.render(messages) for token in encode(text, special=special)]

    def _marks(self, messages: Sequence[Message]) -> tuple[str, str]:
        text = "".join(m.content for m in messages)
        free = [mark for mark in _MARKS if mark not in text and mark not in self._source]
        if len(free) < 2:
            raise UsageError("the messages hold every one of Unicode's noncharacters U+FDD0…U+FDEF")
        return free[0], free[1]

    @cached_property
    def _template(self) -> Template:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = refuse
        # Templates ask whether this is defined; a date in the prompt would make two equal runs differ.
        environment.globals.pop("strftime_now", None)
        try:
            return environment.from_string(self._source)
        except jinja2.TemplateError as error:
            raise EngineError(Status.CORRUPT, f"the model's chat template is wrong: {error}") from error

    def _run(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        template = self._template
        try:
            return template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=None, **self._variables
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise UsageError(f"the model's chat template refuses these messages: {error}") from error


class Chat:
    """A model's chat: its template, if it has one, together with its tokenizer."""

    def __init__(self, template: ChatTemplate | None, encode: Callable[..., list[int]]) -> None:
        """`encode(text, special=...)` is the tokenizer's."""
        self.template = template
        self._encode = encode

    @staticmethod
    def of(engine: Engine) -> Chat:
        """The chat of an open bundle."""
        return Chat(ChatTemplate.of(engine.folder, engine.settings), engine.encode)

    @property
    def available(self) -> bool:
        return self.template is not None

    def tokens(self, messages: Sequence[Message]) -> list[int]:
        """The prompt that asks for the next turn.

        Raises:
            UsageError: the model has no chat template.
        """
        if self.template is None:
            raise UsageError(
                "this model has no chat template",
                hint="use it to complete text: `edgec run --no-chat`, or /v1/completions",
                reason=Reason.UNSUPPORTED_MODEL,
            )
        return self.template.encode(messages, self._encode)


def template_source(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template of a model's folder: its own file, or what tokenizer_config.json says; None without one."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, Mapping)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def template_variables(settings: Mapping[str, Any]) -> dict[str, str]:
    """What a template may use besides the messages."""
    return {name: token_text(settings.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}


def _as_dict(message: Message, content: str) -> dict[str, str]:
    return {"role": message.role, "content": content}


def _template_spans(marked: str, begin: str, end: str) -> list[tuple[int, int]] | None:
    """Where the template's own text is, in positions of `marked` without its marks; None when marks don't pair up."""
    spans, position, start, inside = [], 0, 0, False
    for piece in re.split(f"([{begin}{end}])", marked):
        if piece == begin:
            if inside:
                return None
            spans.append((start, position))
            inside = True
        elif piece == end:
            if not inside:
                return None
            start, inside = position, False
        else:
            position += len(piece)
    return None if inside else [*spans, (start, position)]


class _Marked(str):
    """A message's content between two marks: what templates do with a string, they do with what is between."""

    __slots__ = ("_begin", "_end", "_inner")
    _inner: str
    _begin: str
    _end: str

    def __new__(cls, inner: str, begin: str, end: str) -> _Marked:
        made = super().__new__(cls, f"{begin}{inner}{end}" if inner else "")
        made._inner, made._begin, made._end = inner, begin, end
        return made

    def _wrap(self, result: Any) -> Any:
        if isinstance(result, str):
            return _Marked(result, self._begin, self._end)
        if isinstance(result, list | tuple):
            return type(result)(self._wrap(r) for r in result)
        return result

    def __eq__(self, other: object) -> bool:
        return bool(self._inner == _inner(other))

    def __ne__(self, other: object) -> bool:
        return bool(self._inner != _inner(other))

    def __hash__(self) -> int:
        return hash(self._inner)

    def __len__(self) -> int:
        return len(self._inner)

    def __contains__(self, other: object) -> bool:
        return _inner(other) in self._inner

    def __getitem__(self, key: Any) -> Any:
        return self._wrap(self._inner[key])

    def __iter__(self) -> Any:
        return (self._wrap(c) for c in self._inner)


def _inner(value: Any) -> Any:
    return value._inner if isinstance(value, _Marked) else value


def _delegate(name: str) -> None:
    method = getattr(str, name)

    def call(self: _Marked, *arguments: Any, **options: Any) -> Any:
        return self._wrap(method(self._inner, *map(_inner, arguments), **options))

    setattr(_Marked, name, call)


# Not `join` and not `format`, nor `+`: those put the content, marks and all, into other text.
for _name in (
    *("strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "partition", "rpartition", "replace"),
    *("startswith", "endswith", "find", "rfind", "index", "rindex", "count", "removeprefix", "removesuffix"),
    *("lower", "upper", "title", "capitalize", "casefold", "swapcase", "isspace", "isdigit", "isalpha", "isalnum"),
):
    _delegate(_name)
