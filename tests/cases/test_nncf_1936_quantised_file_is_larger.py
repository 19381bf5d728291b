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
def test_a_file_of_the_size_that_was_predicted_is_no_surprise(build_int8: Callable[..., Done]) -> None:
    assert build_int8("").json["targets"]["copy"]["warnings"] == []
