"""An OpenAI-compatible server as a reference: `edgec reference` and `edgec serve`, vLLM, llama.cpp and their like.

Of `POST /v1/completions` it is asked:

    prompt as token ids     else nothing can be compared: texts would be tokenised another way
    logprobs                of each token, with as many alternatives as the server gives (20, 5 or 1 are tried)
    echo, max_tokens        with `echo: true` the prompt's own tokens have log-probabilities: scoring a text
    temperature 0           greedy answers
    seed, temperature       sampled answers

Answers name tokens in one of three ways, all of which are understood: as `token_id:N` (vLLM, asked by
`return_tokens_as_token_ids`), with an `id` (llama.cpp), or as text (OpenAI, edgec), which the bundle's own tokenizer
turns back into ids. What a server doesn't do is found out by asking once, and named.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from edgec.errors import ParityError, SourceError, UsageError
from edgec.runtime.sampling import Sampling
from edgec.validation.scores import Scores
from edgec.validation.subjects import Generated, NotOffered

_TIMEOUT = 600.0  # seconds for one answer; a reference on a CPU takes its time
_ALTERNATIVES = (20, 5, 1)
_ID = "token_id:"


class Bytes(Protocol):
    """A tokenizer that knows its tokens' bytes."""

    @property
    def vocab_size(self) -> int: ...

    def token_bytes(self, token: int) -> bytes: ...


class ServerReference:
    """A running server."""

    name = "server"
    context = 2**31 - 1  # its own business: it refuses what is too long
    batch = 4

    def __init__(
        self,
        url: str,
        tokenizer: Bytes,
        *,
        name: str | None = None,
        api_key: str | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Connect, and find out what it offers.

        Args:
            url: of the server, with or without `/v1`.
            tokenizer: the bundle's.
            name: of the model; by default the first that the server lists.
            note: hears what it doesn't offer.

        Raises:
            UsageError: the URL is none, or the server refuses the key.
            SourceError: nothing answers there as such a server does.
        """
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--reference {url}: it must be the URL of a server, such as http://localhost:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key = api_key
        self._tokenizer = tokenizer
        models = self._models()
        if name is not None and models and name not in models:
            raise UsageError(f"--name {name}: {self.url} has no such model", hint=f"it has: {', '.join(models)}")
        self.model = name or (models[0] if models else "")
        self.label = f"{self.model or 'the model'} at {self.url}"
        self._extra: dict[str, Any] = {"return_tokens_as_token_ids": True}
        self.alternatives = self._probe()
        self.philox = False
        """Whether seeds mean the same draws here isn't known of a server."""
        self._no_echo = ""
        for missing in self._missing():
            note(f"{self.url} offers no {missing}")

    def close(self) -> None:
        """Nothing is held."""

    # ---- What it offers

    def _models(self) -> list[str]:
        try:
            found = self._call("GET", "/v1/models", None)
            return [str(m["id"]) for m in found["data"]]
        except NotOffered:
            return []  # not every server lists them
        except (KeyError, TypeError) as error:
            raise SourceError(
                f"{self.url}/v1/models is no list of models", hint="is it an OpenAI-compatible server?"
            ) from error

    def _probe(self) -> int:
        """How many alternatives a token gets; 0 when the server gives no log-probabilities at all."""
        why = NotOffered("")
        for extra in (self._extra, {}):
            for count in _ALTERNATIVES:
                self._extra = extra
                try:
                    choices = self._complete([1], max_tokens=1, temperature=0, logprobs=count)
                except NotOffered as refusal:
                    why = refusal
                    continue
                given = choices[0].get("logprobs")
                return count if given else 0
        raise SourceError(
            f"{self.url} refuses a prompt of token ids: {why}",
            hint="validation needs a server whose /v1/completions takes `prompt` as a list of token ids",
        )

    def _missing(self) -> list[str]:
        missing = [] if self.alternatives else ["`logprobs`: margins and KL can't be had"]
        try:
            self.score([1, 2])
        except NotOffered as why:
            self._no_echo = str(why)
            missing.append(f"scores of a text: {why}")
        return missing

    # ---- A reference's work

    def score(self, tokens: Sequence[int]) -> Scores:
        if self._no_echo:
            raise NotOffered(self._no_echo)
        if not self.alternatives:
            raise NotOffered("the server gives no `logprobs`")
        choices = self._complete(tokens, max_tokens=0, temperature=0, logprobs=self.alternatives, echo=True)
        rows = _rows(choices[0].get("logprobs"))
        if len(rows) > len(tokens):  # a server that doesn't know max_tokens 0 has computed one
            rows = rows[: len(tokens)]
        if len(rows) != len(tokens) or any(r.logprob is None for r in rows[1:]):
            raise NotOffered("the server has no log-probabilities of a prompt's own tokens (`echo` with `logprobs`)")
        following = np.array([r.logprob for r in rows[1:]], np.float32)
        width = max((len(r.top) for r in rows[1:]), default=0)
        ids = np.full((len(rows) - 1, width), -1, np.int32)
        logprobs = np.full((len(rows) - 1, width), -np.inf, np.float32)
        for i, row in enumerate(rows[1:]):
            known = [(self._number(name), value) for name, value in row.top.items()]
            named = sorted(((t, v) for t, v in known if t is not None), key=lambda pair: -pair[1])
            for j, (token, value) in enumerate(named):
                ids[i, j], logprobs[i, j] = token, value
        return Scores(None, ids, logprobs, following)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling]) -> list[Generated]:
        made: list[Generated] = []
        for prompt, wanted in zip(prompts, sampling, strict=True):
            if not self.alternatives:
                raise NotOffered("without `logprobs` the server doesn't name its tokens")
            options: dict[str, Any] = {"max_tokens": wanted.max_tokens, "temperature": wanted.temperature}
            if wanted.temperature:
                options |= {"seed": wanted.seed, "n": wanted.n, "top_p": wanted.top_p}
                if wanted.top_k:
                    options["top_k"] = wanted.top_k
            if wanted.ignore_eos:
                options["ignore_eos"] = True
            choices = self._complete(prompt, logprobs=1, **options)
            for choice in sorted(choices, key=lambda c: int(c.get("index", 0))):
                answer = Generated()
                for row in _rows(choice.get("logprobs")):
                    token = row.token if row.token is not None else self._number(row.name)
                    if token is None:
                        raise NotOffered(f"the server names a token {row.name!r}, which is none of the bundle's")
                    answer.tokens.append(token)
                    answer.logprobs.append(row.logprob)
                made.append(answer)
        return made

    @cached_property
    def _numbers(self) -> dict[str, int | None]:
        """Ids by the texts that a server shows; None for a text that several tokens have."""
        found: dict[str, int | None] = {}
        for token in range(self._tokenizer.vocab_size):
            raw = self._tokenizer.token_bytes(token)
            try:
                names = {raw.decode()}
            except UnicodeDecodeError:
                names = {"bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)}  # as OpenAI spells them
            for name in names:
                found[name] = None if name in found else token
        return found

    def _number(self, name: str) -> int | None:
        if name.startswith(_ID) and name[len(_ID) :].isdigit():
            return int(name[len(_ID) :])
        return self._numbers.get(name)

    # ---- HTTP

    def _complete(self, prompt: Sequence[int], **options: Any) -> list[dict[str, Any]]:
        """The choices of one call.

        Raises:
            NotOffered: the server refuses it, with its words.
        """
        body = {"prompt": list(prompt), **options, **self._extra}
        if self.model:
            body["model"] = self.model
        answer = self._call("POST", "/v1/completions", body)
        choices = answer.get("choices")
        if not isinstance(choices, list) or not choices or not all(isinstance(c, Mapping) for c in choices):
            raise ParityError(f"{self.url}/v1/completions gave no choices")
        return [dict(c) for c in choices]

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as reply:
                found = json.loads(reply.read())
        except urllib.error.HTTPError as error:
            said = _words(error.read())
            if error.code in (401, 403):
                raise UsageError(
                    f"{self.url} refuses the API key: {said}", hint="give it with EDGEC_API_KEY"
                ) from error
            if error.code >= 500 and error.code != 501:
                raise SourceError(f"{self.url}{path} failed ({error.code}): {said}", hint="its log says why") from error
            raise NotOffered(f"it says: {said}") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise SourceError(f"{self.url}{path}: {reason}", hint="start the server, or correct --reference") from error
        if not isinstance(found, dict):
            raise SourceError(f"{self.url}{path} gave no JSON object", hint="is it an OpenAI-compatible server?")
        return found


class _Row:
    """One token as a server shows it."""

    def __init__(self, name: str, token: int | None, logprob: float | None, top: dict[str, float]) -> None:
        self.name, self.token, self.logprob, self.top = name, token, logprob, top


def _rows(given: Any) -> list[_Row]:
    """Of `logprobs` in the completions' own form (parallel lists), or in the chat's (`content`).

    Raises:
        NotOffered: it has neither.
    """
    try:
        if isinstance(given, Mapping) and isinstance(given.get("content"), list):
            rows = []
            for entry in given["content"]:
                top = {
                    f"{_ID}{t['id']}" if "id" in t else str(t["token"]): float(t["logprob"])
                    for t in entry.get("top_logprobs") or ()
                }
                token = int(entry["id"]) if "id" in entry else None
                rows.append(_Row(str(entry["token"]), token, float(entry["logprob"]), top))
            return rows
        if isinstance(given, Mapping):
            tokens = given["tokens"]
            tops = given.get("top_logprobs") or [None] * len(tokens)
            return [
                _Row(str(name), None, None if value is None else float(value), dict(top or {}))
                for name, value, top in zip(tokens, given["token_logprobs"], tops, strict=True)
            ]
    except (KeyError, TypeError, ValueError) as error:
        raise NotOffered(f"the server's `logprobs` can't be read: {error}") from error
    raise NotOffered("the server gives no `logprobs`")


def _words(body: bytes) -> str:
    """What an error says."""
    try:
        error = json.loads(body)["error"]
        text = error["message"] if isinstance(error, Mapping) else error
    except (ValueError, KeyError, TypeError):
        text = body.decode(errors="replace")
    return " ".join(str(text).split())[:200]
