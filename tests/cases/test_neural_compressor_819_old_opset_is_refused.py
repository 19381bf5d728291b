"""neural-compressor#819: an old opset silently drops per-channel quantisation."""

from __future__ import annotations

import pytest
from edgec.passes.export import ExportOptions
from pydantic import ValidationError


def test_an_old_opset_is_refused_with_the_one_that_is_needed() -> None:
    with pytest.raises(ValidationError, match=r"opset 13 loses per-channel INT8 weights.*use 21 or later"):
        ExportOptions(opset=13)


def test_the_default_holds_per_channel_weights() -> None:
    assert ExportOptions().opset >= 21
