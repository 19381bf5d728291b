"""edgec's own engine as a subject: with the library that the bundle carries for this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from ctypes import CDLL
from pathlib import Path

import numpy as np

from edgec.runtime import compile as core
from edgec.runtime import library
from edgec.runtime.abi import KvType
from edgec.runtime.engine import Engine, EngineOptions
from edgec.runtime.locate import native_folder
from edgec.runtime.sampling import Sampling
from edgec.runtime.stats import Stats
from edgec.validation.requests import answer
from edgec.validation.scores import Scores
from edgec.validation.subjects import Generated

_PLENTY = 2**40  # the recipe's budget is for an app; what is validated here is what the engine computes


def bundled_library(folder: Path) -> tuple[CDLL, str]:
    """The core to validate, and where it comes from: `$EDGEC_LIBRARY`, else the bundle's own, else the installed one.

    Raises:
        EngineError: it has another ABI.
    """
    if named := os.environ.get("EDGEC_LIBRARY"):
        return library.load(), f"$EDGEC_LIBRARY ({named})"
    here = core.host()
    own = folder / "lib" / here.name / here.library
    if own.is_file():
        return library.load(own), f"the bundle's own for {here.name}"
    return library.load_for(folder), f"the installed one: the bundle has none for {here.name}"


class NativeSubject:
    """A bundle's `native` folder. An engine is opened for requests when one is needed, and another one for scoring."""

    target = "native"

    def __init__(self, bundle: Path, *, context: int = 0, threads: int = 0, kernel: str | None = None) -> None:
        self.folder = native_folder(bundle)
        self.core, self.library = bundled_library(self.folder)
        self._threads, self._kernel = threads, kernel
        self.context = context
        with self.open() as engine:
            described = engine.description
        self.context, self.batch = int(described["context"]), int(described["max_batch"])
        self.label = f"native, {described['kernel']}"
        self.kv = str(described["kv_dtype"])
        self._scoring: Engine | None = None
        self._asking: Engine | None = None

    def open(
        self,
        *,
        context: int = 0,
        max_batch: int = 0,
        step_tokens: int = 0,
        prefix_cache: bool = True,
        memory: int = _PLENTY,
    ) -> Engine:
        """An engine over the bundle; the caller closes it."""
        options = EngineOptions(
            threads=self._threads,
            kernel=self._kernel,
            context=context or self.context,
            max_batch=max_batch,
            step_tokens=step_tokens,
            prefix_cache=prefix_cache,
            memory_budget=memory,
            kv=KvType.INT8,
        )
        return Engine(self.folder, options, library=self.core)

    def score(self, tokens: Sequence[int]) -> Scores:
        """Through blocks in no order, in chunks of what a step holds."""
        if self._scoring is None:
            self._scoring = self.open(prefix_cache=False)
        described = self._scoring.description
        size, first, chunk = int(described["block_size"]), int(described["first_block"]), int(described["step_tokens"])
        count = len(tokens) - 1
        blocks = -(-count // size)
        table = np.random.default_rng(0).permutation(blocks).astype(np.int32) + first  # as a pool in use hands them out
        positions = np.arange(count, dtype=np.int32)
        slots = table[positions // size] * size + positions % size
        given = np.asarray(tokens[:-1], np.int32)
        parts = []
        for start in range(0, count, chunk):
            rows = slice(start, start + chunk)
            sequence = np.zeros(len(given[rows]), np.int32)
            logits, _ = self._scoring.forward(given[rows], positions[rows], slots[rows], sequence, table[None])
            parts.append(logits)
        return Scores.whole(np.concatenate(parts), tokens)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling]) -> list[Generated]:
        if self._asking is None:
            self._asking = self.open()
        return answer(self._asking, prompts, sampling)

    def stats(self) -> Stats | None:
        """The counters of the engine that answers."""
        return None if self._asking is None else self._asking.stats()

    def close(self) -> None:
        for engine in (self._scoring, self._asking):
            if engine is not None:
                engine.close()
        self._scoring = self._asking = None
