"""The reference behind the HTTP server: a model in the reference engine, and a thread that steps it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache

import torch

from edgec.errors import Reason, UsageError
from edgec.reference.engine import ReferenceEngine
from edgec.reference.load import Loaded
from edgec.reference.options import ReferenceOptions
from edgec.runtime.chat import Message
from edgec.runtime.driver import Driven, Driver
from edgec.serving.backend import Backend, ModelInfo


class ReferenceBackend(Driven):
    """Implements `edgec.serving.backend.Backend`."""

    def __init__(self, loaded: Loaded, options: ReferenceOptions, name: str | None = None) -> None:
        """
        Raises:
            UsageError: the model came without a tokenizer.
            EngineError: the options don't fit the model or the memory.
        """
        if loaded.tokenizer is None:
            raise UsageError(
                f"{loaded.origin.partition(':')[0]}: the model came without a tokenizer.json, and the server needs one",
                hint="take the model from a GGUF file, or from a Hugging Face folder that holds tokenizer.json",
                reason=Reason.BAD_CHECKPOINT,
            )
        self._tokenizer = loaded.tokenizer
        self.engine = ReferenceEngine(
            loaded.model,
            loaded.tokenizer,
            options,
            eos=loaded.eos,
            quantised=loaded.quantised,
            draft=loaded.draft,
        )
        self._driver = Driver(self.engine)
        self._stopped = False
        self._lost: str | None = None
        self.token_bytes = lru_cache(maxsize=1 << 14)(self._tokenizer.token_bytes)
        weights = "INT8" if loaded.quantised else "float"
        self._info = ModelInfo(
            name=name or loaded.name,
            context=self.engine.context,
            vocab_size=loaded.model.config.vocab_size,
            created=int(time.time()),
            chat=self._tokenizer.chat.available,
            engine=f"PyTorch {torch.__version__} on {options.device}, {options.dtype}, {weights} weights",
            block_size=options.block_size,
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    def start(self) -> None:
        self._driver.start()

    def stop(self) -> None:
        """Cancel what is left, deliver its last events, and end. May be called again."""
        self._driver.stop()
        if not self._stopped and self._driver.failure is None:
            try:
                self.engine.check()
            except AssertionError as error:  # the HTTP server would only log it: see `assert_whole`
                self._lost = str(error)
        self._stopped = True
        self.engine.close()

    def assert_whole(self) -> None:
        """After `stop`: that every block was given back.

        Raises:
            AssertionError: with what is missing, which is a bug that a clean end must not hide.
        """
        if self._lost is not None:
            raise AssertionError(f"after every request had ended: {self._lost}")

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode_prompt(text)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        return self._tokenizer.chat.tokens(messages)


def _is_a_backend(backend: ReferenceBackend) -> Backend:
    return backend  # for the type checker
