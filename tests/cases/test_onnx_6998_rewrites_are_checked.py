"""onnx#6998: a simplifier produced an invalid node. Here each graph is checked after its rewrites, before any use."""

from __future__ import annotations

from pathlib import Path

import pytest
from edgec.passes import export_onnx
from edgec.passes.export import ExportOptions, export_program

from edgec.errors import ConversionError, Reason
from tests.passes.tiny import context, tiny_model

pytestmark = pytest.mark.slow


def test_an_invalid_node_stops_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simplify = export_onnx.simplify

    def break_a_node(model: object) -> None:
        import onnx_ir as ir

        simplify(model)  # type: ignore[arg-type]
        assert isinstance(model, ir.Model)
        convolution = next(n for n in model.graph if n.op_type == "Conv")
        convolution.attributes["no_such_attribute"] = ir.AttrInt64("no_such_attribute", 1)

    monkeypatch.setattr(export_onnx, "simplify", break_a_node)
    with pytest.raises(ConversionError, match=r"main\.onnx is not valid ONNX: .*no_such_attribute") as caught:
        export_program(tiny_model(), ExportOptions(), context(tmp_path), baseline=None)
    assert caught.value.reason is Reason.EXPORT_FAILED
