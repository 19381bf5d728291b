"""What the core refuses or fails at, as an `EdgecError`: its status becomes a reason, an exit code and a hint."""

from __future__ import annotations

from edgec.errors import EdgecError, ExitCode, Reason
from edgec.runtime.abi import Status

_KINDS: dict[Status, tuple[ExitCode, Reason, str]] = {
    Status.INVALID_ARGUMENT: (ExitCode.USAGE, Reason.BAD_OPTION, ""),
    Status.NOT_FOUND: (ExitCode.USAGE, Reason.SOURCE_NOT_FOUND, ""),
    Status.CORRUPT: (ExitCode.USAGE, Reason.BAD_CHECKPOINT, "build the bundle again, or copy it again"),
    Status.UNSUPPORTED: (ExitCode.USAGE, Reason.UNSUPPORTED_MODEL, ""),
    Status.VERSION_MISMATCH: (ExitCode.TOOL_MISSING, Reason.VERSION_MISMATCH, "build the bundle again with this edgec"),
    Status.OVER_BUDGET: (
        ExitCode.USAGE,
        Reason.OUT_OF_MEMORY,
        "allow more memory, or ask for less: a shorter context, a smaller batch, keys and values in INT8",
    ),
    Status.QUEUE_FULL: (ExitCode.USAGE, Reason.QUEUE_FULL, "try again when some requests have finished"),
    Status.TOO_LONG: (ExitCode.USAGE, Reason.TOO_LONG, "shorten the prompt, or ask for fewer tokens"),
    Status.IO: (ExitCode.USAGE, Reason.SOURCE_NOT_FOUND, ""),
}


class EngineError(EdgecError):
    """The core said no.

    Args:
        status: what kind of no; fixes the exit code, the reason and, unless one is given, the hint.
        message: the core's own line.
    """

    def __init__(self, status: Status, message: str, *, hint: str = "") -> None:
        bug = (ExitCode.BUG, Reason.BUG, "this is a bug in edgec's runtime; please report it")
        exit_code, reason, usual = _KINDS.get(status, bug)
        super().__init__(message, hint=hint or usual, reason=reason)
        self.status = status
        self.exit_code = exit_code


def status_of(number: int) -> Status:
    """The status of a number that the core returned; one that this binding does not know is a bug."""
    try:
        return Status(number)
    except ValueError:
        return Status.INTERNAL
