"""Steps an engine in a thread of its own, and hands each request's events to whoever submitted it.

The thread sleeps while there is nothing to do. What it delivers, it delivers from its own thread, after each step and
in order. A request that was submitted gets its FINISH events whatever happens: also when the engine fails, or is ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from edgec.errors import EdgecError
from edgec.runtime.abi import EventKind, Finish, Status, StepOutcome
from edgec.runtime.events import Event, Request
from edgec.runtime.failures import EngineError
from edgec.runtime.stats import Stats

Deliver = Callable[[Sequence[Event]], None]

_PATIENCE = 3  # failed steps in a row, after which the engine is given up
_PAUSE = 0.002  # seconds before stepping again when there were no blocks
_STATS_EVERY = 0.1  # seconds between looks at the counters while busy


class Steppable(Protocol):
    """What is driven: the C++ engine (`edgec.runtime.engine.Engine`), or any other that works in steps."""

    def submit(self, request: Request) -> int:
        """Queue a request and give its number, from any thread; raises EdgecError when it is refused."""

    def cancel(self, request: int) -> bool:
        """End a request, from any thread; False when it has finished already."""

    def step(self) -> StepOutcome:
        """Do one piece of work."""

    def poll(self) -> list[Event]:
        """What has happened since the last call, in order."""

    def stats(self) -> Stats:
        """The counters."""


class Driver:
    """A running engine. `submit` and `cancel` may be called from any thread."""

    def __init__(self, engine: Steppable) -> None:
        self.engine = engine
        self.failure: str | None = None
        """Why the engine was given up, when it was."""
        self.stats = engine.stats()
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._work = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="edgec-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Cancel what is left, deliver its last events, and end the thread. May be called again."""
        with self._lock:
            self._stopping = True
        self._work.set()
        if self._thread.ident is not None:
            self._thread.join()

    def submit(self, request: Request, deliver: Deliver) -> int:
        """Queue a request; `deliver` is called with its events, from the engine's thread. It must be quick.

        Raises:
            EngineError: it is refused.
        """
        with self._lock:  # so that no event of it is sorted before it is known here
            if self._stopping or self.failure is not None:
                raise EngineError(Status.BUSY, f"the engine has stopped{f': {self.failure}' if self.failure else ''}")
            number = self.engine.submit(request)
            self._waiting[number] = _Waiting(deliver, request.sampling.n)
        self._work.set()
        return number

    def cancel(self, number: int) -> None:
        """Cancel a request; nothing happens when it has finished."""
        with self._lock:
            if number in self._waiting and self.failure is None:
                self.engine.cancel(number)
        self._work.set()

    @property
    def open_requests(self) -> int:
        return len(self._waiting)

    def _run(self) -> None:
        failed, looked = 0, 0.0
        while True:
            self._work.clear()
            with self._lock:
                stopping = self._stopping
                for number in self._waiting if stopping else ():
                    self.engine.cancel(number)
            try:
                outcome = self.engine.step()
                events = self.engine.poll()
                if outcome is StepOutcome.IDLE or time.monotonic() - looked > _STATS_EVERY:
                    self.stats, looked = self.engine.stats(), time.monotonic()
            except EdgecError as error:
                self._give_up(error.message)
                return
            self._deliver(events)
            failed = failed + 1 if outcome is StepOutcome.FAILED else 0
            if failed == _PATIENCE:
                self._give_up(f"{_PATIENCE} steps in a row failed")
                return
            if stopping and (outcome is StepOutcome.IDLE or not self._waiting):
                self._give_up("it was stopped", Finish.CANCELLED)
                return
            if outcome is StepOutcome.IDLE:
                self._work.wait()
            elif outcome is StepOutcome.DEFERRED:
                self._work.wait(_PAUSE)

    def _deliver(self, events: Sequence[Event]) -> None:
        by_request: dict[int, list[Event]] = {}
        for event in events:
            by_request.setdefault(event.request, []).append(event)
        for number, theirs in by_request.items():
            with self._lock:
                waiting = self._waiting.get(number)
                if waiting is None:
                    continue
                waiting.open -= {e.sequence for e in theirs if e.kind is EventKind.FINISH}
                if not waiting.open:
                    del self._waiting[number]
            waiting.deliver(theirs)

    def _give_up(self, why: str, finish: Finish = Finish.FAILED) -> None:
        """End every request that is left: nobody waits for ever."""
        with self._lock:
            if finish is Finish.FAILED:
                self.failure = why
            self._stopping = True
            left, self._waiting = self._waiting, {}
        for number, waiting in left.items():
            waiting.deliver(
                [Event(number, s, EventKind.FINISH, finish=finish) for s in sorted(waiting.open)],
            )


class Driven:
    """The part of a server's backend (`edgec.serving.backend.Backend`) that is its driver's."""

    _driver: Driver

    def submit(self, request: Request, deliver: Deliver) -> int:
        return self._driver.submit(request, deliver)

    def cancel(self, number: int) -> None:
        self._driver.cancel(number)

    @property
    def stats(self) -> Stats:
        return self._driver.stats

    @property
    def failure(self) -> str | None:
        return self._driver.failure


class _Waiting:
    def __init__(self, deliver: Deliver, n: int) -> None:
        self.deliver = deliver
        self.open = set(range(n))
