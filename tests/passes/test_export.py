"""What an export leaves, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from edgec.passes import export_onnx
from edgec.passes.export import DynamicDim, ExportOptions, export_program
from torch import nn

from edgec.errors import ConversionError, ParityError, Reason
from edgec.golden import OnnxRunner, TorchRunner, replay
from edgec.model import Model, Program, Signature, TensorSpec
from tests.passes.tiny import TinyTask, context, tiny_model

pytestmark = pytest.mark.slow

VECTOR = Signature("main", (TensorSpec("x", (2, 8), "float32"),), (TensorSpec("y", (2, 8), "float32"),))


def vector_task(signature: Signature = VECTOR) -> TinyTask:
    return TinyTask((signature,), make=lambda g: (torch.randn((2, 8), generator=g),))


def export(module: nn.Module, task: TinyTask, folder: Path, **options: object) -> Program:
    return export_program(Model(module.eval(), task, {}), ExportOptions(**options), context(folder), baseline=None)  # type: ignore[arg-type]


def test_program_holds_both_forms_with_the_signature_s_names(tmp_path: Path) -> None:
    program = export_program(tiny_model(), ExportOptions(), context(tmp_path), baseline=tiny_model())
    model = onnx.load(program.onnx_path("main"))
    assert [i.name for i in model.graph.input] == ["image"]
    assert [o.name for o in model.graph.output] == ["logits"]
    assert model.opset_import[0].version == 21
    assert Program.open(program.path) == program
    assert program.baseline is not None and program.baseline.quantization is None
    exported = TorchRunner({"main": program.exported("main").module()}, program.signatures)
    recording = program.recording()
    for got, step in zip(replay(exported, program.signatures, recording.steps), recording.steps, strict=True):
        np.testing.assert_allclose(got["logits"], step.outputs["logits"], rtol=1e-4, atol=1e-6)


def test_two_exports_give_the_same_bytes_and_hold_no_path_of_this_machine(tmp_path: Path) -> None:
    first, second = (
        export_program(tiny_model(), ExportOptions(), context(tmp_path / name), baseline=None) for name in "ab"
    )
    for name in ("main.onnx", "main.pt2", "program.json", "recording.safetensors"):
        assert (first.path / name).read_bytes() == (second.path / name).read_bytes(), name
    assert str(Path(__file__).parent).encode() not in (first.path / "main.onnx").read_bytes()


def test_a_wrong_weight_in_the_onnx_file_is_caught_before_any_target_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(model: object) -> None:
        import onnx_ir as ir

        assert isinstance(model, ir.Model)
        value = model.graph.initializers["head.weight"]
        assert value.const_value is not None
        value.const_value = ir.tensor(value.const_value.numpy()[::-1].copy(), name="head.weight")

    monkeypatch.setattr(export_onnx, "transpose_quantized_weights", spoil)
    with pytest.raises(ParityError, match=r"step 0: output `logits` of ONNX differs"):
        export_program(tiny_model(), ExportOptions(), context(tmp_path), baseline=None)


def test_nan_weights_are_named(tmp_path: Path) -> None:
    model = tiny_model()
    model.module.head.weight.data[0, 0] = float("nan")  # type: ignore[union-attr, operator]
    with pytest.raises(ConversionError, match=r"`head\.weight` holds 1 values") as caught:
        export_program(model, ExportOptions(), context(tmp_path), baseline=None)
    assert caught.value.reason is Reason.NOT_FINITE


def test_outputs_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    class Divides(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / (x - x)

    with pytest.raises(ConversionError, match="`y` is not finite") as caught:
        export(Divides(), vector_task(), tmp_path)
    assert caught.value.reason is Reason.NOT_FINITE


def test_data_dependent_control_flow_names_the_line(tmp_path: Path) -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 0:  # this line
                return x
            return -x

    with pytest.raises(ConversionError, match=r"test_export\.py:\d+: if x\.sum\(\) > 0") as caught:
        export(Branches(), vector_task(), tmp_path)
    assert caught.value.reason is Reason.EXPORT_FAILED


def test_a_dynamic_dimension_of_the_recipe_reaches_inputs_and_outputs(tmp_path: Path) -> None:
    batch = DynamicDim(axes={"x": 0}, least=1, greatest=16)
    program = export(nn.Linear(8, 8), vector_task(), tmp_path, dynamic={"batch": batch})
    signature = program.signatures[0]
    assert signature.dynamic == (("batch", 1, 16),)
    assert signature.inputs[0].shape == ("batch", 8) and signature.outputs[0].shape == ("batch", 8)
    runner = OnnxRunner({"main": program.onnx_path("main")})
    for size in (1, 5, 16):
        assert runner.run("main", {"x": np.ones((size, 8), np.float32)})["y"].shape == (size, 8)


def test_an_unknown_dynamic_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="no axis 0 of input `z`"):
        export(nn.Linear(8, 8), vector_task(), tmp_path, dynamic={"batch": DynamicDim(axes={"z": 0}, greatest=4)})


def test_steps_carry_state_between_signatures(tmp_path: Path) -> None:
    class Adds(nn.Module):
        def forward(self, x: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x + total, x + total

    specs = [TensorSpec(n, (2, 8), "float32") for n in ("x", "total", "y", "total_out")]
    signature = Signature("main", (specs[0], specs[1]), (specs[2], specs[3]), state=(("total", "total_out"),))

    class Task(TinyTask):
        def record(self):  # type: ignore[no-untyped-def]
            steps = super().record()
            for step in steps:
                step.inputs.pop("total")
            return steps

    task = Task((signature,), make=lambda g: (torch.randn((2, 8), generator=g), torch.zeros(2, 8)))
    program = export(Adds(), task, tmp_path)
    steps = program.recording().steps
    total = sum(step.inputs["x"] for step in steps)
    np.testing.assert_allclose(steps[-1].outputs["total_out"], total, rtol=1e-6)
    assert "total_out" not in steps[0].outputs
