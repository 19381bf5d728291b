"""Models between stages: what is written comes back, and damage is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from edgec.passes.quantize import QuantizeOptions, quantize
from safetensors.torch import load_file, save_file
from torch import nn

from edgec.checkpoint import GRAPH, MODEL, WEIGHTS, load_model, save_model
from edgec.errors import Reason, SourceError, StoreError
from edgec.graphs import count_parameters
from edgec.model import Model
from tests.passes.tiny import TinyCNN, TinyTask, context, tiny_model


class Tied(nn.Module):
    """An embedding whose weight is the head's, too."""

    def __init__(self, rows: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, rows, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embedding(ids)))


IDS = torch.arange(12).view(1, 12)


def tied_model() -> Model:
    torch.manual_seed(0)
    return Model(Tied().eval(), TinyTask(), {"factory": "tied"}, metrics={"agreement": 0.5})


def load(folder: Path, task: TinyTask, build: type[nn.Module] = Tied) -> Model:
    return load_model(folder, task, folder, architecture=lambda source, recipe_dir: build())


def test_a_float_model_comes_back_with_its_tied_weight_written_once(tmp_path: Path) -> None:
    model = tied_model()
    save_model(model, tmp_path)
    assert sorted(load_file(tmp_path / WEIGHTS)) == ["embedding.weight", "middle.bias", "middle.weight"]
    again = load(tmp_path, model.task)  # type: ignore[arg-type]
    assert torch.equal(again.module(IDS), model.module(IDS))
    assert again.module.head.weight is again.module.embedding.weight
    assert (again.source, again.metrics, again.quantization) == (model.source, model.metrics, None)


def test_int8_weights_come_back_and_stay_tied(tmp_path: Path) -> None:
    float_model = tied_model()
    model = quantize(float_model, QuantizeOptions(scheme="weight-only"), context(tmp_path / "c"))
    save_model(model, tmp_path / "m")
    stored = load_file(tmp_path / "m" / WEIGHTS)
    assert [k for k, t in stored.items() if t.dtype == torch.int8] == ["embedding.weight", "middle.weight"]
    again = load(tmp_path / "m", model.task)  # type: ignore[arg-type]
    assert torch.equal(again.module(IDS), model.module(IDS))
    assert again.quantization == model.quantization
    assert again.parameters == model.parameters == float_model.parameters


def test_a_static_graph_comes_back_and_two_saves_give_the_same_bytes(tmp_path: Path) -> None:
    model = quantize(tiny_model(), QuantizeOptions(sensitivity=False), context(tmp_path / "c"))
    save_model(model, tmp_path / "a")
    save_model(model, tmp_path / "b")
    for name in (MODEL, GRAPH):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    again = load_model(tmp_path / "a", model.task, tmp_path)
    (image,) = model.task.example(model.task.signatures(model.module)[0])
    assert torch.equal(again.module(image), model.module(image))
    assert again.module.eval() is again.module
    assert again.quantization == model.quantization


def test_a_narrowed_layer_comes_back_narrow(tmp_path: Path) -> None:
    model = Model(TinyCNN().eval(), TinyTask(), {})
    model.module.head = nn.Linear(32, 3)
    save_model(model, tmp_path)
    again = load(tmp_path, model.task, TinyCNN)  # type: ignore[arg-type]
    assert again.module.head.out_features == 3


@pytest.mark.parametrize("name", [MODEL, WEIGHTS])
def test_a_file_that_is_cut_short_is_named(tmp_path: Path, name: str) -> None:
    model = tied_model()
    save_model(model, tmp_path)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(StoreError, match=f"{name} is damaged"):
        load(tmp_path, model.task)  # type: ignore[arg-type]


def test_a_graph_that_is_cut_short_is_named(tmp_path: Path) -> None:
    model = quantize(tiny_model(), QuantizeOptions(sensitivity=False), context(tmp_path / "c"))
    save_model(model, tmp_path)
    content = (tmp_path / GRAPH).read_bytes()
    (tmp_path / GRAPH).write_bytes(content[: len(content) // 2])
    with pytest.raises(StoreError, match=r"graph\.pt2 can't be read"):
        load_model(tmp_path, model.task, tmp_path)


def test_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    model = tied_model()
    save_model(model, tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    save_file({**{k: v for k, v in tensors.items() if k != "middle.bias"}}, tmp_path / WEIGHTS)
    with pytest.raises(SourceError, match=r"lacks middle\.bias") as caught:
        load(tmp_path, model.task)  # type: ignore[arg-type]
    assert caught.value.reason is Reason.BAD_CHECKPOINT


def test_parameters_count_tied_weights_once_and_no_statistics() -> None:
    assert count_parameters(Tied()) == 32 * 8 + 8 * 8 + 8
    assert count_parameters(nn.BatchNorm2d(4)) == 8
