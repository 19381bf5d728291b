"""The paged step graph against the dense model: chunks, batches, interleaved blocks, padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edgec.architectures.paged import PagedStep
from edgec.tasks.paged_driver import PagedShape, Placed, decode_feed, prefill_feed
from tests.tasks.tiny_lm import VOCAB, llama

SHAPE = PagedShape(block_size=4, blocks=20, blocks_per_sequence=8, batch=3, chunk=6)
NAMES = ("tokens", "positions", "slot_mapping", "block_table")


class Pools:
    """A paged model with its pools; remembers nothing else."""

    def __init__(self, garbage: float = 0.0) -> None:
        self.model = llama()
        self.step = PagedStep(self.model, SHAPE.block_size, SHAPE.blocks_per_sequence).eval()
        self.pools = [torch.full((SHAPE.slots, 2, 8), garbage) for _ in range(4)]

    def __call__(self, feed: dict[str, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            logits, hidden, *self.pools = self.step(*(torch.from_numpy(feed[n]) for n in NAMES), *self.pools)
        return logits, hidden


def tokens(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, count).astype(np.int32)


def interleaved(run: Pools) -> tuple[list[torch.Tensor], list[torch.Tensor], list[np.ndarray]]:
    """Two sequences in shared pools: prefill A, prefill B, decode both, prefill A again, decode both.

    Gives logits and hidden states of each sequence's tokens in order, and the tokens.
    """
    text = [tokens(18, 1), tokens(12, 2)]
    placed = [Placed(SHAPE), Placed(SHAPE)]
    free = [7, 2, 11, 5, 19, 1, 13, 4, 8, 17]
    logits: list[list[torch.Tensor]] = [[], []]
    hidden: list[list[torch.Tensor]] = [[], []]

    def prefill(i: int, count: int) -> None:
        start = placed[i].length
        out = run(prefill_feed(SHAPE, placed[i], text[i][start : start + count], free))
        logits[i].append(out[0][0, :count])
        hidden[i].append(out[1][0, :count])

    def decode(times: int) -> None:
        for _ in range(times):
            rows = [(p, int(t[p.length])) for p, t in zip(placed, text, strict=True)]
            out = run(decode_feed(SHAPE, rows, free))
            for i in range(2):
                logits[i].append(out[0][i])
                hidden[i].append(out[1][i])

    prefill(0, 6)
    prefill(1, 5)
    decode(4)
    prefill(0, 5)
    decode(3)
    done = [t[: p.length] for t, p in zip(text, placed, strict=True)]
    assert [len(t) for t in done] == [18, 12]
    return [torch.cat(x) for x in logits], [torch.cat(x) for x in hidden], done


def test_chunked_prefill_and_interleaved_decode_equal_the_dense_model() -> None:
    run = Pools()
    logits, hidden, text = interleaved(run)
    for got, last, ids in zip(logits, hidden, text, strict=True):
        dense = torch.from_numpy(ids[None]).long()
        with torch.no_grad():
            torch.testing.assert_close(got, run.model(dense)[0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(last, run.model.hidden_states(dense)[0], atol=1e-5, rtol=1e-5)


def test_what_earlier_sequences_left_in_the_pools_does_not_matter() -> None:
    clean, _, _ = interleaved(Pools())
    dirty, _, _ = interleaved(Pools(garbage=50.0))
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a, b)


def test_a_wrong_block_table_is_noticed() -> None:
    """The comparison above can fail: a table with two blocks exchanged gives other logits."""
    run = Pools()
    ids, placed = tokens(6, 1), Placed(SHAPE)
    run(prefill_feed(SHAPE, placed, ids, [3, 4, 5]))
    feed = decode_feed(SHAPE, [(placed, 9)], [5, 6])
    right = run(feed)[0][0]
    feed["block_table"][0, :2] = feed["block_table"][0, :2][::-1].copy()
    assert (run(feed)[0][0] - right).abs().max() > 1e-3


def test_padding_writes_to_the_scratch_block_only() -> None:
    run = Pools(garbage=7.0)
    run(decode_feed(SHAPE, [(Placed(SHAPE), 5)], [9]))  # one row of three
    for pool in run.pools:
        written = (pool != 7.0).flatten(1).any(1).nonzero().flatten().tolist()
        assert written == [0, 9 * SHAPE.block_size]


def test_a_step_leaves_its_input_pools_alone() -> None:
    run = Pools()
    before = run.pools
    run(prefill_feed(SHAPE, Placed(SHAPE), tokens(6, 1), [1, 2]))
    assert all(float(p.abs().max()) == 0 for p in before)
    assert all(float(p.abs().max()) > 0 for p in run.pools)


@pytest.mark.parametrize("length", [1, 6])
def test_captured_graph_has_no_tensor_above_four_dimensions(length: int) -> None:
    """GPU and NPU delegates take at most four."""
    step = PagedStep(llama(), SHAPE.block_size, SHAPE.blocks_per_sequence).eval()
    ints = [torch.zeros(2, length, dtype=torch.int32) for _ in range(3)] + [torch.zeros(2, 8, dtype=torch.int32)]
    graph = torch.export.export(step, (*ints, *(torch.zeros(SHAPE.slots, 2, 8) for _ in range(4))), strict=False).graph
    shapes = [n.meta["val"].dim() for n in graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    assert max(shapes) == 4
