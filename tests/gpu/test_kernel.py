"""The Triton kernel, compiled, against attention in float64; and decoding as CUDA graphs against decoding without."""

from __future__ import annotations

import pytest
import torch

from edgec.reference.engine import ReferenceEngine
from edgec.reference.options import ReferenceOptions
from edgec.runtime.sampling import Sampling
from tests.paged_cases import CASES, Case, make_batch
from tests.reference.checkpoints import random_llama

# Rounding of the inputs' type in one product of probabilities and values of size 1.
LIMITS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_equals_float64_attention(case: Case, dtype: torch.dtype) -> None:
    from edgec.reference.triton_attention import paged_attention

    batch = make_batch(case, dtype, "cuda")
    found = paged_attention(*batch.arguments).double().cpu()
    assert (found - batch.expected).abs().max().item() < LIMITS[dtype]


def answers(prompts: list[list[int]], **options: object) -> list[list[int]]:
    chosen = ReferenceOptions(device="cuda", context=512, **options)  # type: ignore[arg-type]
    sampling = Sampling(max_tokens=40, ignore_eos=True)
    with ReferenceEngine(random_llama(), None, chosen) as engine:
        found = [one.tokens for [one] in engine.answer(prompts, sampling)]
        engine.check()
    return found


@pytest.mark.parametrize("count", [1, 2, 3, 7, 12])
def test_graphs_change_nothing(count: int) -> None:
    prompts = [[(7 * i + j) % 250 for j in range(3 + 5 * i)] for i in range(count)]
    plain = answers(prompts, cuda_graphs=False, max_batch=12)
    assert answers(prompts, cuda_graphs=True, max_batch=12) == plain
    assert answers(prompts, cuda_graphs=True, max_batch=12, step_tokens=16) == plain  # prompts among decoding
