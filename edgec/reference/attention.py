"""Attention over paged keys and values, for a packed batch of sequences.

Every implementation has one signature, which `triton_attention.paged_attention` (CUDA) has too:

    paged_attention(q, k_pool, v_pool, block_tables, context_lens, query_start, scale, block_size) -> out

    q             (T, H, D)        the queries of all sequences, one sequence after the other
    k_pool        (slots, Hkv, D)  keys; slot = block · block_size + offset. The step's own keys are in it already
    v_pool        (slots, Hkv, D)  values
    block_tables  (S, W) int32     each sequence's blocks, in order; what is past its context is never looked at (0)
    context_lens  (S,) int32       positions of each sequence up to and with its last query
    query_start   (S + 1,) int32   sequence s has the rows query_start[s] … query_start[s + 1] − 1 of q
    scale         float            on the scores: 1 / √D
    block_size    int
    out           (T, H, D)        of q's dtype

The i-th of a sequence's n queries stands at position context_len − n + i and sees the positions up to its own. H is a
multiple of Hkv: query head h reads KV head h // (H // Hkv) (grouped-query attention; Ainslie et al., 2023). Slots past
a context hold whatever was left there, NaN included, and must not reach the output: 0 · NaN is NaN. A row beyond
query_start[S] (padding of a captured graph) belongs to nobody, and its output is undefined.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

PagedAttention = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float, int], torch.Tensor
]


def attention_for(device: torch.device) -> PagedAttention:
    """The Triton kernel on CUDA, plain PyTorch elsewhere."""
    if device.type == "cuda":
        from edgec.reference.triton_attention import paged_attention as kernel

        return kernel
    return paged_attention


def paged_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_start: torch.Tensor,
    scale: float,
    block_size: int,
) -> torch.Tensor:
    """In PyTorch, on any device, in any float type. Sequences with one query are taken together, others one by one."""
    out = torch.empty_like(q)
    starts, contexts = query_start.tolist(), context_lens.tolist()
    counts = [end - start for start, end in pairwise(starts)]
    decodes = [s for s, count in enumerate(counts) if count == 1]
    groups = [decodes] if decodes else []
    for sequences in [*groups, *([s] for s, count in enumerate(counts) if count > 1)]:
        count = counts[sequences[0]]
        length = max(contexts[s] for s in sequences)
        blocks = -(-length // block_size)
        rows = torch.tensor([starts[s] + i for s in sequences for i in range(count)], device=q.device)
        tables = block_tables[sequences, :blocks].long()
        last = context_lens[sequences, None] - count + torch.arange(count, device=q.device)  # (S, n): what a query sees
        out[rows] = attend(
            q[rows].view(-1, count, *q.shape[1:]),
            gather(k_pool, tables, block_size)[:, :length],
            gather(v_pool, tables, block_size)[:, :length],
            last,
            scale,
        ).flatten(0, 1)
    return out


def gather(pool: torch.Tensor, tables: torch.Tensor, block_size: int) -> torch.Tensor:
    """What stands in blocks (S, W): (S, W · block_size, Hkv, D)."""
    return pool.view(-1, block_size, *pool.shape[1:])[tables].flatten(1, 2)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, last: torch.Tensor, scale: float) -> torch.Tensor:
    """Sequences of one length: q (S, n, H, D), k and v (S, L, Hkv, D); query i of s sees positions 0 … last[s, i]."""
    sequences, count, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    positions = torch.arange(k.shape[1], device=q.device)  # (L,)
    hidden = positions > last[:, :, None]  # (S, n, L)
    # Queries that read the same KV head become rows of one product.
    q = q.view(sequences, count, kv_heads, group, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    scores = (q * scale) @ k.permute(0, 2, 3, 1)  # (S, Hkv, group · n, L)
    hidden = hidden.repeat(1, group, 1)[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    unused = positions > last[:, -1:]  # (S, L): past the context
    out = weights @ v.masked_fill(unused[:, :, None, None], 0).transpose(1, 2)  # (S, Hkv, group · n, D)
    return out.view(sequences, kv_heads, group, count, dim).permute(0, 3, 1, 2, 4).flatten(2, 3)
