"""A pruned module's form as JSON, and the factory's module brought to it."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from edgec import structure
from edgec.errors import SourceError


class Block(nn.Module):
    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def through_json(module: nn.Module) -> structure.Description:
    description: structure.Description = json.loads(json.dumps(structure.describe(module)))
    return description


def test_an_unchanged_module_is_left_alone() -> None:
    module = Net()
    weight = module.blocks[0].up.weight
    structure.apply(module, through_json(module))
    assert module.blocks[0].up.weight is weight


def test_widths_numbers_and_removed_layers_come_back() -> None:
    pruned = Net()
    del pruned.blocks[1]
    block = pruned.blocks[2]
    block.heads = 2
    block.up, block.down = nn.Linear(8, 12), nn.Linear(12, 8)
    fresh = Net()
    structure.apply(fresh, through_json(pruned))
    assert len(fresh.blocks) == 3
    assert fresh.blocks[2].heads == 2 and fresh.blocks[2].up.out_features == 12
    fresh.load_state_dict(pruned.state_dict())
    tokens = torch.arange(5)[None]
    assert torch.equal(fresh(tokens), pruned(tokens))


def test_tied_weights_stay_tied() -> None:
    pruned = Net()
    pruned.embedding = nn.Embedding(6, 8)
    pruned.head = nn.Linear(8, 6, bias=False)
    pruned.head.weight = pruned.embedding.weight
    fresh = Net()
    structure.apply(fresh, through_json(pruned))
    assert fresh.head.weight is fresh.embedding.weight
    assert fresh.head.weight.shape == (6, 8)


def test_a_removed_part_may_be_an_identity() -> None:
    pruned = Net()
    pruned.norm = nn.Identity()
    fresh = Net()
    structure.apply(fresh, through_json(pruned))
    assert isinstance(fresh.norm, nn.Identity)


def test_another_architecture_is_refused() -> None:
    other = Net()
    other.extra = nn.Linear(2, 2)
    with pytest.raises(SourceError, match="no `extra`"):
        structure.apply(Net(), through_json(other))


def test_tables_that_no_file_holds_are_refused() -> None:
    class Table(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.register_buffer("angles", torch.arange(size), persistent=False)

    with pytest.raises(SourceError, match=r"angles"):
        structure.apply(Table(4), through_json(Table(6)))
