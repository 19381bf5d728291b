"""What `inspect` says of TFLite files, on files that need no converter (tests/tflite_samples.py)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from edgec.errors import Reason, SourceError
from edgec.inspection.facts import Port, Quantized, Weights
from edgec.inspection.tflite import inspect_tflite
from tests.tflite_samples import fully_connected


def test_ops_ports_weights_and_scales(tmp_path: Path) -> None:
    path = fully_connected(tmp_path / "a.tflite")
    found = inspect_tflite(path)
    (graph,) = found.graphs
    assert graph.name == "serve"
    assert graph.ops == {"FULLY_CONNECTED": 1, "RELU": 1}
    assert graph.inputs == (Port("image", ("?", 4), "int8", 0.5, -3),)
    assert graph.outputs == (Port("logits", (1, 3), "int8", 0.25, 7),)
    assert found.weights == (Weights("int8", 1, 12, 12), Weights("int32", 1, 3, 12))
    assert found.quantized == (
        Quantized("activations", "int8", "per tensor", 3, 0, 0.25, 0.5),
        Quantized("weights", "int8", "per channel", 1, 12, pytest.approx(0.1), pytest.approx(0.3)),
        Quantized("biases", "int32", "per channel", 1, 3, pytest.approx(0.05), pytest.approx(0.15)),
    )
    assert found.metadata["min_runtime_version"] == "1.14.0"


def test_a_truncated_file_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    path = fully_connected(tmp_path / "a.tflite")
    whole = path.read_bytes()
    for length in range(0, len(whole) - 64, 11):
        path.write_bytes(whole[:length])
        with pytest.raises(SourceError) as caught:
            inspect_tflite(path)
        assert caught.value.reason == Reason.BAD_CHECKPOINT, length


def test_changed_bytes_never_raise_anything_but_a_source_error(tmp_path: Path) -> None:
    path = fully_connected(tmp_path / "a.tflite")
    whole = path.read_bytes()
    generator = random.Random(0)
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(generator.choice((1, 5, 30))):
            data[generator.randrange(len(data))] = generator.randrange(256)
        path.write_bytes(data)
        try:
            inspect_tflite(path)
        except SourceError:
            refused += 1
    assert refused > 100
