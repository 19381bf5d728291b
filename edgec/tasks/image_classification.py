"""Task `image-classification`: images in, logits out.

With labels the metric is top-1 accuracy. Without labels (photographs are easily had, labelled ones are not) it is the
share of images on which the model's first choice is the float source's, with the mean cosine of the logits beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field, model_validator

from edgec.errors import Reason, RecipeError, SourceError
from edgec.golden import Step, TorchRunner
from edgec.model import Signature, TensorSpec
from edgec.registry import Options, register_task
from edgec.tasks.base import Arrays, Task, TaskContext
from edgec.tasks.images import ImageSet, ImageSetOptions, Preprocessing, load_images

if TYPE_CHECKING:
    import torch

    from edgec.model import Runner

# A torch module is evaluated on so many images and numbers at once: more leave the processor's cache and get slower.
FAST_BATCH, FAST_NUMBERS = 250, 2**20


class AugmentOptions(Options):
    """Random changes to training images, drawn from the seed and the epoch."""

    shift: int = Field(0, ge=0, description="shift by up to so many pixels each way, filling with zeros")
    flip: bool = Field(False, description="mirror half of the images left to right")


class TrainOptions(ImageSetOptions):
    """Training images; labels are needed."""

    batch: int = Field(128, ge=1, description="images per step, on each process")
    augment: AugmentOptions = Field(default_factory=AugmentOptions, description="random changes")


class CalibrationOptions(ImageSetOptions):
    """Calibration images; labels are not used."""

    samples: int | None = Field(256, ge=1, description="use only the first so many; null for all")


class ImageClassificationOptions(Options):
    """Data, and the one preprocessing for all of it."""

    classes: int = Field(ge=2, description="number of logits")
    preprocessing: Preprocessing = Field(description="from pixels to the model's input")
    evaluation: ImageSetOptions = Field(description="images that the metric is measured on")
    calibration: CalibrationOptions | None = Field(
        None, description="images that calibrate quantisation; the training images when not given"
    )
    train: TrainOptions | None = Field(None, description="images for passes that train")
    max_batch: int = Field(1, ge=1, description="above 1 the exported batch is dynamic, from 1 to this")

    @model_validator(mode="after")
    def _can_train(self) -> ImageClassificationOptions:
        if self.train is not None and self.train.labels is None:
            raise ValueError("`train` needs `labels`")
        if self.calibration is None and self.train is None:
            raise ValueError("`calibration` or `train` is needed")
        return self


@register_task("image-classification")
class ImageClassificationTask(Task):
    """Signature `main`: `image` (batch, C, H, W) float32 → `logits` (batch, classes) float32."""

    kind = "image-classification"
    metric = "top1"

    def __init__(self, options: ImageClassificationOptions, context: TaskContext) -> None:
        self.options = options
        self.context = context
        self.metric = "top1" if options.evaluation.labels is not None else "agreement"
        self._sets: dict[str, ImageSet] = {}

    def data_references(self) -> list[tuple[str, str | None]]:
        o = self.options
        sets = [s for s in (o.evaluation, o.calibration, o.train) if s is not None]
        files = [f for s in sets for f in (*s.images, *([s.labels] if s.labels else []))]
        return list(dict.fromkeys((f.source, f.sha256) for f in files))

    def signatures(self, module: torch.nn.Module) -> tuple[Signature, ...]:
        many = self.options.max_batch > 1
        batch = "batch" if many else 1
        pre = self.options.preprocessing
        return (
            Signature(
                name="main",
                inputs=(TensorSpec("image", (batch, pre.channels, *pre.size), "float32"),),
                outputs=(TensorSpec("logits", (batch, self.options.classes), "float32"),),
                dynamic=(("batch", 1, self.options.max_batch),) if many else (),
            ),
        )

    def example(self, signature: Signature) -> tuple[torch.Tensor, ...]:
        import torch

        count = min(2, self.options.max_batch)  # a batch of 1 would be taken for a constant where it is dynamic
        pixels = self._set("evaluation").pixels
        return (torch.from_numpy(self._normalise(np.resize(pixels[:count], (count, *pixels.shape[1:])))),)

    def bind(self, module: torch.nn.Module, signature: Signature) -> torch.nn.Module:
        return module

    def calibration(self) -> Iterator[tuple[torch.Tensor, ...]]:
        import torch

        data = self._set("calibration" if self.options.calibration else "train")
        for image in data.pixels[:256] if self.options.calibration is None else data.pixels:
            yield (torch.from_numpy(self._normalise(image[None])),)

    def record(self) -> list[Step]:
        pixels = self._set("evaluation").pixels
        return [Step("main", {"image": self._normalise(image[None])}) for image in pixels[:4]]

    def reference(self, runner: Runner) -> Arrays:
        if self.metric == "top1":
            return {}
        return {"logits": self._logits(runner, len(self._set("evaluation").pixels))}

    def evaluate(self, runner: Runner, reference: Arrays | None, *, limit: int | None = None) -> dict[str, float]:
        data = self._set("evaluation")
        count = min(limit or len(data.pixels), len(data.pixels))
        logits = self._logits(runner, count)  # (count, classes)
        if data.labels is not None:
            return {"top1": float((logits.argmax(1) == data.labels[:count]).mean())}
        from edgec.parity import cosine

        wanted = logits if not reference else reference["logits"][:count]
        same = float((logits.argmax(1) == wanted.argmax(1)).mean())
        near = np.mean(
            [cosine(a.astype(np.float64), b.astype(np.float64)) for a, b in zip(logits, wanted, strict=True)]
        )
        return {"agreement": same, "cosine": float(near)}

    def training_batches(self, *, world: int = 1) -> int:
        count = len(self._set("train").pixels)
        return max(1, count // (self._batch(count, world) * world))

    def training(self, epoch: int, *, rank: int = 0, world: int = 1) -> Iterator[tuple[Any, Any]]:
        import torch

        data = self._set("train")
        assert data.labels is not None and self.options.train is not None
        order = np.random.default_rng((self.context.seed, epoch)).permutation(len(data.pixels))
        size = self._batch(len(order), world)
        for i in range(self.training_batches(world=world)):
            start = (i * world + rank) * size
            index = order[start : start + size]
            random = np.random.default_rng((self.context.seed, epoch, i, rank))
            pixels = _augment(data.pixels[index], self.options.train.augment, random)
            yield torch.from_numpy(self._normalise(pixels)), torch.from_numpy(data.labels[index])

    def loss(self, outputs: Any, labels: Any) -> torch.Tensor:
        import torch

        return torch.nn.functional.cross_entropy(outputs, labels)

    def _batch(self, count: int, world: int) -> int:
        assert self.options.train is not None
        if count < world:
            raise SourceError(f"{count} training images for {world} processes", reason=Reason.EMPTY_DATA)
        return min(self.options.train.batch, count // world)

    def _set(self, use: str) -> ImageSet:
        """The images of one use, read once."""
        if use not in self._sets:
            options = getattr(self.options, use)
            if options is None:
                list(super().training(0))  # says that the task has no training data
            self._sets[use] = load_images(options, self.options.preprocessing, self.options.classes, self.context)
        return self._sets[use]

    def _normalise(self, pixels: np.ndarray) -> np.ndarray:
        return self.options.preprocessing.normalise(pixels)

    def _logits(self, runner: Runner, count: int) -> np.ndarray:
        """(count, classes), over the first images of the evaluation set."""
        pixels = self._set("evaluation").pixels
        fast = max(1, min(FAST_BATCH, FAST_NUMBERS // max(1, pixels[0].size)))
        size = fast if _takes_any_batch(runner) else 1
        rows = [
            runner.run("main", {"image": self._normalise(pixels[i : min(i + size, count)])})["logits"]
            for i in range(0, count, size)
        ]
        logits: np.ndarray = np.concatenate(rows)
        if logits.shape != (count, self.options.classes):
            raise RecipeError(
                f"the model gives {logits.shape[1:]} numbers per image, the task has {self.options.classes} classes",
                hint="set `classes` to what the model gives",
            )
        return logits


def _takes_any_batch(runner: Runner) -> bool:
    """A plain torch module does, and a graph captured so; others and artefacts are made for their signature's batch."""
    from torch.fx import GraphModule

    from edgec.graphs import free_batch

    if not isinstance(runner, TorchRunner):
        return False
    return all(free_batch(m) for m in runner.modules.values() if isinstance(m, GraphModule))


def _augment(pixels: np.ndarray, options: AugmentOptions, random: np.random.Generator) -> np.ndarray:
    """(N, C, H, W) uint8 → the same shape, each image shifted and mirrored by its own draw."""
    count, _, height, width = pixels.shape
    if options.shift:
        s = options.shift
        padded = np.pad(pixels, ((0, 0), (0, 0), (s, s), (s, s)))
        top, left = random.integers(0, 2 * s + 1, (2, count))
        rows = top[:, None] + np.arange(height)  # (N, H)
        columns = left[:, None] + np.arange(width)  # (N, W)
        n = np.arange(count)[:, None, None]
        pixels = padded.transpose(0, 2, 3, 1)[n, rows[:, :, None], columns[:, None, :]].transpose(0, 3, 1, 2)
    if options.flip:
        flipped = np.asarray(random.random(count) < 0.5)
        pixels = np.where(flipped[:, None, None, None], pixels[..., ::-1], pixels)
    return pixels
