"""How to train, as recipes say it: the options shared by train, distill and fine-tuning."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from edgec.registry import Options


class TrainingOptions(Options):
    """A training run."""

    epochs: int = Field(5, ge=1, description="passes over the training data")
    lr: float = Field(2e-3, gt=0, description="the greatest learning rate")
    optimizer: Literal["adamw", "sgd"] = Field("adamw", description="sgd is with Nesterov momentum of 0.9")
    weight_decay: float = Field(1e-4, ge=0, description="of weights; biases and norms don't decay")
    schedule: Literal["cosine", "constant"] = Field("cosine", description="the learning rate after the warm-up")
    warmup: float = Field(0.05, ge=0, lt=1, description="share of the steps over which the learning rate rises")
    clip: float | None = Field(None, gt=0, description="the greatest norm of the gradients")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="of the forward pass; bfloat16 is faster where the processor has it, else far slower"
    )
    checkpoint_every: int = Field(200, ge=1, description="steps between checkpoints that a killed build resumes from")

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `training.train`."""
        return {name: getattr(self, name) for name in TrainingOptions.model_fields}
