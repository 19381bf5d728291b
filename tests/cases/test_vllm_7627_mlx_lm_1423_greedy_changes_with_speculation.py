"""vllm#7627, mlx-lm#1423: greedy output changes when speculation is on.

Right behaviour: at temperature 0 tokens, log-probabilities and text are those of plain decoding, bit for bit, whoever
proposes, however many, and whoever shares the batch.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from edgec.runtime.abi import Speculation
from edgec.runtime.sampling import Sampling
from tests.drafting import WHO, ask, open_engine, prompts
from tests.tiny_bundle import write_tiny_bundle

pytestmark = pytest.mark.slow  # the core has to be compiled


@pytest.mark.parametrize("who", WHO)
def test_greedy_is_bitwise_plain_decoding(tmp_path: Path, who: Speculation) -> None:
    bundle = write_tiny_bundle(tmp_path, draft=True)
    sampling = Sampling(max_tokens=30, logprobs=2, ignore_eos=True)
    with open_engine(bundle) as engine:
        plain = ask(engine, prompts(), sampling)
    for length in range(9):  # 0: as many as pays
        with open_engine(bundle, who, length) as engine:
            for batch in (1, 2, 8):
                assert ask(engine, prompts(), sampling, batch) == plain
            stats = engine.stats()
        assert stats.drafted_tokens > 0 or length == 0
        assert stats.answer_tokens == 3 * 8 * 30
