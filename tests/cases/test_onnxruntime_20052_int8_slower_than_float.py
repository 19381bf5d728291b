"""onnxruntime#20052, ncnn#1574, coremltools#929: the INT8 model is slower than the float one, and nobody looked.

Here: an artefact's latency is measured in turns with its float twin's, in one run, and a gate can demand a ratio.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import Done


@pytest.mark.slow
def test_latency_stands_beside_the_float_twins_and_can_be_gated(build_int8: Callable[..., Done]) -> None:
    slow = build_int8("slow", min_speedup=1.0)
    target = slow.json["targets"]["copy"]
    assert target["latency_ms"]["p50"] > target["float_latency_ms"]["p50"] + 15
    assert slow.code == 3 and slow.json["error"]["reason"] == "gate"
    assert [(g["name"], g["verdict"]) for g in slow.json["gates"] if g["name"].startswith("min_speedup")] == [
        ("min_speedup.copy", "fail")
    ]


@pytest.mark.slow
def test_the_gate_holds_when_the_ratio_does(build_int8: Callable[..., Done]) -> None:
    done = build_int8("", max_latency_ratio=1000)
    assert done.code == 0
    assert [g["verdict"] for g in done.json["gates"] if g["name"] == "max_latency_ratio.copy"] == ["pass"]
