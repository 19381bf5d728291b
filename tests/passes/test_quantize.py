"""Static INT8 and INT8 weights, end to end on tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from edgec.passes.export import ExportOptions, export_program
from edgec.passes.quantize import QuantizeOptions, quantize
from edgec.passes.quantize_layers import is_quantize
from edgec.passes.quantize_sensitivity import search
from torch import nn

from edgec.errors import ConversionError, Reason, RecipeError, SourceError
from edgec.model import Model, Signature, TensorSpec
from tests.passes.tiny import TinyTask, context, tiny_model


def relative_error(model: Model, other: Model) -> float:
    images = torch.cat([model.task.inputs(9000 + i)[0] for i in range(16)])  # type: ignore[attr-defined]
    with torch.no_grad():
        a, b = model.module(images), other.module(images)
    return float((a - b).norm() / a.norm())


@pytest.mark.parametrize("calibrator", ["min-max", "percentile", "mse"])
def test_static_int8_stays_close_to_the_float_model(tmp_path: Path, calibrator: str) -> None:
    model = tiny_model()
    result = quantize(model, QuantizeOptions(calibrator=calibrator, sensitivity=False), context(tmp_path))  # type: ignore[arg-type]
    assert relative_error(model, result) < 0.03
    assert result.quantization is not None and result.quantization.scheme == "static"
    weighted = [x for x in result.quantization.layers if x.op in ("conv2d", "linear")]
    assert len(weighted) == 6 and all(x.dtype == "int8" and x.axis == 0 for x in weighted)
    assert dict(result.quantization.output_steps)["logits"] > 0


def test_a_clamp_is_quantised_with_the_convolution_before_it(tmp_path: Path) -> None:
    result = quantize(tiny_model(), QuantizeOptions(sensitivity=False), context(tmp_path))
    graph = result.module.graph  # type: ignore[union-attr]
    clamps = [n for n in graph.nodes if "hardtanh" in str(n.target)]  # type: ignore[union-attr]
    assert len(clamps) == 5
    for clamp in clamps:
        assert "conv2d" in str(clamp.args[0].target), "no quantize node between convolution and clamp"
        (quantized,) = clamp.users
        assert is_quantize(quantized) and quantized.args[2] == -128, "the range starts at 0: all steps are used"


@pytest.mark.slow
def test_onnx_computes_the_same_int8_model_with_int8_constants(tmp_path: Path) -> None:
    import onnx

    model = tiny_model()
    result = quantize(model, QuantizeOptions(sensitivity=False), context(tmp_path / "q"))
    program = export_program(result, ExportOptions(), context(tmp_path / "p"), baseline=model)
    graph = onnx.load(program.onnx_path("main")).graph
    weights = [t for t in graph.initializer if len(t.dims) > 1]
    assert len(weights) == 6 and all(t.data_type == onnx.TensorProto.INT8 for t in weights)
    folded = program.exported("main", folded=True)
    assert sum(t.dtype == torch.int8 for t in folded.state_dict.values()) == 6
    assert not [t for t in folded.state_dict.values() if t.dtype == torch.float32 and t.dim() > 1]
    assert program.baseline is not None
    assert program.onnx_path("main").stat().st_size < program.baseline.onnx_path("main").stat().st_size


def test_excluded_layers_compute_in_float(tmp_path: Path) -> None:
    surroundings = context(tmp_path)
    options = QuantizeOptions(exclude=("features.3",), exclude_types=("linear",))
    result = quantize(tiny_model(), options, surroundings)
    assert result.quantization is not None
    floats = {x.name: x.reason for x in result.quantization.layers if x.dtype == "float32"}
    assert floats == {
        "features.3.0": "exclude: features.3",
        "features.3.3": "exclude: features.3",
        "head": "exclude_types: linear",
    }
    quantized = {str(n.args[0].target) for n in result.module.graph.nodes if is_quantize(n)}  # type: ignore[union-attr]
    assert not quantized & {"features.3.0.weight", "features.3.3.weight", "head.weight"}
    assert "features.4.0.weight" in quantized


def test_a_misspelt_layer_gets_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"`exclude: headd` fits no layer; did you mean `head`"):
        quantize(tiny_model(), QuantizeOptions(exclude=("headd",)), context(tmp_path))


def test_sensitivity_shows_the_layer_that_int8_ruins(tmp_path: Path) -> None:
    def table(model: Model, folder: Path) -> dict[object, float]:
        surroundings = context(folder)
        quantize(model, QuantizeOptions(), surroundings)
        (found,) = surroundings.log.tables
        assert found.columns == ("layer", "op", "as", "dB")
        assert [row[3] for row in found.rows] == sorted(row[3] for row in found.rows), "most sensitive first"
        return {row[0]: float(row[3]) for row in found.rows}

    ruined = tiny_model()
    # A huge weight in each row of the head, on a feature that is always zero: the others round to nothing.
    ruined.module.features[4][4].weight.data[0] = 0.0  # type: ignore[index, union-attr]
    ruined.module.features[4][4].bias.data[0] = -1.0  # type: ignore[index, union-attr]
    ruined.module.head.weight.data[:, 0] = 100.0  # type: ignore[union-attr, operator]
    before, after = table(tiny_model(), tmp_path / "a"), table(ruined, tmp_path / "b")
    assert after["head"] < before["head"] - 20
    assert abs(after["features.3.0"] - before["features.3.0"]) < 6


def test_search_stops_on_its_goal_with_the_fewest_layers(tmp_path: Path) -> None:
    order = [f"l{i}" for i in range(16)]
    left, trials = search(
        order, lambda names: 0.0 if len(names) >= 5 else 1.0, max_drop=0.1, max_trials=20, context=context(tmp_path)
    )
    assert left == order[:5]
    assert [t.float_layers for t in trials] == [0, 1, 2, 4, 8, 6, 5]


def test_search_stops_on_its_trial_limit_with_the_best_so_far(tmp_path: Path) -> None:
    order = [f"l{i}" for i in range(64)]
    left, trials = search(
        order, lambda names: 1.0 - len(names) / 100, max_drop=0.1, max_trials=4, context=context(tmp_path)
    )
    assert len(trials) == 4 and len(left) == 4


def test_max_drop_that_is_not_reached_is_said(tmp_path: Path) -> None:
    class Never(TinyTask):
        calls = 0

        def evaluate(self, runner, reference, *, limit=None):  # type: ignore[no-untyped-def]
            Never.calls += 1
            return {"agreement": 1.0 if Never.calls == 1 else 0.5}

    surroundings = context(tmp_path)
    model = tiny_model()
    model.task = Never()
    quantize(model, QuantizeOptions(max_drop=0.01, max_trials=3), surroundings)
    assert any("max_drop 0.01 was not reached in 3 trials" in w for w in surroundings.log.warnings)


def test_an_empty_calibration_set_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="calibration set is empty") as caught:
        quantize(tiny_model(samples=0), QuantizeOptions(), context(tmp_path))
    assert caught.value.reason is Reason.EMPTY_DATA


def test_nan_in_calibration_names_the_tensor(tmp_path: Path) -> None:
    class Damaged(TinyTask):
        def calibration(self) -> Iterator[tuple[torch.Tensor, ...]]:
            yield (torch.full((1, 3, 16, 16), float("nan")),)

    model = tiny_model()
    model.task = Damaged()
    with pytest.raises(ConversionError, match=r"`image`.* is NaN or infinite on calibration data"):
        quantize(model, QuantizeOptions(), context(tmp_path))


def test_two_runs_give_the_same_parameters(tmp_path: Path) -> None:
    first, second = (quantize(tiny_model(), QuantizeOptions(), context(tmp_path / n)) for n in "ab")
    assert first.quantization == second.quantization
    assert str(first.module.graph) == str(second.module.graph)  # type: ignore[union-attr]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.head(x)


def words() -> Model:
    torch.manual_seed(0)
    ids = TensorSpec("ids", (2, 5), "int64")
    signature = Signature("main", (ids,), (TensorSpec("logits", (2, 5, 64), "float32"),))
    return Model(
        Words().eval(), TinyTask((signature,), make=lambda g: (torch.randint(0, 64, (2, 5), generator=g),)), {}
    )


@pytest.mark.slow
def test_int8_weights_share_the_tied_table_and_reach_onnx_as_int8(tmp_path: Path) -> None:
    import onnx

    model = words()
    result = quantize(model, QuantizeOptions(scheme="weight-only"), context(tmp_path / "q"))
    module = result.module
    assert module.head.weight.data_ptr() == module.embedding.weight.data_ptr()  # type: ignore[union-attr, operator]
    (ids,) = model.task.example(model.task.signatures(model.module)[0])
    with torch.no_grad():
        a, b = model.module(ids), module(ids)
    assert float((a - b).norm() / a.norm()) < 0.02
    program = export_program(result, ExportOptions(), context(tmp_path / "p"), baseline=model)
    graph = onnx.load(program.onnx_path("main")).graph
    tables = [t for t in graph.initializer if len(t.dims) == 2 and min(t.dims) > 1]
    assert tables and all(t.data_type == onnx.TensorProto.INT8 for t in tables)
    for node in graph.node:
        assert node.op_type != "Transpose", "dequantised weights are not transposed at run time"
    dequantize = [n for n in graph.node if n.op_type == "DequantizeLinear"]
    assert len(dequantize) == 3 and all(n.attribute[0].i == 1 for n in dequantize)


def test_embeddings_can_stay_float(tmp_path: Path) -> None:
    options = QuantizeOptions(scheme="weight-only", embeddings=False, exclude=("head",))
    result = quantize(words(), options, context(tmp_path))
    assert result.module.embedding.weight.dtype == torch.float32  # type: ignore[union-attr]
    assert result.quantization is not None
    assert {x.name: x.dtype for x in result.quantization.layers} == {
        "layers.0": "int8",
        "layers.1": "int8",
        "head": "float32",
    }


def test_static_int8_refuses_graphs_with_state(tmp_path: Path) -> None:
    x = TensorSpec("x", (1, 4), "float32")
    signature = Signature("main", (x, x), (x, x), state=(("x", "x"),))
    with pytest.raises(ConversionError, match="static INT8 needs one graph without state") as caught:
        quantize(Model(nn.Linear(4, 4), TinyTask((signature,)), {}), QuantizeOptions(), context(tmp_path))
    assert caught.value.reason is Reason.UNSUPPORTED_SCHEME
