"""Reference = Hugging Face `transformers`, greedy, token for token, float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgec.architectures.llama import Llama
from edgec.reference.engine import ReferenceEngine
from edgec.reference.options import ReferenceOptions
from edgec.runtime.sampling import Sampling
from tests.reference.tiny import prompts, tiny_model

ROOT = Path(__file__).parent.parent.parent

TEXTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "def fibonacci(n):\n",
    "Q: Why is the sky blue?\nA:",
)


def in_transformers(model: Llama) -> Any:
    """The same weights in Hugging Face's own class; the names are ours with `model.` in front."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = model.config
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_hidden_layers=c.layers,
            num_attention_heads=c.heads,
            num_key_value_heads=c.kv_heads,
            head_dim=c.head_dim,
            rms_norm_eps=c.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
            max_position_embeddings=c.max_positions,
            tie_word_embeddings=c.tied,
        )
    ).eval()
    state = {k if k.startswith("lm_head") else f"model.{k}": v for k, v in model.state_dict().items()}
    missing, unknown = theirs.load_state_dict(state, strict=False)
    assert not unknown
    assert all("rotary" in name for name in missing)
    return theirs


def greedy(theirs: Any, prompt: list[int], count: int) -> list[int]:
    with torch.no_grad():
        out = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


def compare(model: Llama, asked: list[list[int]], count: int) -> None:
    theirs = in_transformers(model)
    options = ReferenceOptions(max_batch=8, step_tokens=24, blocks=64 + 8 * count // 16)
    engine = ReferenceEngine(model, None, options)
    together = engine.answer(asked, Sampling(max_tokens=count))
    again = engine.answer(asked, Sampling(max_tokens=count))  # prompts are cached now
    engine.check()
    assert engine.stats().cached_tokens > 0
    for prompt, [answer], [cached] in zip(asked, together, again, strict=True):
        assert answer.tokens == greedy(theirs, prompt, count)
        assert cached.tokens == answer.tokens
    text = max(asked, key=len)
    with torch.no_grad():
        wanted = theirs(torch.tensor([text])).logits[0].numpy()
    assert np.abs(engine.logits(text) - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.slow  # transformers takes its time to import
def test_a_random_model_answers_as_in_transformers() -> None:
    compare(tiny_model(), prompts(6, seed=11), 40)


@pytest.mark.slow
@pytest.mark.network
def test_smollm2_answers_as_in_transformers() -> None:
    from edgec.reference.load import load

    loaded = load(ROOT / "recipes/smollm2-135m.yaml")
    assert loaded.tokenizer is not None
    compare(loaded.model, [loaded.tokenizer.encode(text) for text in TEXTS], 32)
