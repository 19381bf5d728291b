"""A tiny random model, and engines over it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from edgec.architectures.llama import Llama, LlamaConfig
from edgec.reference.engine import ReferenceEngine
from edgec.reference.options import ReferenceOptions

VOCAB, CONTEXT = 300, 256
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    max_positions=CONTEXT,
    tied=False,
)


@cache
def tiny_model() -> Llama:
    """With weights large enough that every position matters, and the next token does not repeat the last."""
    generator = torch.Generator().manual_seed(0)
    model = Llama(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 2 / parameter.shape[1] ** 0.5, generator=generator)
    return model.eval()


def engine(**options: Any) -> ReferenceEngine:
    chosen = {"max_batch": 8, "step_tokens": 32, "blocks": 64, **options}
    return ReferenceEngine(tiny_model(), None, ReferenceOptions(**chosen), eos=(1,))


def prompts(count: int, *, longest: int = 70, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(2, VOCAB, random.integers(1, longest + 1)).tolist() for _ in range(count)]


def dense_logits(tokens: list[int]) -> np.ndarray:
    """(T, vocab), by the model's own dense form."""
    with torch.no_grad():
        found: np.ndarray = tiny_model()(torch.tensor([tokens]))[0].numpy()
    return found
