"""The contract between a task and everything else.

A task declares its data and its preprocessing once; calibration, training, evaluation and the recorded inputs of the
golden all draw from it, so they can't disagree (the cause of "0.1 % accuracy after calibration" reports elsewhere).
Evaluation goes through a `Runner`, so the same code measures a torch module, the golden and an artefact on its engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import numpy as np
    import torch

    from edgec.golden import Step
    from edgec.model import Runner, Signature

Arrays = dict[str, "np.ndarray"]


@dataclass(frozen=True)
class TaskContext:
    """Where a task finds its data: relative paths from `recipe_dir`, downloads in `cache`.

    `model_dir` is where the source stage left files that belong to the model (tokenizer.json).
    """

    recipe_dir: Path
    cache: Path
    seed: int
    model_dir: Path | None = None


class Task(ABC):
    """Subclasses are registered with `@register_task(kind)`; their `__init__` takes `(options, context)`.

    Construction is cheap and touches no data; data is fetched on first use.
    """

    kind: ClassVar[str]
    metric: str
    """Name of the primary metric among those `evaluate` returns; may depend on the options."""
    higher_is_better: ClassVar[bool] = True

    @abstractmethod
    def data_references(self) -> list[tuple[str, str | None]]:
        """`(reference, sha256 or None)` of all data, as `edgec.sources.fetch` takes them: part of the cache key."""

    @abstractmethod
    def signatures(self, module: torch.nn.Module) -> tuple[Signature, ...]:
        """What to export; the first is the one that single-signature stages (PTQ) use."""

    @abstractmethod
    def example(self, signature: Signature) -> tuple[torch.Tensor, ...]:
        """Example inputs for tracing, positional, in the Signature's order."""

    @abstractmethod
    def bind(self, module: torch.nn.Module, signature: Signature) -> torch.nn.Module:
        """The module whose forward is this signature: `module` itself for most tasks."""

    def companions(self, module: torch.nn.Module) -> dict[str, bytes]:
        """Files that an on-device runtime needs beside the graphs, by name; the export puts them into the program."""
        return {}

    @abstractmethod
    def calibration(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Inputs of the first signature, one batch at a time, preprocessed as in evaluation."""

    @abstractmethod
    def record(self) -> list[Step]:
        """Real inputs, as consecutive steps without outputs, which the golden and each artefact are run on."""

    @abstractmethod
    def evaluate(self, runner: Runner, reference: Arrays | None, *, limit: int | None = None) -> dict[str, float]:
        """Metrics over the evaluation data (its first `limit` samples), `metric` among them.

        `reference` is what `reference()` gave for the source model; None when there is none. State (KV pools) is the
        runner's own business here: it is stateful, or wrapped by `golden.carrying`.
        """

    def reference(self, runner: Runner) -> Arrays:
        """What later evaluations compare with (the float model's outputs); empty when the task needs nothing."""
        return {}

    def training(self, epoch: int, *, rank: int = 0, world: int = 1) -> Iterator[tuple[Any, Any]]:
        """`(inputs, labels)` batches of one epoch, in an order fixed by the seed and the epoch, sharded by rank."""
        raise _no_training(self.kind)

    def training_batches(self, *, world: int = 1) -> int:
        """How many batches `training` gives: the same in each epoch and on each rank."""
        return sum(1 for _ in self.training(0, world=world))

    def loss(self, outputs: Any, labels: Any) -> torch.Tensor:
        """The task's own loss, a scalar."""
        raise _no_training(self.kind)


def _no_training(kind: str) -> Exception:
    from edgec.errors import RecipeError

    return RecipeError(
        f"task `{kind}` has no training data, so a pass that trains can't run on it",
        hint="give the task a `train:` data set, or remove distill, and fine-tuning from prune and quantize",
    )
