"""The Triton kernel where there is no GPU: interpreted, against attention in float64; and compiled, but not run.

On a GPU: tests/gpu. bfloat16 is run there only: the interpreter multiplies its bits as integers.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

NEEDED = "Triton is not installed (it comes with CUDA builds of PyTorch); `pip install triton` to run this on the CPU"


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason=NEEDED),
]


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


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_the_kernel_compiles_for_gpus_that_are_not_here(dtype: str, capability: int) -> None:
    """Down to machine code, with the sizes of SmolLM2-135M: decoding, and prompts."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from edgec.reference.triton_attention import POSITIONS, PREFILL_ROWS, ROWS, _kernel

    for rows in (ROWS, PREFILL_ROWS):
        sizes = {"BLOCK_SIZE": 16, "GROUP": 3, "D": 64, "D_PADDED": 64, "TILE": rows // 3, "ROWS": rows}
        sizes["POSITIONS"] = POSITIONS
        floats = dict.fromkeys(("out", "q", "k_pool", "v_pool"), f"*{dtype}")
        tables = dict.fromkeys(("block_tables", "context_lens", "query_start"), "*i32")
        types = floats | tables | {"scale": "fp32"} | dict.fromkeys(sizes, "constexpr")
        signature = {name: types.get(name, "i32") for name in _kernel.arg_names}
        constants = {(_kernel.arg_names.index(name),): value for name, value in sizes.items()}
        source = ASTSource(_kernel, signature, constants, attrs={})
        assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
