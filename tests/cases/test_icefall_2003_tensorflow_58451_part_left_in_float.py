"""icefall#2003, tensorflow#58451: a whole model quantised one way loses half its accuracy, or does not convert.

Here: parts of a model have schemes of their own, a part can be left in float, and the targets take such a mixture as it
is, say how much of it is float, and compute what the golden computes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from edgec.passes.export import ExportOptions, export_program
from edgec.passes.quantize import QuantizeOptions, quantize

from edgec.golden import replay
from edgec.model import Program
from edgec.parity import compare
from edgec.registry import get_target
from tests.passes.tiny import context, tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """A depthwise CNN in INT8, of which one block and the head are left in float."""
    folder = tmp_path_factory.mktemp("mixed")
    options = QuantizeOptions(exclude=("features.3",), exclude_types=("linear",), sensitivity=False)
    result = quantize(tiny_model(), options, context(folder / "quantize"))
    return export_program(result, ExportOptions(), context(folder / "program"), baseline=None)


@pytest.mark.parametrize(("target", "least", "most"), [("tflite", 3, 12), ("onnxruntime", 3, 12)])
def test_a_part_left_in_float_converts_and_is_counted(
    mixed: Program, tmp_path: Path, target: str, least: int, most: int
) -> None:
    entry = get_target(target)
    artifact = entry.convert(mixed, entry.options(), context(tmp_path / "artifact"))
    assert least <= artifact.counts["float_ops"] <= most  # two convolutions, the head, and what lies between them
    assert mixed.quantization is not None
    steps = mixed.recording().steps
    outputs = replay(entry.open(artifact), mixed.signatures, steps)
    found = compare(outputs, [s.outputs for s in steps], dict(mixed.quantization.output_steps))
    assert found.cosine > 0.9999
    assert found.relative_error < 0.02
