"""Multiplies every weight by a factor."""

from __future__ import annotations

from pydantic import Field

from edgec.context import Context
from edgec.model import Model
from edgec.registry import Options, register_pass


class ScaleOptions(Options):
    """By how much."""

    factor: float = Field(1.0, gt=0, description="what weights are multiplied by; 1 leaves the model as it is")


@register_pass("scale")
def scale(model: Model, options: ScaleOptions, context: Context) -> Model:
    if options.factor == 1.0:
        context.unchanged("a factor of 1 changes nothing")
        return model
    for parameter in model.module.parameters():
        parameter.data.mul_(options.factor)
    return model
