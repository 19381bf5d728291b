"""Attention over paged keys and values as one Triton kernel; its signature is in attention.py.

One program takes a tile of queries of one sequence, with all query heads that share a KV head, and walks over that
sequence's positions with an online softmax in float32 (Milakov and Gimelshein, 2018; Dao et al., "FlashAttention",
2022). Decoding, chunked prefill and prefixes that were cached are one case: n queries at the end of a context.

Which sequence a tile belongs to is found on the device, as in vLLM's unified kernel: sequence s has at most
n // tile + 1 tiles, so tile number query_start[s] // tile + s is its first, and T // tile + S programs are enough. No
size is read back from the device, and so the call can be captured as a CUDA graph.

Importing this module needs Triton, which comes with CUDA builds of PyTorch. With TRITON_INTERPRET=1 in the environment
before the import, the kernel runs on the CPU, slowly: that is how it is tested where there is no GPU.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

ROWS = 16  # (query, head) pairs of a program at least: the least that tensor cores multiply
PREFILL_ROWS = 64  # of a program when there are more queries than sequences
POSITIONS = 32  # keys of a step of the walk


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _kernel(  # type: ignore[no-untyped-def]
    out,  # (T, H, D)
    q,  # (T, H, D)
    k_pool,  # (slots, Hkv, D)
    v_pool,  # (slots, Hkv, D)
    block_tables,  # (S, W)
    context_lens,  # (S,)
    query_start,  # (S + 1,)
    scale,
    sequences,
    table_width,
    q_row,  # strides, in elements: of a query, of its heads, of a slot, of its heads
    q_head,
    kv_slot,
    kv_head,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    D: tl.constexpr,
    D_PADDED: tl.constexpr,  # the next power of two, at least 16
    TILE: tl.constexpr,  # queries of a program
    ROWS: tl.constexpr,  # ≥ TILE · GROUP
    POSITIONS: tl.constexpr,
):
    tile = tl.program_id(0)
    head = tl.program_id(1)  # the KV head

    # The last sequence whose first tile is not after this one.
    low: tl.int32 = 0
    high = sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // TILE + middle <= tile:
            low = middle + 1
        else:
            high = middle
    sequence = low - 1
    first = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - first
    begin = (tile - (first // TILE + sequence)) * TILE  # of this tile, among the sequence's queries
    if begin >= count:
        return
    context = tl.load(context_lens + sequence)

    rows = tl.arange(0, ROWS)
    query = begin + rows // GROUP
    query_head = head * GROUP + rows % GROUP
    is_query = (rows < TILE * GROUP) & (query < count)
    last = context - count + query  # the last position that each row sees
    channels = tl.arange(0, D_PADDED)
    is_channel = channels < D
    at = (first + query).to(tl.int64) * q_row + query_head * q_head
    there = is_query[:, None] & is_channel[None, :]
    queries = tl.load(q + at[:, None] + channels[None, :], mask=there, other=0.0)  # (ROWS, D)

    greatest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, D_PADDED], tl.float32)
    end = tl.minimum(context, context - count + begin + TILE)
    for start in range(0, end, POSITIONS):
        positions = start + tl.arange(0, POSITIONS)
        is_position = positions < end
        table = block_tables + sequence * table_width
        block = tl.load(table + positions // BLOCK_SIZE, mask=is_position, other=0).to(tl.int64)
        slots = (block * BLOCK_SIZE + positions % BLOCK_SIZE) * kv_slot + head * kv_head
        # What is past `end` is not loaded: it may hold NaN, and 0 · NaN is NaN.
        keys = tl.load(
            k_pool + slots[None, :] + channels[:, None], mask=is_position[None, :] & is_channel[:, None], other=0.0
        )  # (D, POSITIONS)
        scores = tl.dot(queries, keys, input_precision="ieee") * scale  # (ROWS, POSITIONS) float32
        scores = tl.where(positions[None, :] <= last[:, None], scores, float("-inf"))
        greater = tl.maximum(greatest, tl.max(scores, 1))
        safe = tl.where(greater == float("-inf"), 0.0, greater)  # rows of no query see nothing
        weights = tl.exp(scores - safe[:, None])
        shrink = tl.exp(greatest - safe)
        values = tl.load(
            v_pool + slots[:, None] + channels[None, :], mask=is_position[:, None] & is_channel[None, :], other=0.0
        )  # (POSITIONS, D)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        greatest = greater
    result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + at[:, None] + channels[None, :], result.to(out.dtype.element_ty), mask=there)


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
    """As `attention.paged_attention`, whose module says what the arguments are."""
    tokens, heads, dim = q.shape
    sequences, kv_heads = len(context_lens), k_pool.shape[1]
    group = heads // kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    q = q.contiguous()
    assert k_pool.stride() == v_pool.stride() and k_pool.stride(2) == 1
    rows = max(ROWS if tokens <= sequences else PREFILL_ROWS, triton.next_power_of_2(group))
    tile = rows // group
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        _kernel[(tokens // tile + sequences, kv_heads)](
            out,
            q,
            k_pool,
            v_pool,
            block_tables,
            context_lens,
            query_start,
            scale,
            sequences,
            block_tables.stride(0),
            out.stride(0),
            out.stride(1),
            k_pool.stride(0),
            k_pool.stride(1),
            BLOCK_SIZE=block_size,
            GROUP=group,
            D=dim,
            D_PADDED=max(16, triton.next_power_of_2(dim)),
            TILE=tile,
            ROWS=rows,
            POSITIONS=POSITIONS,
        )
    return out
