"""The C++ runtime behind the HTTP server: an engine, its chat template, and a thread that steps it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from edgec.runtime.chat import Chat, Message
from edgec.runtime.driver import Driven, Driver
from edgec.runtime.engine import Engine
from edgec.runtime.locate import MANIFEST, bundle_name
from edgec.serving.backend import Backend, ModelInfo


class NativeBackend(Driven):
    """Implements `edgec.serving.backend.Backend`; takes over the engine and closes it."""

    def __init__(self, engine: Engine, name: str | None = None) -> None:
        self._engine = engine
        self._chat = Chat.of(engine)
        self._driver = Driver(engine)
        self.token_bytes = lru_cache(maxsize=1 << 14)(self._token_bytes)
        about = engine.description
        self._info = ModelInfo(
            name=name or bundle_name(engine.folder),
            context=int(about["context"]),
            vocab_size=int(about["vocab_size"]),
            created=int((engine.folder / MANIFEST).stat().st_mtime),
            chat=self._chat.available,
            engine=f"edgec {engine.version}",
            block_size=int(about.get("block_size", 1)),
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    def start(self) -> None:
        self._driver.start()

    def stop(self) -> None:
        self._driver.stop()
        self._engine.close()

    def encode(self, text: str) -> list[int]:
        return self._engine.encode_prompt(text)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        return self._chat.tokens(messages)

    def _token_bytes(self, token: int) -> bytes:
        return self._engine.decode_bytes([token])


def _is_a_backend(backend: NativeBackend) -> Backend:
    return backend  # for the type checker
