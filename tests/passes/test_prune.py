"""Pruning: what goes, what stays, and that the result still runs, loads and learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from edgec.passes.prune import FineTuneOptions, MaskOptions, PruneOptions, prune
from edgec.passes.prune_channels import kept_width
from torch import nn

from edgec import structure
from edgec.errors import ConversionError
from edgec.model import Model, Signature, TensorSpec
from tests.passes.tiny import TinyTask, context, tiny_cnn, tiny_model

IMAGE = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(7))


def learnable() -> Model:
    """A model whose task teaches it something that it doesn't know yet, so that gradients aren't zero."""
    model = tiny_model()
    model.task.teacher = tiny_cnn(1)  # type: ignore[attr-defined]
    return model


@pytest.mark.parametrize("criterion", ["magnitude", "taylor"])
def test_half_the_channels_go_and_the_outputs_stay(tmp_path: Path, criterion: str) -> None:
    model, stage = learnable(), context(tmp_path)
    before = model.parameters
    pruned = prune(model, PruneOptions(channels=0.5, criterion=criterion), stage)
    widths = [m.out_channels for m in pruned.module.modules() if isinstance(m, nn.Conv2d)]
    assert widths == [8, 8, 16, 16, 16]
    assert pruned.module(IMAGE).shape == (1, 4)
    assert pruned.parameters < before / 2
    assert {"latency_before_ms", "latency_after_ms"} <= set(stage.log.metrics)


def test_the_least_channel_goes(tmp_path: Path) -> None:
    model = tiny_model()
    last = model.module.features[4][3]
    with torch.no_grad():
        last.weight[5:13] *= 1e-3  # eight channels that hardly matter
        model.module.features[4][4].weight[5:13] *= 1e-3
        model.module.head.weight[:, 5:13] *= 1e-3
    kept = torch.cat([last.weight[:5], last.weight[13:]]).detach().clone()
    options = PruneOptions(channels=0.25, exclude=["features.4.0", "features.3.0"])
    pruned = prune(model, options, context(tmp_path))
    assert torch.equal(pruned.module.features[4][3].weight, kept)


def test_excluded_layers_keep_their_width(tmp_path: Path) -> None:
    pruned = prune(tiny_model(), PruneOptions(exclude=["features.0"]), context(tmp_path))
    assert pruned.module.features[0].out_channels == 16


def test_a_misspelt_exclusion_names_the_right_module(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"did you mean `features\.0`"):
        prune(tiny_model(), PruneOptions(exclude=["featurs.0"]), context(tmp_path))


def test_every_group_is_reported_with_its_reason(tmp_path: Path) -> None:
    stage = context(tmp_path)
    prune(tiny_model(), PruneOptions(), stage)
    table = next(t for t in stage.log.tables if t.title == "Pruned groups")
    assert len(table.rows) == 3
    for _, name, before, after, why in table.rows:
        assert after < before and "magnitude" in why
        assert any(str(name) in note for note in stage.log.notes)


def test_the_architecture_is_rebuilt_from_its_description(tmp_path: Path) -> None:
    pruned = prune(tiny_model(), PruneOptions(), context(tmp_path)).module
    fresh = tiny_cnn(3)
    structure.apply(fresh, structure.describe(pruned))
    fresh.load_state_dict(pruned.state_dict())
    assert torch.equal(fresh.eval()(IMAGE), pruned(IMAGE))


@pytest.mark.parametrize(("width", "share", "multiple", "kept"), [(64, 0.5, 8, 32), (20, 0.5, 8, 8), (6, 0.9, 8, 6)])
def test_widths_are_multiples(width: int, share: float, multiple: int, kept: int) -> None:
    assert kept_width(width, share, multiple) == kept


def test_two_of_four_are_zero_and_stay_zero_through_fine_tuning(tmp_path: Path) -> None:
    options = PruneOptions(channels=0, mask=MaskOptions(pattern="2:4"), fine_tune=FineTuneOptions(epochs=1, lr=1e-2))
    model = learnable()
    before = model.module.features[3][3].weight.detach().clone()
    weight = prune(model, options, context(tmp_path)).module.features[3][3].weight  # (32, 16, 1, 1)
    groups = weight.detach().reshape(32, 4, 4)
    assert ((groups == 0).sum(-1) == 2).all()
    kept = before.reshape(32, 4, 4).abs().topk(2, dim=-1).indices
    assert (groups.gather(-1, kept) != 0).all(), "the greater two of each four are kept"
    assert not torch.equal(weight[weight != 0], before[weight != 0]), "fine-tuning learnt"


def test_a_share_of_all_weights_becomes_zero(tmp_path: Path) -> None:
    pruned = prune(tiny_model(), PruneOptions(channels=0, mask=MaskOptions(sparsity=0.5)), context(tmp_path))
    weights = [m.weight for m in pruned.module.modules() if isinstance(m, nn.Conv2d)]
    zero = sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights)
    assert zero == pytest.approx(0.5, abs=0.01)


def test_nothing_to_remove_is_reported_as_unchanged(tmp_path: Path) -> None:
    stage = context(tmp_path)
    prune(tiny_model(), PruneOptions(round_to=64), stage)
    assert stage.log.verdict == "unchanged"


def test_fine_tuning_gets_nearer_to_the_task(tmp_path: Path) -> None:
    def error(model: Model) -> float:
        with torch.no_grad():
            return float(sum(model.task.loss(model.module(x), y) for x, y in model.task.training(99)))

    plain = prune(learnable(), PruneOptions(), context(tmp_path / "a"))
    options = PruneOptions(fine_tune=FineTuneOptions(epochs=4, lr=5e-3, alpha=0.1))
    assert error(prune(learnable(), options, context(tmp_path / "b"))) < 0.8 * error(plain)


class Attention(nn.Module):
    def __init__(self, heads: int, kv_heads: int, width: int = 8) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, width
        self.q_proj = nn.Linear(32, heads * width)
        self.k_proj = nn.Linear(32, kv_heads * width)
        self.v_proj = nn.Linear(32, kv_heads * width)
        self.o_proj = nn.Linear(heads * width, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.width).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.kv_heads, self.width).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.width).transpose(1, 2)
        repeat = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        y = nn.functional.scaled_dot_product_attention(q, k, v)  # (B, H, T, D)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class Layer(nn.Module):
    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attention = Attention(heads, kv_heads)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, layers: int = 3, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(heads, kv_heads) for _ in range(layers))
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def transformer(**options: int) -> Model:
    torch.manual_seed(0)
    tokens = TensorSpec("tokens", (1, 6, 32), "float32")
    signature = Signature("main", (tokens,), (TensorSpec("logits", (1, 6, 5), "float32"),))
    return Model(Transformer(**options).eval(), TinyTask((signature,), shape=(1, 6, 32)), {})


def test_a_key_value_head_goes_with_the_heads_that_share_it(tmp_path: Path) -> None:
    model = transformer()
    attention = model.module.layers[0].attention
    with torch.no_grad():
        attention.k_proj.weight[:8] *= 1e-3
        attention.v_proj.weight[:8] *= 1e-3
        attention.o_proj.weight[:, :16] *= 1e-3
        attention.q_proj.weight[:16] *= 1e-3
    kept = attention.q_proj.weight[16:].detach().clone()
    pruned = prune(model, PruneOptions(channels=0, heads=0.5), context(tmp_path)).module
    attention = pruned.layers[0].attention
    assert (attention.heads, attention.kv_heads) == (2, 1)
    assert torch.equal(attention.q_proj.weight, kept)
    assert attention.k_proj.out_features == 8 and attention.o_proj.in_features == 16
    assert pruned(torch.randn(1, 6, 32)).shape == (1, 6, 5)


def test_hidden_widths_shrink_and_the_stream_between_layers_stays(tmp_path: Path) -> None:
    pruned = prune(transformer(), PruneOptions(channels=0, mlp=0.5), context(tmp_path)).module
    assert [(layer.up.out_features, layer.down.in_features) for layer in pruned.layers] == [(32, 32)] * 3
    assert pruned.layers[0].down.out_features == 32
    assert pruned.layers[0].attention.q_proj.out_features == 32
    assert pruned.head.out_features == 5


def test_the_layer_that_changes_its_input_least_goes(tmp_path: Path) -> None:
    model = transformer()
    with torch.no_grad():
        for part in (model.module.layers[1].attention.o_proj, model.module.layers[1].down):
            part.weight.zero_()
            part.bias.zero_()
    expected = model.module(torch.ones(1, 6, 32))
    pruned = prune(model, PruneOptions(channels=0, layers=1), context(tmp_path)).module
    assert len(pruned.layers) == 2
    assert torch.equal(pruned(torch.ones(1, 6, 32)), expected), "a layer that does nothing can go without a trace"


def test_heads_of_a_model_without_attention_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="no attention"):
        prune(tiny_model(), PruneOptions(heads=0.5), context(tmp_path))


def test_zero_gradients_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="not finite"):
        prune(tiny_model(), PruneOptions(criterion="taylor"), context(tmp_path))  # it is its own teacher
