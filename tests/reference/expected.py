"""What the tiny Llama of checkpoints.py answers, by its dense form and nothing else."""

from __future__ import annotations

from functools import cache

import torch

from tests.reference.checkpoints import random_llama

_model = cache(random_llama)


@torch.no_grad()
def greedy(prompt: list[int], count: int) -> list[int]:
    """The likeliest next token, so many times."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(_model()(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@torch.no_grad()
def log_probabilities(tokens: list[int]) -> torch.Tensor:
    """(T, vocab) float64: row t is about the token after position t."""
    return _model()(torch.tensor([tokens]))[0].double().log_softmax(-1)
