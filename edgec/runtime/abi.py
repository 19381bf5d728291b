"""The C ABI of native/include/edgec.h for ctypes: its constants, its structs and its functions, and nothing else.

The header documents them. A test compiles it and compares the size and every offset, so this file can't drift from it.
"""

from __future__ import annotations

import ctypes
from ctypes import (
    CFUNCTYPE,
    POINTER,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from enum import IntEnum
from typing import Any

ABI_VERSION = 1


class Status(IntEnum):
    """`edgec_status`: what a call came to."""

    OK = 0
    INVALID_ARGUMENT = 1
    NOT_FOUND = 2
    CORRUPT = 3
    UNSUPPORTED = 4
    VERSION_MISMATCH = 5
    OVER_BUDGET = 6
    QUEUE_FULL = 7
    TOO_LONG = 8
    BUFFER_TOO_SMALL = 9
    BUSY = 10
    IO = 11
    INTERNAL = 12


class LogLevel(IntEnum):
    """`EDGEC_LOG_*`."""

    DEBUG = 0
    INFO = 1
    WARNING = 2
    ERROR = 3


class KvType(IntEnum):
    """`EDGEC_KV_*`: how keys and values are kept."""

    INT8 = 0
    FP16 = 1
    FP32 = 2


class Batching(IntEnum):
    """`EDGEC_BATCHING_*`."""

    CONTINUOUS = 0
    STATIC = 1


class StepOutcome(IntEnum):
    """`EDGEC_STEP_*`: what one iteration did."""

    IDLE = 0
    COMMITTED = 1
    DEFERRED = 2
    RETRY = 3
    FAILED = 4


class Finish(IntEnum):
    """`EDGEC_FINISH_*`: why a sequence ended."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    FAILED = 4


class EventKind(IntEnum):
    """`EDGEC_EVENT_*`."""

    TOKEN = 0
    PROMPT_SCORE = 1
    FINISH = 2


class Trim(IntEnum):
    """`EDGEC_TRIM_*`: how much memory to give back."""

    CACHE = 0
    IDLE = 1
    CRITICAL = 2


LogFunction = CFUNCTYPE(None, c_void_p, c_int32, c_char_p)
ThermalFunction = CFUNCTYPE(c_int32, c_void_p)


MOST_DRAFTS = 8
"""Tokens that are proposed for a sequence in one step at most."""


class Speculation(IntEnum):
    """Who proposes tokens; EDGEC_SPECULATION_*."""

    AUTO = 0
    OFF = 1
    HEAD = 2
    NGRAM = 3
    BOTH = 4


class Speculate(IntEnum):
    """Whether the engine may speculate on a request; EDGEC_SPECULATE_*."""

    DEFAULT = 0
    ALWAYS = 1
    NEVER = 2


class EngineOptions(ctypes.Structure):
    """`edgec_engine_options`."""

    _fields_ = (
        ("struct_size", c_uint32),
        ("threads", c_int32),
        ("block_size", c_int32),
        ("context", c_int32),
        ("max_batch", c_int32),
        ("step_tokens", c_int32),
        ("max_waiting", c_int32),
        ("kv_dtype", c_int32),
        ("batching", c_int32),
        ("prefix_cache", c_int32),
        ("aging_steps", c_int32),
        ("memory_budget", c_uint64),
        ("step_slo_ms", c_double),
        ("kernel", c_char_p),
        ("log", LogFunction),
        ("thermal", ThermalFunction),
        ("user", c_void_p),
        ("speculation", c_int32),
        ("draft_length", c_int32),
        ("draft_width", c_int32),
    )


class LogitBias(ctypes.Structure):
    """`edgec_logit_bias`."""

    _fields_ = (("token", c_int32), ("bias", c_float))


class Sampling(ctypes.Structure):
    """`edgec_sampling`."""

    _fields_ = (
        ("struct_size", c_uint32),
        ("max_tokens", c_int32),
        ("temperature", c_float),
        ("top_k", c_int32),
        ("top_p", c_float),
        ("min_p", c_float),
        ("repetition_penalty", c_float),
        ("frequency_penalty", c_float),
        ("presence_penalty", c_float),
        ("seed", c_uint64),
        ("has_seed", c_int32),
        ("logprobs", c_int32),
        ("ignore_eos", c_int32),
        ("n", c_int32),
        ("logit_bias", POINTER(LogitBias)),
        ("logit_bias_count", c_int32),
        ("stop", POINTER(c_char_p)),
        ("stop_count", c_int32),
        ("stop_tokens", POINTER(c_int32)),
        ("stop_token_count", c_int32),
        ("speculate", c_int32),
    )


class Request(ctypes.Structure):
    """`edgec_request`."""

    _fields_ = (
        ("struct_size", c_uint32),
        ("tokens", POINTER(c_int32)),
        ("token_count", c_int32),
        ("priority", c_int32),
        ("tenant", c_uint64),
        ("tenant_weight", c_float),
        ("cache_salt", c_uint64),
        ("score_prompt", c_int32),
        ("sampling", Sampling),
    )


class TokenLogprob(ctypes.Structure):
    """`edgec_token_logprob`."""

    _fields_ = (("token", c_int32), ("logprob", c_float))


class Event(ctypes.Structure):
    """`edgec_event`. `text` is no C string: it has `text_bytes` bytes, and NULs may be among them."""

    _fields_ = (
        ("request", c_uint64),
        ("sequence", c_int32),
        ("kind", c_int32),
        ("token", c_int32),
        ("position", c_int32),
        ("logprob", c_float),
        ("finish", c_int32),
        ("text", c_void_p),
        ("text_bytes", c_int32),
        ("top", POINTER(TokenLogprob)),
        ("top_count", c_int32),
        ("prompt_tokens", c_int32),
        ("cached_tokens", c_int32),
        ("answer_tokens", c_int32),
    )


class Stats(ctypes.Structure):
    """`edgec_stats`."""

    _fields_ = (
        ("struct_size", c_uint32),
        ("waiting", c_int32),
        ("running", c_int32),
        ("blocks_total", c_int32),
        ("blocks_free", c_int32),
        ("blocks_cached", c_int32),
        ("blocks_owned", c_int32),
        ("batch_limit", c_int32),
        ("kv_tokens", c_int32),
        ("steps", c_uint64),
        ("retries", c_uint64),
        ("failures", c_uint64),
        ("preemptions", c_uint64),
        ("requests_finished", c_uint64),
        ("requests_cancelled", c_uint64),
        ("prompt_tokens", c_uint64),
        ("cached_tokens", c_uint64),
        ("answer_tokens", c_uint64),
        ("computed_tokens", c_uint64),
        ("recomputed_tokens", c_uint64),
        ("batch_slots", c_uint64),
        ("batch_used", c_uint64),
        ("step_seconds", c_double),
        ("forward_seconds", c_double),
        ("sample_seconds", c_double),
        ("step_p50_ms", c_double),
        ("step_p99_ms", c_double),
        ("kv_token_steps", c_uint64),
        ("kv_slot_steps", c_uint64),
        ("draft_reached", c_uint64 * MOST_DRAFTS),
        ("draft_kept", c_uint64 * MOST_DRAFTS),
        ("drafted_tokens", c_uint64),
        ("draft_places", c_uint64),
        ("draft_runs", c_uint64),
        ("draft_seconds", c_double),
        ("draft_length", c_int32),
    )


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "edgec_engine_options": EngineOptions,
    "edgec_logit_bias": LogitBias,
    "edgec_sampling": Sampling,
    "edgec_request": Request,
    "edgec_token_logprob": TokenLogprob,
    "edgec_event": Event,
    "edgec_stats": Stats,
}

_I32S = POINTER(c_int32)
_F32S = POINTER(c_float)
_HANDLE = c_void_p

# name: (result, arguments)
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "edgec_abi_version": (c_uint32, ()),
    "edgec_version": (c_char_p, ()),
    "edgec_last_error": (c_char_p, ()),
    "edgec_engine_create": (c_int32, (c_char_p, POINTER(EngineOptions), POINTER(_HANDLE))),
    "edgec_engine_destroy": (None, (_HANDLE,)),
    "edgec_engine_describe": (c_char_p, (_HANDLE,)),
    "edgec_engine_submit": (c_int32, (_HANDLE, POINTER(Request), POINTER(c_uint64))),
    "edgec_engine_cancel": (c_int32, (_HANDLE, c_uint64)),
    "edgec_engine_step": (c_int32, (_HANDLE, _I32S)),
    "edgec_engine_poll": (c_int32, (_HANDLE, POINTER(Event), c_int32, _I32S)),
    "edgec_engine_trim": (c_int32, (_HANDLE, c_int32)),
    "edgec_engine_stats": (c_int32, (_HANDLE, POINTER(Stats))),
    "edgec_engine_tokenizer": (_HANDLE, (_HANDLE,)),
    "edgec_engine_forward": (
        c_int32,
        (_HANDLE, _I32S, _I32S, _I32S, _I32S, c_int32, _I32S, c_int32, c_int32, _F32S, _F32S),
    ),
    "edgec_tokenizer_create": (c_int32, (c_char_p, POINTER(_HANDLE))),
    "edgec_tokenizer_destroy": (None, (_HANDLE,)),
    "edgec_tokenizer_encode": (c_int32, (_HANDLE, c_char_p, c_size_t, c_int32, _I32S, c_int32, _I32S)),
    "edgec_tokenizer_decode": (c_int32, (_HANDLE, _I32S, c_int32, c_int32, c_void_p, c_size_t, POINTER(c_size_t))),
    "edgec_tokenizer_vocab_size": (c_int32, (_HANDLE,)),
}


def declare(library: ctypes.CDLL, functions: dict[str, tuple[Any, tuple[Any, ...]]] | None = None) -> None:
    """Give a loaded library's functions their types: those of edgec.h, or those of another header of the core.

    A library without one of them keeps it undeclared; calling it says so. While the core is built from its sources that
    can't happen, and a library from elsewhere has had its ABI version checked.
    """
    for name, (result, arguments) in (functions or FUNCTIONS).items():
        function = getattr(library, name, None)
        if function is not None:
            function.restype, function.argtypes = result, list(arguments)
