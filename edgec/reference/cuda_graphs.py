"""Decoding as CUDA graphs: a step of hundreds of small kernels becomes one launch.

As in nano-vllm: one graph per batch size, in sizes that are padded up to, over tensors that stay where they are. Only
steps in which every sequence has one row are replayed; prompts run as they are.

The rows of padding repeat the first sequence's: they write the same keys and values to the same slots, so nothing of
anybody else's is touched, and no slot has to be set aside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from edgec.reference.model_runner import Batch

Layers = Callable[["Batch"], torch.Tensor]
Run = Callable[[], torch.Tensor]
_WARM_UPS = 2  # runs before a capture: kernels are compiled and libraries choose algorithms


def padded_sizes(max_batch: int) -> list[int]:
    """The batch sizes that get a graph: 1, 2, 4, multiples of 8, and the greatest."""
    return sorted({n for n in (1, 2, 4, *range(8, max_batch, 8)) if n < max_batch} | {max_batch})


class DecodeGraphs:
    """The layers of a model for batches of one row a sequence."""

    @torch.inference_mode()
    def __init__(
        self,
        layers: Layers,
        like: Batch,
        *,
        max_batch: int,
        table_width: int,
        capture: Callable[[Run], Run] | None = None,
    ) -> None:
        """Capture every size, the greatest first: the smaller ones find their memory in its pool.

        Capturing runs the layers on zeros, which writes slot 0 of the pools: only before they hold anything.

        Args:
            layers: of a Batch on the device, to (T, hidden). Must only read and write tensors that stay.
            like: any batch, for device and dtypes.
            max_batch: sequences of a step at most.
            table_width: blocks of a sequence at most.
            capture: makes of a function one that computes it again into the same tensor; by default a CUDA graph.
        """

        def zeros(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)

        self._inputs = dataclasses.replace(
            like,
            tokens=zeros(like.tokens, max_batch),
            positions=zeros(like.positions, max_batch),
            slots=zeros(like.slots, max_batch),
            block_tables=zeros(like.block_tables, max_batch, table_width),
            context_lens=zeros(like.context_lens, max_batch) + 1,
            query_start=torch.arange(max_batch + 1, dtype=like.query_start.dtype, device=like.query_start.device),
            wanted=zeros(like.wanted, 0),
        )
        self._sizes = padded_sizes(max_batch)
        make = capture or _CudaCapture(like.tokens.device)
        self._runs: dict[int, Run] = {}
        for size in reversed(self._sizes):
            batch = self._first(size)
            self._runs[size] = make(lambda batch=batch: layers(batch))  # type: ignore[misc]

    def fits(self, batch: Batch) -> bool:
        """Whether each sequence has one row; no size is read from the device for it."""
        return len(batch.tokens) == len(batch.context_lens) <= self._sizes[-1]

    def __call__(self, batch: Batch) -> torch.Tensor:
        """The batch's rows through the layers, (T, hidden); good until the next call."""
        count = len(batch.tokens)
        size = next(s for s in self._sizes if s >= count)
        inputs = self._first(size)
        for name in ("tokens", "positions", "slots", "context_lens"):
            given, kept = getattr(batch, name), getattr(inputs, name)
            kept[:count] = given
            kept[count:] = given[0]
        width = batch.block_tables.shape[1]
        inputs.block_tables[:count, :width] = batch.block_tables
        inputs.block_tables[count:, :width] = batch.block_tables[0]
        return self._runs[size]()[:count]

    def _first(self, size: int) -> Batch:
        """Views of the first rows of the inputs."""
        inputs = self._inputs
        return dataclasses.replace(
            inputs,
            tokens=inputs.tokens[:size],
            positions=inputs.positions[:size],
            slots=inputs.slots[:size],
            block_tables=inputs.block_tables[:size],
            context_lens=inputs.context_lens[:size],
            query_start=inputs.query_start[: size + 1],
        )


class _CudaCapture:
    """Records what a function does on the device; all recordings share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, run: Run) -> Run:
        with torch.cuda.device(self._device):
            return self._capture(run)

    def _capture(self, run: Run) -> Run:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = run()
        self._pool = self._pool or graph.pool()

        def replay() -> torch.Tensor:
            with torch.cuda.device(self._device):
                graph.replay()
            return out

        return replay
