"""onnx-tensorflow#782, litert-torch#179: a transpose around each convolution.

Here: operations that only move data are counted per target, shown as a share, and can be gated.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import Done


@pytest.mark.slow
def test_layout_operations_are_counted_and_gated(build_int8: Callable[..., Done]) -> None:
    done = build_int8("layout", max_layout_ops="{copy: 3}")
    assert done.json["targets"]["copy"]["counts"]["layout_ops"] == 4
    assert done.json["wastes"]["compute"]["by"]["copy"] == pytest.approx(0.4)
    [gate] = [g for g in done.json["gates"] if g["name"] == "max_layout_ops.copy"]
    assert (gate["limit"], gate["value"], gate["verdict"]) == (3, 4, "fail")
    assert done.code == 3
    assert build_int8("layout", max_layout_ops=4).code == 0
