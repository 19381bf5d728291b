"""Small tokenizers, trained here and now by Hugging Face's library, with the ways of splitting text that are in use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

TEXT = """\
The quick brown fox jumps over the lazy dog; they'll've said: "don't", 12345 times, in 1999 and 2024-11-29.
def merge(left: int, right: int) -> int:\n\treturn left << 16 | right  # 0xFF\n\n\nclass Ωmega:\r\n    pass\r\n
안녕하세요 세계! 오늘은 날씨가 정말 좋네요. 한글은 아름답다. 世界你好，人工智能正在改变一切。これは日本語です。
مرحبا بالعالم ١٢٣، שלום עולם, Привет, мир! Ünïcödé naïve façade e\u0301 o\u0308 ñ Ⅷ ½ ² ٣ 𝟘 𐍈
👩‍👩‍👧‍👦 👍🏽 🇰🇷 🏳️‍🌈 ☃️ \u00a0\u3000\u2028 \x00\x07\x1b\x7f\x85 \u200b\ufeff \ue000 \U000e0041 \U0010ffff \ufffd
'S 'T 'RE 'ſ ''s x's   trailing   \t \t\t  \n \n\n  end  <|im_start|>user\nhi<|im_end|>  ﷽ ﬁ ǅ ʰ ꙮ ʼn
"""

ADDED_TEXT = (
    "a  <l>  b\t<l><r>  \n c <both>\u3000<both> d wordy word word. sword x한글 한글 <n>  x<n>x <n> y é!é "
    "\n\n  \n\n   e    <|im_end|>  <r>\n\n<l>"
)


def split(regex: str) -> list[Any]:
    return [
        pre_tokenizers.Split(Regex(regex), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


STYLES: dict[str, list[Any]] = {
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "gpt2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "gpt2-prefix": [pre_tokenizers.ByteLevel(add_prefix_space=True)],
    "gpt2-split": split(GPT2),
    "llama3": split(LLAMA3),
    "cl100k": split(CL100K),
    "qwen2": split(QWEN2),
    "digit-runs": [pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(add_prefix_space=True)],
}

SPECIAL = [AddedToken(t, special=True, normalized=False) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
# One of each flag, some inside one another, some white space.
ADDED = [
    AddedToken("<l>", lstrip=True, normalized=False),
    AddedToken("<r>", rstrip=True, normalized=False),
    AddedToken("<both>", lstrip=True, rstrip=True, special=True, normalized=False),
    AddedToken("word", single_word=True, normalized=False),
    AddedToken("한글", single_word=True),
    AddedToken("<n>", normalized=True, rstrip=True),
    AddedToken("<n>x", normalized=True),
    AddedToken("é!", normalized=False),
    AddedToken("\n\n", rstrip=True, normalized=False),
    AddedToken("   ", normalized=True),
]


def byte_characters() -> list[str]:
    """GPT-2's alphabet: the character that stands for each byte."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(b if b in itself else next(others)) for b in range(256)]


def train(style: str, *, added: bool = False, alphabet: bool = True, vocabulary: int = 700) -> Tokenizer:
    """A byte-level BPE tokenizer of `style`; with `added`, one added token of each flag; without `alphabet`, not every
    byte has a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(STYLES[style])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if alphabet else [],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    if added:
        tokenizer.add_tokens(ADDED)
    return tokenizer


def write(tokenizer: Tokenizer, path: Path, **model: Any) -> Path:
    """Save as a tokenizer.json, with some of the model's fields replaced."""
    content = json.loads(tokenizer.to_str())
    content["model"] |= model
    path.write_text(json.dumps(content))
    return path
