"""The requests of one HTTP call, between the engine's thread and the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence

from edgec.errors import EdgecError
from edgec.runtime.events import Event, EventKind, Finish, Request
from edgec.serving.backend import Backend
from edgec.serving.errors import ApiError, from_refusal
from edgec.serving.metrics import Metrics


class Generation:
    """Requests that are submitted together, read as one stream of events, and cancelled together."""

    def __init__(self, backend: Backend, metrics: Metrics) -> None:
        self._backend = backend
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[tuple[int, Sequence[Event]]] = asyncio.Queue()
        self._lock = threading.Lock()
        self._numbers: list[int] = []
        self._open = 0
        self._closed = False
        self._submitted = 0.0
        self.requests: list[Request] = []

    async def start(self, make: Callable[[], list[Request]]) -> None:
        """Build the requests and submit them, in another thread: encoding a long prompt takes a while.

        Whatever comes of it, the caller closes this object; those that were submitted are then cancelled.

        Raises:
            ApiError: one of them is refused.
        """
        self._submitted = time.perf_counter()
        submitting = self._loop.run_in_executor(None, self._submit, make)
        try:
            await asyncio.shield(submitting)
        except EdgecError as error:
            raise from_refusal(error, self._retry_after(), "prompt") from error

    def _submit(self, make: Callable[[], list[Request]]) -> None:
        self.requests = make()
        with self._lock:
            self._open = sum(r.sampling.n for r in self.requests)
        for index, request in enumerate(self.requests):
            if self._closed:
                return
            number = self._backend.submit(request, self._deliver(index))
            with self._lock:
                self._numbers.append(number)
                closed = self._closed
            if closed:
                self._backend.cancel(number)

    def _deliver(self, index: int) -> Callable[[Sequence[Event]], None]:
        def deliver(events: Sequence[Event]) -> None:
            try:
                self._loop.call_soon_threadsafe(self._arrived.put_nowait, (index, events))
            except RuntimeError:  # the loop is closed: nobody reads any more
                self._closed = True

        return deliver

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Each event, with the number of its prompt, until every sequence has ended.

        Raises:
            ApiError: the engine failed, or is being stopped.
        """
        latest: dict[tuple[int, int], float] = {}
        while self._open:
            index, events = await self._arrived.get()
            now = time.perf_counter()
            for event in events:
                key = (index, event.sequence)
                if event.kind is EventKind.TOKEN:
                    if key in latest:
                        self._metrics.between_tokens.observe(now - latest[key])
                    else:
                        self._metrics.first_token.observe(now - self._submitted)
                    latest[key] = now
                elif event.kind is EventKind.FINISH:
                    self._open -= 1
                    self._metrics.answer.observe(now - self._submitted)
                    if event.finish is Finish.FAILED:
                        raise ApiError(500, "the engine failed while it computed this answer", code="engine_failed")
                    if event.finish is Finish.CANCELLED:
                        raise ApiError(503, "the server is shutting down", code="shutting_down")
                yield index, event

    def close(self) -> None:
        """Cancel what has not finished. From the event loop; returns at once."""
        with self._lock:
            if self._closed or (self._numbers and not self._open):
                self._closed = True
                return
            self._closed = True
            numbers = list(self._numbers)
        for number in numbers:  # not on the event loop: the engine may be between two looks at its queue
            self._loop.run_in_executor(None, self._backend.cancel, number)

    def abort(self) -> None:
        """Cancel in the engine, and let the reader see it end so. From the event loop."""
        with self._lock:
            numbers = list(self._numbers)
        for number in numbers:
            self._loop.run_in_executor(None, self._backend.cancel, number)

    def _retry_after(self) -> int:
        """Seconds until half of those that wait should have been answered, by the mean time of those before."""
        stats = self._backend.stats
        if not stats.requests_finished or not stats.step_seconds:
            return 1
        each = stats.step_seconds / stats.requests_finished
        return max(1, min(60, round(each * max(stats.waiting, 1) / 2)))
