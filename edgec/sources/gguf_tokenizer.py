"""A GGUF file's tokenizer as a `tokenizers` one, so that text becomes the tokens the model was trained on.

Byte-level BPE ("gpt2") is rebuilt from its vocabulary and merges; how text is split before merging is not in the file
but only named (`tokenizer.ggml.pre`), so the splits of known names are written down here, after llama.cpp's
src/llama-vocab.cpp.
SentencePiece vocabularies ("llama") are BPE whose merges are ranked by the score of what they make.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgec.errors import Reason, SourceError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4  # ggml's token types; 1 is an ordinary token, 6 a byte
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = ("default", "gpt-2", "smollm", "llama-bpe", "llama3")
_SPACE = "▁"


def build_tokenizer(meta: dict[str, Any], path: Path) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes. No special tokens are added when encoding.

    Raises:
        SourceError: a kind of tokenizer or of splitting that isn't known here.
    """
    from tokenizers import AddedToken

    kind = meta.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(meta, path)
    elif kind == "llama":
        tokenizer = _sentencepiece(meta)
    else:
        raise SourceError(
            f"{path.name}: its tokenizer is of the kind {kind!r}",
            hint="known: gpt2 (byte-level BPE) and llama (SentencePiece)",
            reason=Reason.BAD_CHECKPOINT,
        )
    tokens, types = meta["tokenizer.ggml.tokens"], meta.get("tokenizer.ggml.token_type", [])
    special = [
        AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types, strict=False) if k == _CONTROL
    ]
    plain = [AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=False) if k == _USER_DEFINED]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
    return tokenizer


def _byte_level(meta: dict[str, Any], path: Path) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    name = meta.get("tokenizer.ggml.pre", "default")
    if name not in _SPLITS:
        raise SourceError(
            f"{path.name}: its tokenizer splits text as {name!r}, which isn't known",
            hint=f"known: {', '.join(_SPLITS)}; or take the model from its Hugging Face folder, with tokenizer.json",
            reason=Reason.BAD_CHECKPOINT,
        )
    llama3 = name in ("llama-bpe", "llama3")
    merges = [tuple(m.split(" ", 1)) for m in meta["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(meta["tokenizer.ggml.tokens"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=llama3))
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not llama3)
    before: list[Any] = []
    if name == "smollm":
        before = [pre_tokenizers.Digits(individual_digits=True)]
    elif llama3:
        before = [pre_tokenizers.Split(Regex(_LLAMA3), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(meta: dict[str, Any]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, scores = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.scores"]
    vocab = {token: i for i, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-score, vocab[left], vocab[right], (left, right)))
    ranked.sort(key=lambda merge: merge[:3])
    unknown = tokens[int(meta.get("tokenizer.ggml.unknown_token_id", 0))]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=[m[3] for m in ranked], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    if meta.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(_SPACE))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if meta.get("tokenizer.ggml.add_space_prefix", True):
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def tokenizer_settings(meta: dict[str, Any], max_positions: int) -> dict[str, Any]:
    """What Hugging Face keeps in tokenizer_config.json: special tokens by role, and the chat template."""
    tokens = meta["tokenizer.ggml.tokens"]
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_positions}
    for role, name in roles.items():
        index = meta.get(f"tokenizer.ggml.{name}_token_id")
        if index is not None and 0 <= index < len(tokens):
            settings[role] = tokens[index]
    settings["add_bos_token"] = bool(meta.get("tokenizer.ggml.add_bos_token", False))
    if template := meta.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    return settings
