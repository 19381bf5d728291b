"""Runs the paged step graph's signatures on the native engine, which keeps the pools itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from edgec.model import Artifact

if TYPE_CHECKING:
    from edgec.golden import Arrays


class NativeRunner:
    """Tokens, positions, slots and block tables in; logits and hidden states out. Takes and gives no pools."""

    stateful = True

    def __init__(self, artifact: Artifact, *, threads: int = 0, kernel: str | None = None) -> None:
        from edgec.runtime.engine import Engine, EngineOptions

        shape = artifact.details["shape"]
        self._hidden = next(t.shape[-1] for s in artifact.signatures for t in s.outputs if t.name == "hidden")
        self._engine = Engine(
            artifact.path,
            EngineOptions(
                threads=threads,
                kernel=kernel,
                block_size=shape["block_size"],
                context=shape["block_size"] * shape["blocks_per_sequence"],
                # The recipe's budget is for an app; here the pools have to hold the step graph's blocks as well.
                memory_budget=2**40,
                max_batch=max(8, shape["batch"]),
                step_tokens=max(64, shape["chunk"], shape["batch"]),
            ),
        )

    def run(self, signature: str, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """One step; padding rows are computed once, since they are all token 0 in slot 0."""
        tokens, positions, slots = (inputs[n] for n in ("tokens", "positions", "slot_mapping"))  # (B, T)
        batch, length = tokens.shape
        sequence = np.repeat(np.arange(batch, dtype=np.int32), length)
        rows = np.arange(batch * length)
        padding = np.flatnonzero(slots.ravel() == 0)
        if len(padding) > 1:
            rows = np.delete(rows, padding[1:])
        logits, hidden = self._engine.forward(
            tokens.ravel()[rows],
            positions.ravel()[rows],
            slots.ravel()[rows],
            sequence[rows],
            inputs["block_table"],
            hidden_size=int(self._hidden),
        )
        assert hidden is not None
        source = np.empty(batch * length, np.int64)
        source[rows] = np.arange(len(rows))
        if len(padding):
            source[padding] = source[padding[0]]
        return {
            "logits": logits[source].reshape(batch, length, -1),
            "hidden": hidden[source].reshape(batch, length, -1),
        }

    def reset(self) -> None:
        """Nothing to forget: a sequence's positions are always written before they are read."""
