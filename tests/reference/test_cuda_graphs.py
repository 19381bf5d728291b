"""Decoding in padded batches over tensors that stay: what graphs replay, here without a device that could record it."""

from __future__ import annotations

import pytest
import torch

from edgec.architectures.llama import Llama, LlamaConfig
from edgec.reference.cuda_graphs import DecodeGraphs, Run, padded_sizes
from edgec.reference.model_runner import ModelRunner, Rows
from edgec.reference.options import ReferenceOptions

CONFIG = LlamaConfig(
    vocab_size=50, hidden_size=32, intermediate_size=48, layers=2, heads=4, kv_heads=2, head_dim=8, max_positions=64
)


def make_runner() -> ModelRunner:
    torch.manual_seed(0)
    options = ReferenceOptions(block_size=4, blocks=24, max_batch=11, step_tokens=64)
    return ModelRunner(Llama(CONFIG).eval(), options, 64)


class Recorder:
    """Computes again what it was given, as a graph does: into one tensor, from the inputs as they then are."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, run: Run) -> Run:
        out = run()
        self.sizes.append(len(out))

        def replay() -> torch.Tensor:
            out.copy_(run())
            return out

        return replay


def test_sizes_are_dense_where_padding_would_cost_most() -> None:
    assert padded_sizes(1) == [1]
    assert padded_sizes(11) == [1, 2, 4, 8, 11]
    assert padded_sizes(32) == [1, 2, 4, 8, 16, 24, 32]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 9, 11])
def test_a_padded_batch_gives_what_the_layers_give_and_writes_nobody_else_s_slot(count: int) -> None:
    runner, plain = make_runner(), make_runner()
    record = Recorder()
    graphs = DecodeGraphs(
        runner.layers, runner.batch([Rows([0], 0, [0])]), max_batch=11, table_width=16, capture=record
    )
    assert record.sizes == [11, 8, 4, 2, 1]
    tables = [[2 * i + 1, 2 * i + 2] for i in range(count)]
    contexts = [4 + i % 3 for i in range(count)]
    for each in (runner, plain):
        with torch.inference_mode():
            for pool in (pool for pools in each.pools for pool in pools):
                pool.zero_()
            each.layers(each.batch([Rows(range(n), 0, table) for n, table in zip(contexts, tables, strict=True)]))
    for step in range(2):  # the second finds the first one's inputs in the buffers
        rows = [Rows([7 + i], n + step, table) for i, (n, table) in enumerate(zip(contexts, tables, strict=True))]
        batch = plain.batch(rows)
        assert graphs.fits(batch)
        with torch.inference_mode():
            torch.testing.assert_close(graphs(batch), plain.layers(batch), rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(runner.pools, plain.pools, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_prompts_and_larger_batches_are_not_replayed() -> None:
    runner = make_runner()
    graphs = DecodeGraphs(
        runner.layers, runner.batch([Rows([0], 0, [0])]), max_batch=2, table_width=16, capture=Recorder()
    )
    one = [Rows([1], 0, [1])]
    assert graphs.fits(runner.batch(one))
    assert not graphs.fits(runner.batch([*one, Rows([1, 2], 0, [2])]))
    assert not graphs.fits(runner.batch(one * 3))
