"""Answers over HTTP that end when their client does: server-sent events, and plain ones that take long to compute."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from edgec.serving.errors import ApiError

T = TypeVar("T")
DONE = "[DONE]"


class ClientGone(Exception):
    """The client closed its connection before the answer was there."""


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client leaves.

    Raises:
        ClientGone: the client left.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for other in (task, watcher):
            other.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """An ASGI response of server-sent events.

    Args:
        chunks: JSON objects, or `DONE`. An ApiError ends the stream with its object.
        close: called at the end, whatever that was.
        gone: called when the client left.
    """

    def __init__(
        self, chunks: AsyncIterator[dict[str, Any] | str], close: Callable[[], None], gone: Callable[[], None]
    ) -> None:
        self._chunks = chunks
        self._close = close
        self._gone = gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await unless_gone(receive, self._send_all(send))
        except (ClientGone, OSError):
            self._gone()
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        try:
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": _frame(chunk), "more_body": True})
        except ApiError as error:
            await send({"type": "http.response.body", "body": _frame(error.to_dict()), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _frame(chunk: dict[str, Any] | str) -> bytes:
    return b"data: " + (chunk if isinstance(chunk, str) else to_json(chunk)).encode() + b"\n\n"


def to_json(value: Any) -> str:
    """Compact JSON on one line; a number that JSON has no word for is a bug."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
