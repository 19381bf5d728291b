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
multiple of Hkv: query head h reads KV head h // (H // Hkv) (grouped-query attention; Ainslie et al., 2023). A row beyond
query_start[S] (padding of a captured graph) belongs to nobody: its output is undefined, and nothing may be written.
"""

from __future__ import annotations
