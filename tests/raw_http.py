"""A server in a process of its own, and requests to it by hand: some are never read, some cut short, some wrong."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Served:
    """A running server."""

    process: subprocess.Popen[str]
    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def started(process: subprocess.Popen[str]) -> Served:
    """Wait for the line that says where it serves."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if found := re.fullmatch(r"serving on http://(.+):(\d+)\n", line):
            return Served(process, found[1], int(found[2]))
    raise AssertionError("it did not start: " + "".join(lines))


def send(served: Served, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
    """A request, of which nothing has been read yet."""
    return send_raw(served, json.dumps(body).encode(), path)


def send_raw(served: Served, raw: bytes, path: str = "/v1/completions", *, length: int | None = None) -> socket.socket:
    """Any bytes as a body, perhaps with a length that isn't theirs."""
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(raw) if length is None else length}",
    )
    connection = socket.create_connection((served.host, served.port), timeout=60)
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + raw)
    return connection


def read_until(connection: socket.socket, what: bytes) -> bytes:
    seen = b""
    while what not in seen:
        piece = connection.recv(65536)
        if not piece:
            raise AssertionError(f"closed after {seen!r}")
        seen += piece
    return seen


def read_all(connection: socket.socket) -> bytes:
    seen = b""
    while piece := connection.recv(65536):
        seen += piece
    return seen


def metrics(served: Served) -> dict[str, float]:
    with urllib.request.urlopen(f"{served.url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def wait_for(served: Served, condition: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """The metrics, when they are as wanted; a server on which that never happens is ended by the test's timeout."""
    while not condition(found := metrics(served)):
        time.sleep(0.01)
    return found
