"""Validation: an engine's answers against a reference that was written apart from it.

With this section a build ends with the stage `validate`, which is what `edgec validate` does to a finished bundle: the
text's log-probabilities, greedy and sampled answers, and the ways through the scheduler. A finding beyond its limit is
a failure of parity (exit code 6); one of `require` that could not be had fails the build as unproven (3).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from edgec.registry import Options
from edgec.tasks.text import TextOptions

CheckName = Literal[
    "weights",
    "kl",
    "kl_p99",
    "top1",
    "perplexity",
    "greedy",
    "draws",
    "sampled",
    "distribution",
    "requests",
    "batching",
    "chunking",
    "prefix_cache",
    "preemption",
]
TargetName = Literal["native", "onnxruntime", "tflite", "tvm"]


class ValidateLimits(Options):
    """What may lie between an engine and the reference with the same weights. `null`: the target's default."""

    kl: float | None = Field(None, gt=0, description="mean KL(reference ‖ engine), nats a token")
    kl_p99: float | None = Field(None, gt=0, description="its 99th percentile over tokens")
    top1: float | None = Field(None, ge=0, le=1, description="least share of tokens with the same likeliest successor")


class ValidateOptions(Options):
    """What is compared, and on how much text."""

    targets: list[TargetName] = Field(default=["native"], min_length=1, description="engines to validate")
    tokens: int = Field(5000, ge=1, description="tokens of text that are scored, at least, where the text has them")
    window: int = Field(512, ge=8, description="positions of a text's piece; at most what an engine's context holds")
    prompts: int = Field(8, ge=1, le=64, description="prompts for greedy and sampled answers, cut out of the text")
    answer: int = Field(48, ge=2, le=4096, description="tokens of an answer")
    samples: int = Field(64, ge=0, le=4096, description="tokens drawn after each prompt for the test of distributions")
    float_reference: bool = Field(True, description="also report the distance from the float weights")
    text: TextOptions | None = Field(None, description="another text than the task's `evaluation`")
    limits: dict[TargetName, ValidateLimits] = Field(default_factory=dict, description="limits by target")
    require: list[CheckName] = Field(default_factory=list, description="checks that must not end as unproven")

    def references(self) -> list[tuple[str, str | None]]:
        return [] if self.text is None else [(self.text.source, self.text.sha256)]

    def limits_of(self, target: str) -> Limits:
        """The limits for a target: the recipe's, and the defaults where it gives none."""
        own: dict[str, float] = {}
        for name, given in self.limits.items():
            if name == target:
                own = given.model_dump(exclude_none=True)
        return Limits(**{**DEFAULTS.get(target, EXACT), **own})


class Limits(Options):
    """`ValidateLimits` with every number in place."""

    kl: float
    kl_p99: float
    top1: float


# Native: the reference has the engine's own arithmetic to the last bit (edgec/reference/exact.py), so nothing is left
# but faults. TVM computes the Program as it is. ONNX Runtime and LiteRT round activations where the Program doesn't:
# their limits are those of recipes/smollm2-135m.yaml against the float model.
EXACT: dict[str, float] = {"kl": 1e-3, "kl_p99": 1e-2, "top1": 0.995}
DEFAULTS: dict[str, dict[str, float]] = {
    "native": EXACT,
    "tvm": EXACT,
    "onnxruntime": {"kl": 0.02, "kl_p99": 0.2, "top1": 0.92},
    "tflite": {"kl": 0.03, "kl_p99": 0.3, "top1": 0.90},
}
