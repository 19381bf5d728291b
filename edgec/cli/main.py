"""The `edgec` command: its commands, and the one place where an exception becomes an exit code."""

from __future__ import annotations

import sys
import traceback
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from edgec import __version__
from edgec.cli.out import out
from edgec.errors import EdgecError, ExitCode, Reason, UsageError

app = typer.Typer(
    name="edgec",
    help="Build a PyTorch or Hugging Face checkpoint for phones and NPUs, and prove what was built.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# In the order of --help. Each is edgec/cli/<name>.py with a function `<name>`.
COMMANDS = (
    "build",
    "plan",
    "run",
    "bench",
    "serve",
    "reference",
    "validate",
    "simulate",
    "inspect",
    "diff",
    "doctor",
    "schema",
    "init",
    "cache",
)
for _name in COMMANDS:
    app.command(_name)(getattr(import_module(f"edgec.cli.{_name}"), _name))


def _version(value: bool) -> None:
    if value:
        print(f"edgec {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Options of every command."""
    out.debug = debug


def main() -> None:
    """Run a command; every failure ends as one line on stderr and its exit code."""
    try:
        code = app(standalone_mode=False)
        if code == ExitCode.INTERRUPTED:  # what typer makes of Ctrl-C
            print(f"edgec: {out.interrupted}", file=sys.stderr)
        sys.exit(code)
    except EdgecError as error:
        _fail(error)
    except TyperException as error:
        out.json = "--json" in sys.argv[1:]  # the command that would have said so has not run
        _fail(_usage(error))
    except Exception as error:  # noqa: BLE001 - whatever gets here is a bug, and exit code 1 says so
        bug = EdgecError(f"{type(error).__name__}: {error}", reason=Reason.BUG)
        bug.exit_code = ExitCode.BUG
        bug.hint = "this is a bug in edgec; --debug shows where. Please report it with the recipe."
        _fail(bug)


def _usage(error: Any) -> UsageError:
    """What typer says about the command line, in one line."""
    from edgec.registry import suggest

    context = getattr(error, "ctx", None)
    command = context.command_path if context else "edgec"
    if not sys.argv[1:]:  # the exception has shown the help when it was made
        return UsageError("a command is needed", hint="`edgec build --help` explains one")
    text = error.format_message().strip().rstrip(".")
    if hasattr(error, "possibilities") and hasattr(error, "option_name"):
        text = f"no such option `{error.option_name}`{suggest(error.option_name, error.possibilities or ())}"
    return UsageError(" ".join(text.split()), hint=f"`{command} --help` says what there is")


def _fail(error: EdgecError) -> None:
    if out.debug:
        traceback.print_exc()
    out.error(error)
    out.document({"status": "failed", "exit_code": int(error.exit_code), "error": error.to_dict()})
    sys.exit(int(error.exit_code))
