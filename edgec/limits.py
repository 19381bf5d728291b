"""What a limit looks like in a recipe: sizes, ratios and counts for all targets or one, a drop, parity's measures."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema, model_serializer

from edgec.registry import Options
from edgec.units import parse_bytes

ALL = "all"  # the key that stands for every target


def _spread(value: Any) -> Any:
    """A bare value counts for every target."""
    return value if isinstance(value, dict) else {ALL: value}


def _per_target(item: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [item, {"type": "object", "additionalProperties": item}]})


Size = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
Ratio = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
_SIZE = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "examples": ["3 MB", "2.5 MiB"]}]}
SizePerTarget = Annotated[dict[str, Size], BeforeValidator(_spread), _per_target(_SIZE)]
RatioPerTarget = Annotated[
    dict[str, Ratio], BeforeValidator(_spread), _per_target({"type": "number", "exclusiveMinimum": 0})
]
CountPerTarget = Annotated[dict[str, Count], BeforeValidator(_spread), _per_target({"type": "integer", "minimum": 0})]


def samples_of(target: str, counts: dict[str, int]) -> int:
    """How many samples a target is evaluated on; none when neither it nor `all` is named."""
    return counts.get(target, counts.get(ALL, 0))


class Drop(Options):
    """How much worse a metric may get: in its own units, or as a share of the source's value."""

    amount: float = Field(ge=0)
    relative: bool = False

    def limit(self, source: float) -> float:
        """The allowed drop in the metric's units."""
        return self.amount * abs(source) if self.relative else self.amount

    def __str__(self) -> str:
        return f"{self.amount * 100:.4g} %" if self.relative else f"{self.amount:.4g}"

    @model_serializer
    def _as_written(self) -> float | str:
        """As recipes write it, so that a resolved recipe is a recipe."""
        return f"{self.amount * 100:.12g} %" if self.relative else self.amount


def _parse_drop(value: Any) -> Any:
    if isinstance(value, str):
        number = value.strip().removesuffix("%").strip()
        try:
            amount = float(number)
        except ValueError:
            raise ValueError(f"not a drop: {value!r}; write `0.015` (the metric's units) or `2 %`") from None
        return {"amount": amount / 100, "relative": True} if value.strip().endswith("%") else {"amount": amount}
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"amount": value}
    return value


DropLimit = Annotated[
    Drop,
    BeforeValidator(_parse_drop),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "examples": ["2 %"]}]}),
]


class ParityLimits(Options):
    """Limits on an artefact's difference from the golden; each is optional."""

    cosine: float | None = Field(None, ge=-1, le=1, description="least cosine similarity of any output")
    sqnr_db: float | None = Field(None, description="least signal to quantisation noise of any output, dB")
    relative_error: float | None = Field(None, ge=0, description="greatest error over the output's greatest value")
    off_by_n: int | None = Field(None, ge=0, description="greatest error in quantisation steps")


class ParityGate(ParityLimits):
    """Limits for every target, and for single targets in their place."""

    # Where these come from: a converter that is right differs by rounding (cosine 1 − 1e-6), one whose INT8 kernels
    # saturate by about a tenth of the scale (cosine 0.99), one that is wrong by all of it.
    cosine: float | None = Field(0.98, ge=-1, le=1, description="least cosine similarity of any output")
    targets: dict[str, ParityLimits] = Field(
        default_factory=dict, description="limits of single targets; what they leave out is taken from above"
    )

    def limits(self, target: str) -> dict[str, float]:
        """Measure → limit for one target."""
        own = self.targets.get(target)
        found = {}
        for measure in ParityLimits.model_fields:
            value = getattr(self, measure)
            if own is not None and measure in own.model_fields_set:
                value = getattr(own, measure)
            if value is not None:
                found[measure] = value
        return found
