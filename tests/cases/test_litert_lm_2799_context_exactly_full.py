"""LiteRT-LM#2799: a crash when the context is exactly full.

Right behaviour: the answer ends with "length" at the last position, and a prompt that leaves no room is refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from edgec.runtime.abi import Finish
from edgec.runtime.engine import Engine, EngineOptions
from edgec.runtime.failures import EngineError
from edgec.runtime.sampling import Sampling
from tests.tiny_bundle import write_tiny_bundle

pytestmark = pytest.mark.slow  # the core has to be compiled

GREEDY = Sampling(temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("block_size", [4, 16, 64])
@pytest.mark.parametrize("context", [64, 65, 100, 127])
def test_filled_exactly_and_one_over(tmp_path: Path, block_size: int, context: int) -> None:
    bundle = write_tiny_bundle(tmp_path)
    with Engine(bundle, EngineOptions(context=context, block_size=block_size)) as engine:
        for length in (1, context - 2, context - 1):
            (only,) = engine.answer([[3] * length], GREEDY)[0]
            assert len(only.tokens) == context - length
            assert only.finish is Finish.LENGTH
        for length in (context, context + 1, 4 * context):
            with pytest.raises(EngineError, match=r"room|context"):
                engine.generate([3] * length, GREEDY)
        assert engine.stats().blocks_owned == 0
