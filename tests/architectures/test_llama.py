"""Llama: the dense form against transformers, the configuration's refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from edgec.architectures.llama import Llama, LlamaConfig
from edgec.architectures.rope import inverse_frequencies
from edgec.errors import SourceError
from tests.tasks.tiny_lm import VOCAB, llama

LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def reference(model: Llama) -> torch.nn.Module:
    """transformers' Llama with the same weights."""
    from transformers import LlamaConfig as Theirs
    from transformers import LlamaForCausalLM

    c = model.config
    config = Theirs(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.norm_eps,
        max_position_embeddings=128,
        tie_word_embeddings=c.tied,
        attention_bias=c.attention_bias,
        mlp_bias=c.mlp_bias,
        rope_parameters={"rope_theta": c.rope_theta, **(c.rope_scaling or {"rope_type": "default"})},
    )
    theirs = LlamaForCausalLM(config).eval()
    names = {k if k.startswith("lm_head") else f"model.{k}": v for k, v in model.state_dict().items()}
    theirs.load_state_dict(names)
    return theirs


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": False, "attention_bias": True, "mlp_bias": True},
        {"kv_heads": 6, "head_dim": 10, "rope_theta": 1e5, "norm_eps": 1e-3},
        {"kv_heads": 1, "rope_scaling": LINEAR},
        {"rope_scaling": LLAMA3},
        {"rope_scaling": YARN},
    ],
    ids=["tied", "untied with biases", "multi-head", "multi-query, linear", "llama3", "yarn"],
)
def test_dense_forward_equals_transformers(changes: dict[str, Any]) -> None:
    model = llama(**changes)
    ids = torch.randint(0, VOCAB, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want, got = reference(model)(ids).logits, model(ids)
    assert want.abs().max() > 0.1
    assert (want - got).abs().max() < 1e-5


def test_tied_head_is_the_embedding() -> None:
    model, untied = llama(), llama(tied=False)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert untied.lm_head.weight is not untied.embed_tokens.weight


def test_factors_are_what_llama3_computes() -> None:
    plain, _ = inverse_frequencies(8, 1e4, None)
    scaled, _ = inverse_frequencies(8, 1e4, LLAMA3)
    assert not torch.equal(plain, scaled)
    again, _ = inverse_frequencies(8, 1e4, {"rope_type": "factors", "factors": (plain / scaled).tolist()})
    torch.testing.assert_close(again, scaled)


def test_config_survives_json() -> None:
    import json

    config = llama(rope_scaling=LLAMA3).config
    assert LlamaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"heads": 5}, "can't share"),
        ({"head_dim": 7}, "even"),
        ({"layers": 0}, "at least 1"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "`dynamic` is not supported"),
    ],
)
def test_impossible_configuration_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SourceError, match=says):
        LlamaConfig.from_dict({**llama().config.to_dict(), **changes})


def test_unknown_key_of_a_configuration_is_refused() -> None:
    with pytest.raises(SourceError, match="unknown keys: experts"):
        LlamaConfig.from_dict({**llama().config.to_dict(), "experts": 8})
