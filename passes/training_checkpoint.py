"""Where a training run stands, on disk, so that a killed build goes on from there. It is read with `weights_only`."""

from __future__ import annotations

import hashlib
import io
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn


def fingerprint(objective: nn.Module, options: list[Any], world: list[int]) -> str:
    """What a checkpoint must agree on to be resumed: options and every tensor's name and shape."""
    shapes = {k: list(v.shape) for k, v in objective.state_dict().items()}
    return hashlib.sha256(json.dumps([options, world, shapes], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """Where training stands, in one file that is either whole or the one before (written aside, then renamed)."""

    path: Path
    fingerprint: str
    rank: int
    ranks: int

    def save(self, objective: nn.Module, optimizer: torch.optim.Optimizer, step: int, losses: list[float]) -> None:
        if self.rank != 0:
            return
        import torch

        data = {
            "fingerprint": self.fingerprint,
            "step": step,
            "losses": list(losses),
            "objective": objective.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_suffix(".tmp")
        with aside.open("wb") as file:
            torch.save(data, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self.path)

    def load(self, objective: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, list[float]]:
        """The step to go on at, and the losses so far; `(0, [])` without a checkpoint of this very run."""
        import torch

        content = self._content()
        if not content:
            return 0, []
        data = torch.load(io.BytesIO(content), weights_only=True)
        if data["fingerprint"] != self.fingerprint:
            return 0, []  # the recipe changed since: those weights belong to another run
        objective.load_state_dict(data["objective"])
        optimizer.load_state_dict(data["optimizer"])
        return int(data["step"]), [float(v) for v in data["losses"]]

    def _content(self) -> bytes:
        """The file's bytes. The first rank hands its file to the others, which need not see the same folder."""
        content = self.path.read_bytes() if self.rank == 0 and self.path.exists() else b""
        if self.ranks == 1:
            return content
        import numpy as np
        import torch
        from torch import distributed

        size = torch.tensor([len(content)])
        distributed.broadcast(size, src=0)
        buffer = np.zeros(int(size), np.uint8)
        buffer[: len(content)] = np.frombuffer(content, np.uint8)
        tensor = torch.from_numpy(buffer)
        distributed.broadcast(tensor, src=0)
        return tensor.numpy().tobytes()
