"""Programs from ONNX files: named and sized by the task, with a golden of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from edgec.context import Context
from edgec.errors import ConversionError, EdgecError, Reason, RecipeError
from edgec.golden import OnnxRunner
from edgec.model import Program
from edgec.sources.onnx_program import import_program
from edgec.sources.section import ModelSection
from edgec.tasks.base import TaskContext
from edgec.tasks.tensors import TensorsOptions, TensorsTask
from tests.conftest import Edgec
from tests.onnx_samples import chain, initializer, qdq, save


def bring(path: Path, shape: tuple[int, ...], **options: Any) -> Program:
    folder = path.parent
    task = TensorsTask(TensorsOptions(inputs={"picture": shape}, **options), TaskContext(folder, folder, 0))  # type: ignore[dict-item]
    out = folder / "out"
    out.mkdir(exist_ok=True)
    context = Context(seed=0, threads=1, work=folder, recipe_dir=folder, cache=folder, out=out)
    return import_program(ModelSection.model_validate({"from": path.name}), task, context)


def test_the_task_names_and_sizes_the_graph(tmp_path: Path) -> None:
    program = bring(chain(tmp_path / "a.onnx", batch="N"), (2, 3, 8, 8), outputs=("scores",))
    assert program == Program.open(program.path)
    (signature,) = program.signatures
    assert [(t.name, t.shape) for t in signature.inputs] == [("picture", (2, 3, 8, 8))]
    assert [(t.name, t.shape) for t in signature.outputs] == [("scores", (2, 5))]
    model = onnx.load(str(program.onnx_path("main")))
    onnx.checker.check_model(model, full_check=True)
    assert [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim] == [2, 3, 8, 8]
    assert program.parameters == 832
    assert program.quantization is None


def test_the_golden_is_what_the_file_computes(tmp_path: Path) -> None:
    program = bring(chain(tmp_path / "a.onnx"), (1, 3, 8, 8))
    original = OnnxRunner({"main": tmp_path / "a.onnx"})
    steps = program.recording().steps
    assert steps
    for step in steps:
        expected = original.run("main", {"image": step.inputs["picture"]})["logits"]
        np.testing.assert_array_equal(step.outputs["output"], expected)


def test_an_inner_tensor_with_the_tasks_name_makes_room(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["output"]), helper.make_node("Neg", ["output"], ["picture"])]
    path = save(tmp_path / "a.onnx", nodes, [], inputs={"x": [1, 4]}, outputs={"picture": [1, 4]})
    program = bring(path, (1, 4))
    step = program.recording().steps[0]
    np.testing.assert_array_equal(step.outputs["output"], -np.maximum(step.inputs["picture"], 0))


def test_an_int8_graph_keeps_its_scales(tmp_path: Path) -> None:
    program = bring(qdq(tmp_path / "q.onnx"), (1, 2, 4, 4), outputs=("y",))
    assert program.quantization is not None
    assert program.quantization.scheme == "static"
    assert program.quantization.output_steps == (("y", 0.5),)
    assert [(layer.name, layer.op, layer.dtype, layer.axis) for layer in program.quantization.layers] == [
        ("the_conv", "Conv", "int8", 0)
    ]
    assert program.parameters == 8


@pytest.mark.parametrize(
    ("shape", "options", "says"),
    [
        ((1, 3, 9, 8), {}, "does not take the task's inputs"),
        ((1, 3, 8, 8), {"outputs": ("a", "b")}, "names 2 outputs, the model gives 1"),
    ],
)
def test_a_task_that_does_not_fit_is_refused(
    tmp_path: Path, shape: tuple[int, ...], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(RecipeError, match=says):
        bring(chain(tmp_path / "a.onnx"), shape, **options)


def test_nan_weights_old_opsets_and_damage_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EdgecError, match="`w3` are NaN") as caught:
        bring(chain(tmp_path / "a.onnx", change={"w3": np.full((8, 5), np.nan)}), (1, 3, 8, 8))
    assert caught.value.reason == Reason.NOT_FINITE
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    model = onnx.load(
        str(save(tmp_path / "b.onnx", nodes, [initializer("c", 1.0)], inputs={"x": [1]}, outputs={"y": [1]}))
    )
    model.opset_import[0].version = 9
    onnx.save(model, str(tmp_path / "b.onnx"))
    with pytest.raises(EdgecError, match="opset 9"):
        bring(tmp_path / "b.onnx", (1,))
    (tmp_path / "c.onnx").write_bytes((tmp_path / "a.onnx").read_bytes()[:500])
    with pytest.raises(EdgecError) as caught:
        bring(tmp_path / "c.onnx", (1, 3, 8, 8))
    assert caught.value.reason == Reason.BAD_CHECKPOINT


def test_a_target_that_wants_pytorch_says_so(tmp_path: Path) -> None:
    program = bring(chain(tmp_path / "a.onnx"), (1, 3, 8, 8))
    with pytest.raises(ConversionError, match="the model is an ONNX file") as caught:
        program.exported("main")
    assert caught.value.reason == Reason.UNSUPPORTED_SCHEME


@pytest.mark.slow
def test_a_recipe_from_an_onnx_file_builds(edgec: Edgec) -> None:
    chain(edgec.folder / "net.onnx", batch="N")
    (edgec.folder / "recipe.yaml").write_text(
        "version: 1\nname: net\nmodel: {from: net.onnx}\n"
        "task: {tensors: {inputs: {image: [1, 3, 8, 8]}, samples: 4}}\n"
        "targets: {onnxruntime: {}}\nmeasure: {latency_runs: 2, target_samples: 2}\n"
    )
    done = edgec("build", "recipe.yaml", "--json")
    assert (done.code, done.json["status"]) == (0, "built")
    assert [line["stage"] for line in done.json["ledger"]] == ["import", "onnxruntime"]
    assert done.json["ledger"][0]["metric"] == 1.0
    assert done.json["targets"]["onnxruntime"]["parity"]["cosine"] > 0.9999
