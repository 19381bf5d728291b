"""A tiny Llama as people have them: a Hugging Face folder, and a recipe over it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from edgec.architectures.llama import Llama, LlamaConfig
from tests.fake_engine import SPECIAL, TEMPLATE

CONFIG = LlamaConfig(
    vocab_size=260, hidden_size=48, intermediate_size=80, layers=2, heads=6, kv_heads=2, head_dim=8, max_positions=4096
)
END = 257  # <|im_end|>

RECIPE = """\
version: 1
name: tiny-llm
model: {{from: {model}}}
task:
  causal-lm:
    evaluation: {{from: text.txt}}
    context: 32
    block_size: 4
    blocks: 20
    batch: 2
    chunk: 8
    windows: 2
passes: [{passes}]
targets:
  native: {{}}
gates: {{max_drop: null, compare: [native.kl <= 9]}}
"""
WEIGHT_ONLY = "quantize: {scheme: weight-only}"


def random_llama(seed: int = 0) -> Llama:
    """In evaluation mode, its weights large enough for every position to matter."""
    model = Llama(CONFIG)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 2 / parameter.shape[1] ** 0.5, generator=generator)
    return model.eval()


def write_huggingface(folder: Path, *, tokenizer: bool = True) -> Llama:
    """Write a folder as `save_pretrained` does; gives the model that is in it."""
    folder.mkdir(parents=True)
    model = random_llama()
    state = {n: t.contiguous() for n, t in model.state_dict().items() if n != "lm_head.weight"}
    save_file({f"model.{name}": tensor for name, tensor in state.items()}, folder / "model.safetensors")
    c = CONFIG
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "max_position_embeddings": c.max_positions,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer:
        write_tokenizer(folder)
    return model


def write_tokenizer(folder: Path) -> None:
    """A token for each byte, and two special ones; the chat template in a file of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def write_recipe(folder: Path, *, passes: str = WEIGHT_ONLY, model: str = "hf") -> Path:
    """A recipe in `folder`, over a checkpoint and a text that are written there, too."""
    if not (folder / "hf").is_dir():
        write_huggingface(folder / "hf")
    (folder / "text.txt").write_text("".join(chr(97 + i * i % 23) for i in range(200)))
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(model=model, passes=passes))
    return path
