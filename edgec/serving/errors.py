"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`, with the status that clients act on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgec.errors import EdgecError, ExitCode, Reason

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """What a client is told.

    Args:
        status: the HTTP status.
        message: one line for people.
        param: the field of the request that is wrong.
        code: one word for programs.
        headers: further response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def to_dict(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def from_refusal(error: EdgecError, retry_after: int, param: str | None = None) -> ApiError:
    """An engine's refusal as an HTTP error. Why a bug happened is for the log, not for the client."""
    if error.reason is Reason.QUEUE_FULL:
        headers = {"Retry-After": str(retry_after)}
        return ApiError(429, error.message, code="rate_limit_exceeded", headers=headers)
    if error.reason is Reason.TOO_LONG:
        return ApiError(400, error.message, param=param, code="context_length_exceeded")
    if error.exit_code is ExitCode.USAGE:
        return ApiError(400, error.message, code=str(error.reason))
    return ApiError(503, "the engine can't take requests", code="engine_unavailable")
