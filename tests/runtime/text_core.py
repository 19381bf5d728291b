"""The text rooms of the core for tests: native/include/edgec_text.h by ctypes, and tokenizers to try them with."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from edgec.runtime import abi, library
from edgec.runtime.failures import EngineError, status_of
from edgec.runtime.sampling import Sampling
from edgec.runtime.tokenizer import Tokenizer

TOKEN, DRAFT, ACCEPT, RESIDUAL = range(4)  # what a random number is for


class Input(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_uint32),
        ("logits", POINTER(c_float)),
        ("vocab", c_int32),
        ("prompt", POINTER(c_int32)),
        ("prompt_count", c_int32),
        ("answer", POINTER(c_int32)),
        ("answer_count", c_int32),
        ("seed", c_uint64),
        ("sequence", c_uint32),
        ("position", c_uint32),
    )


class Output(ctypes.Structure):
    _fields_ = (
        ("bad_logits", c_int32),
        ("token", c_int32),
        ("logprob", c_float),
        ("top_count", c_int32),
        ("top", abi.TokenLogprob * 20),
    )


_PIECE = (POINTER(c_void_p), POINTER(c_size_t))
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "edgec_philox": (None, (POINTER(c_uint32), POINTER(c_uint32), POINTER(c_uint32))),
    "edgec_uniform": (c_double, (c_uint64, c_uint32, c_uint32, c_uint32)),
    "edgec_noise": (c_double, (c_uint64, c_uint32, c_uint32, c_int32)),
    "edgec_sampler_create": (c_int32, (POINTER(c_void_p),)),
    "edgec_sampler_sample": (c_int32, (c_void_p, POINTER(Input), POINTER(abi.Sampling), POINTER(Output))),
    "edgec_sampler_probabilities": (
        c_int32,
        (
            c_void_p,
            POINTER(Input),
            POINTER(abi.Sampling),
            POINTER(c_int32),
            POINTER(c_double),
            c_int32,
            POINTER(c_int32),
        ),
    ),
    "edgec_sampling_check": (c_int32, (POINTER(abi.Sampling), c_int32)),
    "edgec_detokenizer_create": (c_int32, (c_void_p, c_int32, POINTER(c_void_p))),
    "edgec_detokenizer_destroy": (None, (c_void_p,)),
    "edgec_detokenizer_push": (c_int32, (c_void_p, c_int32, *_PIECE)),
    "edgec_detokenizer_flush": (c_int32, (c_void_p, *_PIECE)),
    "edgec_stop_matcher_create": (c_int32, (POINTER(c_char_p), c_int32, POINTER(c_void_p))),
    "edgec_stop_matcher_destroy": (None, (c_void_p,)),
    "edgec_stop_matcher_push": (c_int32, (c_void_p, c_char_p, c_size_t, *_PIECE, POINTER(c_int32))),
    "edgec_stop_matcher_flush": (c_int32, (c_void_p, *_PIECE)),
}


@cache
def core() -> ctypes.CDLL:
    loaded = library.load()
    abi.declare(loaded, FUNCTIONS)
    return loaded


@cache
def sampler() -> c_void_p:
    """One for all tests: nothing may carry over from one row to the next."""
    handle = c_void_p()
    check(core().edgec_sampler_create(ctypes.byref(handle)))
    return handle


def check(status: int) -> None:
    if status:
        raise EngineError(status_of(status), core().edgec_last_error().decode())


def uniform(seed: int, sequence: int, position: int, draw: int = TOKEN) -> float:
    return float(core().edgec_uniform(seed & (2**64 - 1), sequence, position, draw))


def noise(seed: int, sequence: int, position: int, token: int) -> float:
    return float(core().edgec_noise(seed & (2**64 - 1), sequence, position, token))


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    out = (c_uint32 * 4)()
    core().edgec_philox((c_uint32 * 4)(*counter), (c_uint32 * 2)(*key), out)
    return list(out)


def check_sampling(sampling: Sampling, vocab: int) -> None:
    check(core().edgec_sampling_check(ctypes.byref(sampling.to_c()), vocab))


@dataclass(frozen=True)
class Sampled:
    bad_logits: bool
    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass
class Row:
    """A row of logits and what came before it; what the sampler makes of it."""

    logits: np.ndarray
    prompt: Sequence[int] = ()
    answer: Sequence[int] = ()
    seed: int = 0
    sequence: int = 0
    position: int = 0

    def _input(self) -> Input:
        self._kept = np.ascontiguousarray(self.logits, dtype=np.float32)
        return Input(
            ctypes.sizeof(Input),
            self._kept.ctypes.data_as(POINTER(c_float)),
            len(self._kept),
            (c_int32 * len(self.prompt))(*self.prompt),
            len(self.prompt),
            (c_int32 * len(self.answer))(*self.answer),
            len(self.answer),
            self.seed,
            self.sequence,
            self.position,
        )

    def sample(self, sampling: Sampling) -> Sampled:
        out = Output()
        check(
            core().edgec_sampler_sample(
                sampler(), ctypes.byref(self._input()), ctypes.byref(sampling.to_c()), ctypes.byref(out)
            )
        )
        top = [(t.token, t.logprob) for t in out.top[: out.top_count]]
        return Sampled(bool(out.bad_logits), out.token, out.logprob, top)

    def probabilities(self, sampling: Sampling) -> dict[int, float]:
        vocab = len(self.logits)
        tokens, found, count = (c_int32 * vocab)(), (c_double * vocab)(), c_int32()
        check(
            core().edgec_sampler_probabilities(
                sampler(),
                ctypes.byref(self._input()),
                ctypes.byref(sampling.to_c()),
                tokens,
                found,
                vocab,
                ctypes.byref(count),
            )
        )
        return dict(zip(tokens[: count.value], found[: count.value], strict=True))


class _Stream:
    """A handle that gives out pieces of text."""

    _kind = ""

    def _created(self, *arguments: Any) -> c_void_p:
        handle = c_void_p()
        check(getattr(core(), f"edgec_{self._kind}_create")(*arguments, ctypes.byref(handle)))
        return handle

    def _call(self, name: str, *arguments: Any, after: tuple[Any, ...] = ()) -> bytes:
        text, size = c_void_p(), c_size_t()
        function = getattr(core(), f"edgec_{self._kind}_{name}")
        check(function(self._handle, *arguments, ctypes.byref(text), ctypes.byref(size), *after))
        return ctypes.string_at(text.value, size.value) if size.value else b""

    def __init__(self, handle: c_void_p) -> None:
        self._handle = handle

    def flush(self) -> bytes:
        return self._call("flush")

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            getattr(core(), f"edgec_{self._kind}_destroy")(self._handle)


class Detokenizer(_Stream):
    _kind = "detokenizer"

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer  # kept alive
        super().__init__(self._created(tokenizer.handle, skip_special))

    def push(self, token: int) -> bytes:
        return self._call("push", token)

    def pieces(self, tokens: Iterable[int]) -> list[bytes]:
        """What each token brings, and what is left at the end."""
        return [*(self.push(t) for t in tokens), self.flush()]


class StopMatcher(_Stream):
    _kind = "stop_matcher"

    def __init__(self, *stop: str) -> None:
        self.stopped = False
        super().__init__(self._created((c_char_p * len(stop))(*(s.encode() for s in stop)), len(stop)))

    def push(self, piece: str) -> bytes:
        stopped, given = c_int32(), piece.encode()
        text = self._call("push", given, len(given), after=(ctypes.byref(stopped),))
        self.stopped = bool(stopped.value)
        return text

    def run(self, pieces: Iterable[str]) -> str:
        """All that is let out of a text, to its end or its first stop string."""
        out = b""
        for piece in pieces:
            out += self.push(piece)
            if self.stopped:
                return out.decode()
        return (out + self.flush()).decode()
