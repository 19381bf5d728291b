"""nncf#1936: the quantised file is larger than the original.

Here: the size is predicted, a surprise is a warning in the ledger, and a gate on size or ratio fails.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import Done


@pytest.mark.slow
def test_a_file_larger_than_its_float_twin_is_reported(build_int8: Callable[..., Done]) -> None:
    done = build_int8("large")
    assert done.code == 0  # nobody asked for a size: it is said, and the build goes on
    target = done.json["targets"]["copy"]
    assert target["bytes"] > target["float_bytes"]
    warnings = " ".join(target["warnings"])
    assert "its float twin" in warnings and "were predicted" in warnings
    [line] = [s for s in done.json["ledger"] if s["stage"] == "copy"]
    assert line["bytes"] > line["predicted_bytes"] and line["warnings"] == target["warnings"]


@pytest.mark.slow
def test_a_gate_on_the_ratio_fails(build_int8: Callable[..., Done]) -> None:
    done = build_int8("large", min_compression=1)
    assert done.code == 3
    assert "min_compression.copy" in done.json["error"]["message"]


@pytest.mark.slow
def test_a_graph_that_outweighs_a_tiny_models_weights_is_said_too(build_int8: Callable[..., Done]) -> None:
    """276 weights: what INT8 saves on them, the quantize and dequantize nodes more than spend."""
    target = build_int8("").json["targets"]["copy"]
    assert target["float_bytes"] <= target["bytes"] < 10_000
    assert target["warnings"] == [
        f"the artefact has {target['bytes']:,} bytes, and its float twin {target['float_bytes']:,}"
    ]
