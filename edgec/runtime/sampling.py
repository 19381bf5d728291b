"""How the next token is chosen: `edgec_sampling` of edgec.h as a dataclass.

The core checks what can be combined and what is in range, and names the field; here is only checked what would not
survive the way to C (a number that does not fit its field, a NUL inside a string).
"""

from __future__ import annotations

import ctypes
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from edgec.errors import UsageError
from edgec.runtime import abi

_NONE = -1  # edgec.h's "no logprobs"


@dataclass(frozen=True)
class Sampling:
    """What a request asks for; the defaults choose the likeliest token each time."""

    max_tokens: int = 0
    """Tokens to generate at most; 0: until the context is full."""
    temperature: float = 0.0
    """0 is greedy: the same prompt has the same answer."""
    top_k: int = 0
    """Only the k likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this probability."""
    min_p: float = 0.0
    """Only tokens at least this fraction as likely as the likeliest."""
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    """Any integer; None draws one from the request's number, so that a program's runs are equal. See `with_seed`."""
    logprobs: int | None = None
    """Report each token's log-probability, and so many alternatives."""
    ignore_eos: bool = False
    n: int = 1
    """Answers to the one prompt."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    """Strings that end the answer and are not part of it."""
    stop_tokens: tuple[int, ...] = ()
    speculate: bool | None = None
    """Whether the engine may speculate. None: yes, but a head draws no chains where there are a seed and a temperature,
    since then the tokens (not their distribution) depend on how far it drafts, and that on measured times."""

    def with_seed(self) -> Sampling:
        """The same with a seed from the system, where one is needed and none was given: nobody asks for it again."""
        if self.seed is not None or self.temperature == 0:
            return self
        return replace(self, seed=secrets.randbits(63), speculate=self.speculate is not False)

    def to_c(self) -> abi.Sampling:
        """The struct. What its pointers lead to lives as long as it does.

        Raises:
            UsageError: a number that doesn't fit its field, or a string that can't be one in C.
        """
        made = abi.Sampling(struct_size=ctypes.sizeof(abi.Sampling))
        for name in ("max_tokens", "top_k", "n"):
            setattr(made, name, int32(name, getattr(self, name)))
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "frequency_penalty",
            "presence_penalty",
        ):
            setattr(made, name, float32(name, getattr(self, name)))
        made.has_seed = self.seed is not None
        made.seed = (self.seed or 0) & 0xFFFF_FFFF_FFFF_FFFF
        made.logprobs = _NONE if self.logprobs is None else int32("logprobs", self.logprobs)
        if made.logprobs < 0 and self.logprobs is not None:
            raise UsageError(f"logprobs: {self.logprobs} alternatives can't be reported")
        made.ignore_eos = self.ignore_eos
        biases = [
            abi.LogitBias(int32("logit_bias", t), float32("logit_bias", b)) for t, b in sorted(self.logit_bias.items())
        ]
        made.logit_bias = (abi.LogitBias * len(biases))(*biases)
        made.logit_bias_count = len(biases)
        strings = [_c_string(text) for text in self.stop]
        made.stop = (ctypes.c_char_p * len(strings))(*strings)
        made.stop_count = len(strings)
        tokens = [int32("stop_tokens", token) for token in self.stop_tokens]
        made.stop_tokens = (ctypes.c_int32 * len(tokens))(*tokens)
        made.stop_token_count = len(tokens)
        made.speculate = _SPECULATE[self.speculate]
        return made


_SPECULATE = {None: abi.Speculate.DEFAULT, True: abi.Speculate.ALWAYS, False: abi.Speculate.NEVER}


def int32(name: str, value: int) -> int:
    """`value`, which ctypes would cut to 32 bits without a word."""
    if not -(2**31) <= value < 2**31:
        raise UsageError(f"{name}: {value} does not fit 32 bits")
    return value


def float32(name: str, value: float) -> float:
    """`value`, which must be a finite float32."""
    if not math.isfinite(value) or abs(value) > 3e38:
        raise UsageError(f"{name}: {value} is no finite number")
    return value


def _c_string(text: str) -> bytes:
    try:
        made = text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"stop: {text!r} is not valid Unicode") from error
    if not made or b"\0" in made:
        raise UsageError("stop: a stop string can't be empty, nor hold a NUL")
    return made
