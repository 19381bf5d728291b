"""onnx2tf#942: a badly calibrated model, and nothing noticed. One of the invariants: the size shrinks as predicted.

Here: the quantise pass predicts the size that its weights will have, and the ledger shows both.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import Done


@pytest.mark.slow
def test_int8_weights_take_what_was_predicted(build_int8: Callable[..., Done]) -> None:
    ledger = {s["stage"]: s for s in build_int8("").json["ledger"]}
    quantized = ledger["quantize"]
    assert quantized["predicted_bytes"] == pytest.approx(quantized["bytes"], rel=0.1)
    assert quantized["bytes"] < ledger["source"]["bytes"]
    assert quantized["factor"] == pytest.approx(ledger["source"]["bytes"] / quantized["bytes"])
