"""Train the model on its task: for a teacher or a small model that isn't to be had ready-made.

It starts from the weights that it is given (a factory's own are drawn from the recipe's seed), so one recipe holds the
whole story, and the store keeps the result: the model is trained once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgec.registry import register_pass

from .training_options import TrainingOptions

if TYPE_CHECKING:
    from edgec.context import Context
    from edgec.model import Model


class TrainOptions(TrainingOptions):
    """How to train."""


@register_pass("train", distributed=True)
def train_model(model: Model, options: TrainOptions, context: Context) -> Model:
    from .training import require_float, train

    require_float(model, "train")
    history = train(model.module, model.task, context=context, **options.arguments())
    context.note(f"trained {options.epochs} epochs; mean loss {history.losses[0]:.3f} → {history.losses[-1]:.3f}")
    return model
