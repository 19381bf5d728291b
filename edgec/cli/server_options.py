"""How a model is served over HTTP: options, limits and the start that `serve` and `reference` share."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from edgec.cli.out import out

if TYPE_CHECKING:
    from edgec.serving.backend import Backend
    from edgec.serving.limits import Limits

_LIMITS = "Limits"

HostOption = Annotated[
    str, typer.Option("--host", help="Address to listen on. Others than this machine can't reach the default.")
]
PortOption = Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free one.")]
NameOption = Annotated[str | None, typer.Option("--name", help="The model's name in the API. [default: the recipe's]")]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar="EDGEC_API_KEY",
        show_envvar=True,
        help="Clients must send it. Other users of this machine see it on the command line: prefer the variable.",
    ),
]
AllowHostOption = Annotated[
    list[str] | None,
    typer.Option("--allow-host", help="Another name by which clients call this server; may be given again."),
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        min=1,
        help="Tokens of an answer at most. [default: what the context has room for]",
        rich_help_panel=_LIMITS,
    ),
]
MaxAnswersOption = Annotated[
    int, typer.Option("--max-answers", min=1, help="Prompts times `n` of one call.", rich_help_panel=_LIMITS)
]
MaxBodyOption = Annotated[
    str, typer.Option("--max-body", metavar="SIZE", help="Of a request.", rich_help_panel=_LIMITS)
]
MaxWaitingOption = Annotated[
    int,
    typer.Option(
        "--max-waiting",
        min=0,
        help="Requests that may wait, before 429; 0: the engine's default.",
        rich_help_panel=_LIMITS,
    ),
]
GraceOption = Annotated[
    float,
    typer.Option("--grace", min=0, help="Seconds that answers have to end, after SIGTERM.", rich_help_panel=_LIMITS),
]
AccessLogOption = Annotated[bool, typer.Option("--access-log", help="A line for each request, without its content.")]


@dataclass(frozen=True)
class Address:
    """Where to serve, to whom, and how much; the address is taken already."""

    listening: socket.socket
    limits: Limits
    public: bool
    """Whether other machines can reach it."""


def take_address(
    host: str,
    port: int,
    *,
    api_key: str | None,
    allow_host: list[str] | None,
    max_tokens: int | None,
    max_answers: int,
    max_body: str,
) -> Address:
    """Check what the command line says, and take the port, before a model is loaded for minutes.

    Raises:
        UsageError: a size that is none, or an address that can't be had.
    """
    from edgec.errors import UsageError
    from edgec.serving.limits import Limits, loopback_hosts
    from edgec.serving.run import listen
    from edgec.units import parse_bytes

    try:
        body = parse_bytes(max_body)
    except ValueError as error:
        raise UsageError(f"--max-body {max_body}: {error}") from error
    limits = Limits(
        body_bytes=body,
        sequences=max_answers,
        max_tokens=max_tokens,
        api_key=api_key or None,
        hosts=loopback_hosts(host, tuple(h.lower() for h in allow_host or ())),
    )
    return Address(listen(host, port), limits, loopback_hosts(host) is None)


def run_server(backend: Backend, where: Address, *, grace: float, access_log: bool, about: Callable[[], str]) -> None:
    """Serve until SIGTERM or Ctrl-C. `about` gives the line that is printed when requests are taken."""
    from edgec.serving.app import create_app
    from edgec.serving.run import address, serve

    if where.public and where.limits.api_key is None:
        host = where.listening.getsockname()[0]
        out.progress(f"anyone who reaches {host} can use this server: there is no --api-key")

    def ready() -> None:
        out.progress(about())
        out.progress(f"serving on {address(where.listening)}")

    serve(
        create_app(backend, where.limits),
        where.listening,
        limits=where.limits,
        grace=grace,
        access_log=access_log,
        ready=ready,
    )
