"""Everything that can go wrong for a user, as one hierarchy.

An error says what happened (`message`), where (inside the message, `file:line:column` when there is one) and what to do
(`hint`). Its class fixes the exit code; `reason` is a machine-readable word from `Reason`, each documented in
docs/exit-codes.md. Anything that reaches the command line and is *not* an `EdgecError` is a bug in edgec (exit code 1).
"""

from __future__ import annotations

from enum import IntEnum, StrEnum


class ExitCode(IntEnum):
    """What the process tells the shell. CI scripts rely on these numbers: never renumber them."""

    OK = 0
    BUG = 1
    USAGE = 2
    GATE_FAILED = 3
    TOOL_MISSING = 4
    CONVERSION_FAILED = 5
    PARITY_FAILED = 6
    INTERRUPTED = 130


class Reason(StrEnum):
    """Why, in one word, for machines. `docs/exit-codes.md` has a line for each."""

    BUG = "bug"
    BAD_RECIPE = "bad-recipe"
    BAD_OPTION = "bad-option"
    SOURCE_NOT_FOUND = "source-not-found"
    DIGEST_MISMATCH = "digest-mismatch"
    BAD_CHECKPOINT = "bad-checkpoint"
    UNSAFE_FILE = "unsafe-file"
    NOT_FINITE = "not-finite"
    EMPTY_DATA = "empty-data"
    BAD_DATA = "bad-data"
    EXTREME_CONSTANT = "extreme-constant"
    TOOL_MISSING = "tool-missing"
    UNSUPPORTED_OP = "unsupported-op"
    UNSUPPORTED_SCHEME = "unsupported-scheme"
    EXPORT_FAILED = "export-failed"
    CONVERTER_FAILED = "converter-failed"
    CONVERTER_CRASHED = "converter-crashed"
    OUT_OF_MEMORY = "out-of-memory"
    EMPTY_OUTPUT = "empty-output"
    INVARIANT_BROKEN = "invariant-broken"
    PARITY = "parity"
    GATE = "gate"
    UNPROVEN = "unproven"
    STORE = "store"
    DISK_FULL = "disk-full"
    NOT_REPRODUCIBLE = "not-reproducible"
    VERSION_MISMATCH = "version-mismatch"
    UNSUPPORTED_MODEL = "unsupported-model"
    TOO_LONG = "too-long"
    QUEUE_FULL = "queue-full"
    INTERRUPTED = "interrupted"


class EdgecError(Exception):
    """Base of all errors that are meant for people.

    Args:
        message: what happened and where, one line.
        hint: what to do about it, one line; may be empty.
        reason: the machine-readable reason.
    """

    exit_code: ExitCode = ExitCode.USAGE
    default_reason: Reason = Reason.BAD_OPTION

    def __init__(self, message: str, *, hint: str = "", reason: Reason | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.reason = reason or self.default_reason

    def to_dict(self) -> dict[str, str | int]:
        """The `error` object of `build --json`."""
        return {
            "code": int(self.exit_code),
            "reason": str(self.reason),
            "message": self.message,
            "hint": self.hint,
        }


class UsageError(EdgecError):
    """The command line is wrong."""


class RecipeError(EdgecError):
    """The recipe is wrong: a key, a value, or something it refers to."""

    default_reason = Reason.BAD_RECIPE


class SourceError(EdgecError):
    """A model or a data set can't be had, or isn't what the recipe says it is."""

    default_reason = Reason.SOURCE_NOT_FOUND


class StoreError(EdgecError):
    """The cache or the output folder can't be read or written."""

    default_reason = Reason.STORE


class ToolMissing(EdgecError):
    """A converter or a compiler that the recipe needs is not on this machine."""

    exit_code = ExitCode.TOOL_MISSING
    default_reason = Reason.TOOL_MISSING


class ConversionError(EdgecError):
    """A pass, an export or a target could not do its work."""

    exit_code = ExitCode.CONVERSION_FAILED
    default_reason = Reason.CONVERTER_FAILED


class ParityError(EdgecError):
    """An artefact does not compute what its model computes."""

    exit_code = ExitCode.PARITY_FAILED
    default_reason = Reason.PARITY


class GateFailed(EdgecError):
    """The build is there, but not good enough for the recipe's gates."""

    exit_code = ExitCode.GATE_FAILED
    default_reason = Reason.GATE


_CLASSES: dict[int, type[EdgecError]] = {
    ExitCode.USAGE: EdgecError,
    ExitCode.GATE_FAILED: GateFailed,
    ExitCode.TOOL_MISSING: ToolMissing,
    ExitCode.CONVERSION_FAILED: ConversionError,
    ExitCode.PARITY_FAILED: ParityError,
}


def from_dict(error: dict[str, str | int]) -> EdgecError:
    """Rebuild the error that a worker process reported (the inverse of `EdgecError.to_dict`)."""
    cls = _CLASSES.get(int(error["code"]), ConversionError)
    return cls(str(error["message"]), hint=str(error["hint"]), reason=Reason(str(error["reason"])))
