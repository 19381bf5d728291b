"""What these tests run on: a tiny CNN with depthwise convolutions, BatchNorm, ReLU6; and a task for any module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from edgec.context import Context
from edgec.golden import Step
from edgec.model import Model, Signature, TensorSpec
from edgec.tasks.base import Task


def separable(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs, bias=False),
        nn.BatchNorm2d(inputs),
        nn.ReLU6(),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(),
    )


class TinyCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        stem = [nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU6()]
        self.features = nn.Sequential(*stem, separable(16, 32), separable(32, 32))
        self.head = nn.Linear(32, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(image).mean((2, 3)))  # (N, 4)


def tiny_cnn(seed: int = 0) -> TinyCNN:
    """With statistics and scales that differ by channel, as trained networks have them."""
    torch.manual_seed(seed)
    model = TinyCNN()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.5, 0.5)
            module.running_var.uniform_(0.3, 3.0)
            module.weight.data.uniform_(0.5, 2.0)
            module.bias.data.uniform_(-0.2, 0.5)
    return model.eval()


class TinyTask(Task):
    """Agreement with the float model's argmax on random images; trains on its own argmax as labels."""

    kind = "tiny"
    metric = "agreement"

    def __init__(
        self,
        signatures: tuple[Signature, ...] | None = None,
        *,
        shape: tuple[int, ...] = (1, 3, 16, 16),
        samples: int = 16,
        make: Callable[[torch.Generator], tuple[torch.Tensor, ...]] | None = None,
        batch: int = 16,
    ) -> None:
        image = TensorSpec("image", shape, "float32")
        self._signatures = signatures or (Signature("main", (image,), (TensorSpec("logits", (1, 4), "float32"),)),)
        self._make = make or (lambda g: (torch.randn(shape, generator=g),))
        self.samples = samples
        self.batch = batch
        self.teacher: nn.Module | None = None

    def data_references(self) -> list[tuple[str, str | None]]:
        return []

    def signatures(self, module: nn.Module) -> tuple[Signature, ...]:
        return self._signatures

    def inputs(self, seed: int) -> tuple[torch.Tensor, ...]:
        return self._make(torch.Generator().manual_seed(seed))

    def example(self, signature: Signature) -> tuple[torch.Tensor, ...]:
        return self.inputs(0)

    def bind(self, module: nn.Module, signature: Signature) -> nn.Module:
        return module

    def calibration(self) -> Iterator[tuple[torch.Tensor, ...]]:
        for i in range(self.samples):
            yield self.inputs(100 + i)

    def record(self) -> list[Step]:
        names = [t.name for t in self._signatures[0].inputs]
        steps = []
        for i in range(3):
            arrays = [t.numpy() for t in self.inputs(1000 + i)]
            steps.append(Step(self._signatures[0].name, dict(zip(names, arrays, strict=True))))
        return steps

    def evaluate(self, runner: Any, reference: Any, *, limit: int | None = None) -> dict[str, float]:
        signature = self._signatures[0]
        names, output = [t.name for t in signature.inputs], signature.outputs[0].name
        hits = []
        for i in range(min(limit or 64, 64)):
            arrays = [t.numpy() for t in self.inputs(5000 + i)]
            got = runner.run(signature.name, dict(zip(names, arrays, strict=True)))[output]
            want = reference[output][i] if reference else got[0]
            hits.append(float(got[0].argmax() == np.asarray(want).argmax()))
        return {self.metric: float(np.mean(hits))}

    def reference(self, runner: Any) -> dict[str, np.ndarray]:
        signature = self._signatures[0]
        names, output = [t.name for t in signature.inputs], signature.outputs[0].name
        rows = []
        for i in range(64):
            arrays = [t.numpy() for t in self.inputs(5000 + i)]
            rows.append(runner.run(signature.name, dict(zip(names, arrays, strict=True)))[output][0])
        return {output: np.stack(rows)}

    def training(self, epoch: int, *, rank: int = 0, world: int = 1) -> Iterator[tuple[Any, Any]]:
        teacher = self.teacher or tiny_cnn()
        for i in range(8):
            generator = torch.Generator().manual_seed(epoch * 1000 + i)
            images = torch.randn((self.batch, 3, 16, 16), generator=generator)
            with torch.no_grad():
                labels = teacher(images)
            yield images, labels

    def loss(self, outputs: Any, labels: Any) -> torch.Tensor:
        return nn.functional.mse_loss(outputs, labels)


def tiny_model(seed: int = 0, **options: Any) -> Model:
    return Model(tiny_cnn(seed), TinyTask(**options), {"factory": "tiny_cnn"})


def context(folder: Path) -> Context:
    out = folder / "out"
    out.mkdir(parents=True, exist_ok=True)
    return Context(seed=0, threads=1, work=folder / "work", recipe_dir=folder, cache=folder / "cache", out=out)
