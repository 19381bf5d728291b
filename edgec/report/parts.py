"""What the documents of builds and validations have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Part(BaseModel):
    """Base of every part: unknown fields are errors, and NaN is, since JSON has none."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class ErrorRecord(Part):
    """Why a build or a validation failed."""

    code: int = Field(description="the exit code; see docs/exit-codes.md")
    reason: str = Field(description="a machine-readable word; see docs/exit-codes.md")
    message: str
    hint: str = ""
