"""Random paged batches for attention, with NaN wherever an implementation must not look, and the answer in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """Contexts of S sequences with as many queries each."""

    name: str
    contexts: Sequence[int]
    queries: Sequence[int]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    block_size: int = 16

    def __str__(self) -> str:
        return self.name


CASES = (
    Case("one token", [1], [1]),
    Case("decoding", [33, 7, 90, 16, 17], [1, 1, 1, 1, 1]),
    Case("whole prompts", [33, 16, 70], [33, 16, 70]),
    Case("chunks behind cached prefixes", [33, 70, 90], [20, 6, 3]),
    Case("prompts among decoding", [33, 70, 5, 90, 16], [1, 70, 1, 30, 1]),
    Case("nine heads over three", [40, 70], [1, 25], heads=9, kv_heads=3, dim=64),
    Case("a KV head for each head", [33, 20], [5, 20], heads=4, kv_heads=4, dim=32, block_size=8),
    Case("one KV head for all", [33, 20], [5, 20], heads=8, kv_heads=1, dim=24, block_size=4),
    Case("more heads to a KV head than a program has rows", [20, 9], [3, 1], heads=96, kv_heads=1),
    Case("long", [700, 300], [1, 130], heads=9, kv_heads=3, dim=64),
)


@dataclass(frozen=True)
class Batch:
    """Arguments of `paged_attention`, and what it must give, (T, H, D) float64."""

    arguments: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float, int]
    expected: torch.Tensor


def make_batch(case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Batch:
    """Blocks in no order, and NaN in every slot that belongs to nobody."""
    torch.manual_seed(len(case.name))
    size, group = case.block_size, case.heads // case.kv_heads
    needed = [-(-n // size) for n in case.contexts]
    blocks = sum(needed) + 3
    free = torch.randperm(blocks).tolist()
    tables = torch.zeros(len(needed), max(needed) + 1, dtype=torch.int32)
    pools = torch.full((2, blocks * size, case.kv_heads, case.dim), float("nan"), dtype=dtype)
    queries = torch.randn(sum(case.queries), case.heads, case.dim).to(dtype)
    starts = [0]
    expected = []
    for s, (context, count) in enumerate(zip(case.contexts, case.queries, strict=True)):
        mine = [free.pop() for _ in range(needed[s])]
        tables[s, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        kv = torch.randn(2, context, case.kv_heads, case.dim).to(dtype)
        slots = torch.tensor([mine[p // size] * size + p % size for p in range(context)])
        pools[:, slots] = kv
        q = queries[starts[-1] : starts[-1] + count].double()  # (n, H, D)
        k, v = kv.double().repeat_interleave(group, 2)  # (L, H, D) each
        scores = torch.einsum("qhd,khd->hqk", q, k) * case.dim**-0.5
        later = torch.arange(context)[None, :] > torch.arange(context - count, context)[:, None]
        expected.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), v))
        starts.append(starts[-1] + count)
    contexts = torch.tensor(case.contexts, dtype=torch.int32)
    query_start = torch.tensor(starts, dtype=torch.int32)
    tensors = [t.to(device) for t in (queries, *pools, tables, contexts, query_start)]
    q, k_pool, v_pool, tables, contexts, query_start = tensors
    arguments = (q, k_pool, v_pool, tables, contexts, query_start, case.dim**-0.5, size)
    return Batch(arguments, torch.cat(expected))
