"""The document of a validation: what `edgec validate --json` prints, and `validation` in a build's document.

Its JSON Schema is published as docs/validation.schema.json. Fields may be added; none is renamed or removed within
`version` 1.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from edgec.report.parts import ErrorRecord, Part

FindingResult = Literal["pass", "fail", "unproven", "reported"]


class FindingRecord(Part):
    """One check's number, its limit and its verdict."""

    check: str
    value: float | int | None = Field(description="null when it was not measured, or is infinite")
    limit: float | int | None = Field(description="null when the number is only reported")
    least: bool = Field(False, description="the value must be at least the limit, not at most")
    verdict: FindingResult
    reference: str = Field("", description="which reference; empty where the engine is held against itself")
    required: bool = Field(False, description="`unproven` fails the validation")
    message: str = ""

    @property
    def holds(self) -> bool:
        return self.verdict != "fail" and not (self.verdict == "unproven" and self.required)

    def sentence(self) -> str:
        """For an error's one line."""
        against = f" against `{self.reference}`" if self.reference else ""
        if self.verdict == "unproven":
            return f"{self.check}{against} is unproven: {self.message}"
        sign = "at least" if self.least else "at most"
        number = "beyond measure" if self.value is None else f"{self.value:.4g}"
        limit = "" if self.limit is None else f", and may be {sign} {self.limit:.4g}"
        return f"{self.check}{against} is {number}{limit} ({self.message})"


class ValidatedTarget(Part):
    """One engine of the bundle."""

    label: str = Field("", description="the engine, for people")
    library: str = Field("", description="where the native engine's library came from")
    tokens: int = Field(0, description="tokens of text that were scored")
    findings: list[FindingRecord] = Field(default_factory=list)
    diagnosis: list[str] = Field(default_factory=list, description="which way the failures point")
    seconds: float = 0.0

    @property
    def broken(self) -> list[FindingRecord]:
        return [f for f in self.findings if not f.holds]


class Validation(Part):
    """Every engine that was asked for."""

    version: Literal[1] = 1
    status: Literal["valid", "failed"] = "valid"
    exit_code: int = 0
    bundle: str = Field("", description="as given on the command line")
    name: str = Field("", description="the recipe's name")
    references: dict[str, str] = Field(default_factory=dict, description="each reference's short name, and what it is")
    text: str = Field("", description="where the text came from")
    targets: dict[str, ValidatedTarget] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)
    seconds: float = 0.0
    error: ErrorRecord | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data; `error` is left out where there is none."""
        data = self.model_dump(mode="json")
        if self.error is None:
            del data["error"]
        return data


def schema() -> dict[str, Any]:
    """JSON Schema of the document, as published."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Validation.model_json_schema(mode="serialization"),
    }
