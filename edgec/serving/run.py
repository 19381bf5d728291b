"""Runs the application under uvicorn, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from edgec.errors import UsageError
from edgec.serving.app import Server
from edgec.serving.limits import Limits

_SWITCH = 0.0005  # seconds; the engine's thread wants Python's lock back for a moment after each step


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        UsageError: the address can't be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except (OSError, OverflowError) as error:
        raise UsageError(f"can't listen on {host}, port {port}: {error}", hint="choose another --port") from error
    made.set_inheritable(False)
    return made


def address(listening: socket.socket) -> str:
    """Where a client finds it."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    app: Starlette,
    listening: socket.socket,
    *,
    limits: Limits,
    grace: float,
    access_log: bool = False,
    ready: Callable[[], None] | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; then take no more requests, and give those that run `grace` seconds.

    A second signal ends at once. `ready` is called when requests are taken.
    """
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="on",
        log_level="info" if access_log else "warning",
        access_log=access_log,
        server_header=False,
        h11_max_incomplete_event_size=limits.header_bytes,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=max(1, round(grace) + 2),  # the answers are ended by then; see _Server
    )
    sys.setswitchinterval(_SWITCH)
    asyncio.run(_Server(config, app.state.server, grace, ready).serve(sockets=[listening]))


class _Server(uvicorn.Server):
    """uvicorn's, but running answers are ended with an error that clients can read, and a signal is a success."""

    def __init__(self, config: uvicorn.Config, ours: Server, grace: float, ready: Callable[[], None] | None) -> None:
        super().__init__(config)
        self._ours = ours
        self._grace = grace
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._ready is not None:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ours.drain()
        ending = asyncio.get_running_loop().call_later(self._grace, self._ours.cancel_all)
        await super().shutdown(sockets)
        ending.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn raises the signal again when it has shut down; here a clean end is exit code 0."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self.should_exit:
            self._ours.cancel_all()
            self.force_exit = True
        self.should_exit = True
