"""A tiny language model for tests: a random Llama, a byte-level tokenizer, two texts, and the task over them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgec.tasks.base import TaskContext
from edgec.tasks.causal_lm import CausalLm, CausalLmOptions

if TYPE_CHECKING:
    from edgec.architectures.llama import Llama

VOCAB = 258  # every byte, and two special tokens
# Sizes that nothing divides by accident: 3 query heads per key head, chunks that blocks don't divide.
SIZES: dict[str, Any] = {"context": 32, "block_size": 4, "blocks": 20, "batch": 3, "chunk": 6, "decode_tokens": 5}


def llama(seed: int = 0, **changes: Any) -> Llama:
    """A random Llama in evaluation mode, its weights large enough for attention to matter."""
    import torch

    from edgec.architectures.llama import Llama, LlamaConfig

    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "layers": 2, "heads": 6, "kv_heads": 2}
    model = Llama(LlamaConfig(**{**sizes, "head_dim": 8, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.3, 0.3) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    return model.eval()


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(["<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def task(folder: Path, seed: int = 0, **options: Any) -> CausalLm:
    """The task over texts in `folder` (made here); 200 and 150 tokens, one for each byte."""
    write_tokenizer(folder)
    (folder / "held-out.txt").write_text("".join(chr(97 + i * i % 23) for i in range(200)))
    (folder / "other.txt").write_text("".join(chr(65 + i * i % 19) for i in range(150)))
    texts = {"evaluation": {"from": "held-out.txt"}, "calibration": {"from": "other.txt"}}
    checked = CausalLmOptions.model_validate({**texts, **SIZES, **options})
    return CausalLm(checked, TaskContext(folder, folder / "cache", seed, folder))
