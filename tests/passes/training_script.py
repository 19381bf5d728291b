"""Runs one training or distillation on a tiny model and prints the digest of its weights; for tests with processes.

python training_script.py WORK [--distill] [--slow] [--seed N]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from edgec.passes.distill import DistillOptions, StudentOptions, distill
from edgec.passes.training import train
from torch import nn

from edgec.context import Context
from edgec.model import Model
from tests.passes.tiny import TinyTask, tiny_cnn

STUDENT = """
from torch import nn

def student() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )
"""


class ShardedTask(TinyTask):
    """Sixteen batches an epoch, dealt to the ranks in turns; `pause` seconds before each."""

    pause = 0.0

    def training(self, epoch: int, *, rank: int = 0, world: int = 1) -> Iterator[tuple[Any, Any]]:
        teacher = tiny_cnn(1)
        for i in range(rank, 16, world):
            time.sleep(self.pause)
            images = torch.randn((8, 3, 16, 16), generator=torch.Generator().manual_seed(epoch * 1000 + i))
            with torch.no_grad():
                labels = teacher(images)
            yield images, labels

    def training_batches(self, *, world: int = 1) -> int:
        return 16 // world


def digest(module: nn.Module) -> str:
    tensors = module.state_dict().values()
    return hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()


def say(result: dict[str, object]) -> None:
    """One line in one write: ranks share a pipe, and an unbuffered `print` writes the end of the line apart."""
    os.write(1, (json.dumps(result) + "\n").encode())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("--distill", action="store_true")
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    # Ranks other than the first have folders of their own, as in a build.
    work: Path = arguments.work / ("rest" if int(os.environ.get("RANK", "0")) else "first") / "stage"
    work.mkdir(parents=True, exist_ok=True)
    (work / "student.py").write_text(STUDENT)
    context = Context(seed=arguments.seed, threads=1, work=work, recipe_dir=work, cache=work, out=work)
    task = ShardedTask()
    task.pause = 0.05 if arguments.slow else 0.0
    if arguments.distill:
        student = StudentOptions(factory="student.py:student")
        options = DistillOptions(student=student, epochs=3, alpha=0.5, checkpoint_every=3, baseline=False)
        result = distill(Model(tiny_cnn(1), task, {}), options, context).module
        say({"digest": digest(result)})
        return
    torch.manual_seed(arguments.seed)
    module = nn.Sequential(tiny_cnn(), nn.Dropout(0.1))
    history = train(module, task, epochs=3, lr=1e-2, context=context, checkpoint_every=3)
    say({"digest": digest(module), "resumed_at": history.resumed_at, "losses": history.losses})


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as a stage's process ends (edgec/worker.py): gloo's threads may wait for ever at a normal exit
