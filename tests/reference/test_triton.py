"""The Triton kernel against attention in float64, interpreted on the CPU. On a GPU: tests/gpu.

bfloat16 is left to the GPU: the interpreter multiplies its bits as integers.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

NEEDED = "Triton is not installed (it comes with CUDA builds of PyTorch); `pip install triton` to run this on the CPU"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason=NEEDED)
def test_the_kernel_equals_float64_attention_when_interpreted() -> None:
    """In a process of its own: Triton decides at its import whether it interprets."""
    code = """
import torch
from edgec.reference.triton_attention import paged_attention
from tests.paged_cases import CASES, make_batch
for dtype, limit in ((torch.float32, 1e-5), (torch.float16, 3e-3)):
    for case in CASES:
        batch = make_batch(case, dtype)
        error = (paged_attention(*batch.arguments).double() - batch.expected).abs().max().item()
        assert error < limit, (case.name, dtype, error)
        print(case.name, dtype, error)
"""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    assert len(run.stdout.splitlines()) == 20
