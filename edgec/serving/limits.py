"""What the server lets in: sizes, keys, host names, content types."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from dataclasses import dataclass, field

from starlette.requests import ClientDisconnect, Request

from edgec.serving.errors import ApiError


@dataclass(frozen=True)
class Limits:
    """How much one client may ask for."""

    body_bytes: int = 4 << 20
    body_seconds: float = 30.0
    """A body must be there whole in this time."""
    header_bytes: int = 16 << 10
    prompts: int = 64
    """Prompts in one call to /v1/completions."""
    sequences: int = 64
    """Answers in one call: prompts times `n`."""
    max_tokens: int | None = None
    """Tokens of one answer; None: what the context has room for."""
    api_key: str | None = field(default=None, repr=False)
    hosts: frozenset[str] | None = None
    """Names by which the server may be called; None: any. See `loopback_hosts`."""


def loopback_hosts(bind: str, also: tuple[str, ...] = ()) -> frozenset[str] | None:
    """The names to accept when bound to `bind`: on a loopback address only its own, and those that were given.

    A page in the user's browser can have its own name resolve to 127.0.0.1 (DNS rebinding) and then talk to a server
    that takes any Host. Bound to a public address the server is meant to be found, by whatever name.
    """
    try:
        loopback = ipaddress.ip_address(bind).is_loopback
    except ValueError:
        loopback = bind == "localhost"
    if not loopback:
        return frozenset(also) or None
    return frozenset({"localhost", "127.0.0.1", "::1", bind, *also})


def check_host(request: Request, limits: Limits) -> None:
    if limits.hosts is None:
        return
    host = request.headers.get("host", "")
    name = host[1:].partition("]")[0] if host.startswith("[") else host.rpartition(":")[0] or host
    if name.lower() not in limits.hosts:
        raise ApiError(403, "this server is not called by that name; allow it with --allow-host", code="wrong_host")


def check_key(request: Request, limits: Limits) -> None:
    if limits.api_key is None:
        return
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), limits.api_key.encode()):
        headers = {"WWW-Authenticate": "Bearer"}
        raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key", headers=headers)


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body, when it is JSON by its content type, and not too long.

    The content type matters: a browser sends `text/plain` to other origins without asking first.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the body's content type must be application/json")
    too_long = ApiError(413, f"the body has more than {limits.body_bytes} bytes", code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length[:20]) > limits.body_bytes:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for piece in request.stream():
                body += piece
                if len(body) > limits.body_bytes:
                    raise too_long
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive in {limits.body_seconds:g} s") from error
    except ClientDisconnect as error:
        raise ApiError(400, "the client left") from error
    return bytes(body)
