"""GGUF files, written here as llama.cpp's converter writes them, and read back; and damaged in every way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from edgec.errors import Reason, SourceError
from edgec.sources.gguf import load_gguf
from edgec.sources.models import load
from edgec.sources.section import ModelSection
from tests.tasks.tiny_lm import llama

if TYPE_CHECKING:
    from edgec.architectures.llama import Llama

IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
BYTES = [f"<0x{i:02X}>" for i in range(256)]


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's convert_hf_to_gguf.py, `LlamaModel.permute`."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in OUTSIDE:
        return f"{OUTSIDE[stem]}.{kind}"
    _, index, rest = stem.split(".", 2)
    return f"blk.{index}.{IN_LAYER[rest]}.{kind}"


def write(path: Path, model: Llama, *, kind: str = "F32", arch: str = "llama", **changes: Any) -> Path:
    """Write `model`. `changes`: `meta` (keys to replace or, with None, leave out), `tensors` (arrays to replace or
    add), `tokenizer` (the kind)."""
    c = model.config
    writer = GGUFWriter(path, arch)
    meta: dict[str, Any] = {
        "llama.block_count": c.layers,
        "llama.context_length": c.max_positions,
        "llama.embedding_length": c.hidden_size,
        "llama.feed_forward_length": c.intermediate_size,
        "llama.attention.head_count": c.heads,
        "llama.attention.head_count_kv": c.kv_heads,
        "llama.attention.key_length": c.head_dim,
        "llama.rope.dimension_count": c.head_dim,
        "llama.vocab_size": c.vocab_size,
    } | changes.get("meta", {})
    for key, value in meta.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", c.norm_eps)
    writer.add_float32("llama.rope.freq_base", c.rope_theta)
    if (tokenizer := changes.get("tokenizer")) is not None:
        TOKENIZERS[tokenizer](writer)
    tensors = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and c.tied:
            continue
        array = weight.numpy()
        if "q_proj" in name or "k_proj" in name:
            array = permute(array, c.heads if "q_proj" in name else c.kv_heads)
        tensors[gguf_name(name)] = array
    for name, array in (tensors | changes.get("tensors", {})).items():
        small = array.ndim == 1 or kind == "F32"
        form = GGMLQuantizationType["F32" if small else kind]
        data = array.astype(np.float32) if small else quantize(array, form)
        writer.add_tensor(name, data, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level(writer: GGUFWriter) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "th", "the", "Ġthe", "<user>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 3) + [4])
    writer.add_token_merges(["t h", "th e", "Ġ the"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages }}")


def sentencepiece(writer: GGUFWriter) -> None:
    tokens = ["<unk>", "<s>", "</s>", *BYTES, "▁", "a", "b", "ab", "▁a", "▁ab"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-5.0, -6.0, -7.0, -2.0, -1.0, -0.5])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 6)
    writer.add_unk_token_id(0)


def unknown_split(writer: GGUFWriter) -> None:
    byte_level(writer)
    writer.add_tokenizer_pre("tekken")


def unknown_kind(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list(["a"])


TOKENIZERS = {
    "byte-level": byte_level,
    "sentencepiece": sentencepiece,
    "unknown-split": unknown_split,
    "unknown-kind": unknown_kind,
}


@pytest.mark.parametrize("changes", [{}, {"tied": False, "attention_bias": True}, {"head_dim": 10, "kv_heads": 3}])
def test_a_model_comes_back_as_it_was(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = llama(**changes, max_positions=64)
    loaded = load_gguf(write(tmp_path / "m.gguf", model))
    assert loaded.source == {"kind": "llama", "config": model.config.to_dict()}
    ids = torch.randint(0, 258, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(loaded.module(ids), model(ids))


def test_rotary_rows_that_are_not_put_back_would_show(tmp_path: Path) -> None:
    """The comparison above notices a forgotten permutation."""
    model = llama()
    array = model.state_dict()["layers.0.self_attn.q_proj.weight"].numpy()
    loaded = load_gguf(write(tmp_path / "m.gguf", model, tensors={"blk.0.attn_q.weight": array}))
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert (loaded.module(ids) - model(ids)).abs().max() > 1e-3


@pytest.mark.parametrize(("kind", "error"), [("F16", 1e-3), ("BF16", 1e-2), ("Q8_0", 5e-3), ("Q4_1", 5e-2)])
def test_quantised_weights_are_dequantised(tmp_path: Path, kind: str, error: float) -> None:
    model = llama(hidden_size=64, intermediate_size=96, heads=8, kv_heads=2)
    state = load_gguf(write(tmp_path / "m.gguf", model, kind=kind)).module.state_dict()
    for name, weight in model.state_dict().items():
        assert state[name].dtype == torch.float32
        assert float((state[name] - weight).abs().max()) <= error * (0 if weight.dim() == 1 else 1)


def test_rope_factors_become_a_scaling(tmp_path: Path) -> None:
    factors = np.array([1, 2, 4, 8], np.float32)
    loaded = load_gguf(write(tmp_path / "m.gguf", llama(), tensors={"rope_freqs.weight": factors}))
    assert loaded.source["config"]["rope_scaling"] == {"rope_type": "factors", "factors": [1, 2, 4, 8]}


def test_byte_level_tokenizer(tmp_path: Path) -> None:
    loaded = load_gguf(write(tmp_path / "m.gguf", llama(), tokenizer="byte-level"))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(loaded.extra_files["tokenizer.json"].decode())  # type: ignore[union-attr]
    text = "the 42 the<|im_end|> ü"
    assert tokenizer.encode(text).tokens == [
        *("the", "Ġ", "4", "2", "Ġthe", "<|im_end|>", "Ġ", "Ã", "¼"),
    ]
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    settings = json.loads(loaded.extra_files["tokenizer_config.json"])  # type: ignore[arg-type]
    assert settings["bos_token"] == "<|im_start|>" and settings["eos_token"] == "<|im_end|>"
    assert settings["chat_template"] == "{{ messages }}"


def test_sentencepiece_tokenizer(tmp_path: Path) -> None:
    loaded = load_gguf(write(tmp_path / "m.gguf", llama(vocab_size=265), tokenizer="sentencepiece"))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(loaded.extra_files["tokenizer.json"].decode())  # type: ignore[union-attr]
    assert tokenizer.encode("ab a é").tokens == ["▁ab", "▁a", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("ab a é").ids) == "ab a é"


def refused(path: Path, says: str) -> SourceError:
    with pytest.raises(SourceError, match=says) as caught:
        load_gguf(path)
    assert caught.value.reason is Reason.BAD_CHECKPOINT
    assert "\n" not in caught.value.message
    return caught.value


def test_truncated_file(tmp_path: Path) -> None:
    data = write(tmp_path / "m.gguf", llama()).read_bytes()
    for length in (3, 20, 200, len(data) // 2, len(data) - 200):
        (tmp_path / "cut.gguf").write_bytes(data[:length])
        refused(tmp_path / "cut.gguf", "is not a GGUF file that can be read")


def test_wrong_magic(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", llama())
    path.write_bytes(b"GGML" + path.read_bytes()[4:])
    refused(path, "does not begin with `GGUF`")


def test_unknown_architecture(tmp_path: Path) -> None:
    error = refused(write(tmp_path / "m.gguf", llama(), arch="mamba"), "architecture is 'mamba'")
    assert "`llama`" in error.hint


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"meta": {"llama.block_count": None}}, "no 'llama.block_count'"),
        ({"meta": {"llama.block_count": 3}}, "missing: layers.2."),
        ({"meta": {"llama.expert_count": 8}}, "mixture of experts"),
        ({"meta": {"llama.rope.dimension_count": 4}}, "part of each head"),
        ({"meta": {"llama.attention.head_count": 0}}, "metadata is damaged"),
        ({"meta": {"llama.attention.head_count": "six"}}, "metadata is damaged"),
        ({"meta": {"llama.attention.head_count_kv": 4}}, "can't share"),
        ({"meta": {"llama.rope.scaling.type": "longrope"}}, "no 'llama.rope.scaling.factor'"),
        ({"meta": {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2}}, "`longrope`"),
        ({"tensors": {"blk.0.attn_q.weight": np.ones((48, 40))}}, r"q_proj.weight` is \[48, 40\].* says \[48, 48\]"),
        ({"tensors": {"blk.0.attn_k.weight": np.ones((12, 48))}}, "12 rows, not 2 heads of 8"),
        ({"tensors": {"token_embd.weight": np.ones((258, 40))}}, r"is \[258, 40\]"),
        ({"tensors": {"blk.0.ssm_in.weight": np.ones((4, 4))}}, "no tensor `blk.0.ssm_in.weight`"),
        ({"tokenizer": "unknown-split"}, "splits text as 'tekken'"),
        ({"tokenizer": "unknown-kind"}, "of the kind 'rwkv'"),
    ],
)
def test_what_does_not_fit_is_one_clear_line(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    refused(write(tmp_path / "m.gguf", llama(), **changes), says)


def test_nan_weights_are_refused_with_the_tensors_name(tmp_path: Path) -> None:
    model = llama()
    with torch.no_grad():
        model.get_submodule("layers.1.mlp.up_proj").weight[3, 4] = float("nan")
    write(tmp_path / "m.gguf", model)
    section = ModelSection.model_validate({"from": "m.gguf"})
    with pytest.raises(SourceError, match=r"1 of .* values of `layers.1.mlp.up_proj.weight` are NaN") as caught:
        load(section, recipe_dir=tmp_path, cache=tmp_path)
    assert caught.value.reason is Reason.NOT_FINITE
