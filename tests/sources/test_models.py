"""From a `model:` section to a module: factories, Hugging Face folders, and what can't be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from edgec.errors import Reason, RecipeError, SourceError
from edgec.sources.models import Loaded, architecture, load
from edgec.sources.section import ModelSection

FACTORY = """
from dataclasses import dataclass
import helper
from torch import nn

@dataclass
class Sizes:
    width: int = 3

def make(width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(2, Sizes(width).width), nn.Linear(width, helper.OUT))

def wrong():
    return 5

number = 7
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(FACTORY)
    (tmp_path / "helper.py").write_text("OUT = 4\n")
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    return tmp_path


def run(folder: Path, **section: Any) -> Loaded:
    return load(ModelSection.model_validate(section), recipe_dir=folder, cache=folder / "cache")


def test_a_factory_with_a_checkpoint_and_again_from_its_source(folder: Path) -> None:
    made = run(folder, factory="net.py:make", args={"width": 5}).module
    torch.save({"state_dict": {f"module.{k}": v for k, v in made.state_dict().items()}}, folder / "a.pth")
    loaded = run(folder, **{"from": "a.pth"}, factory="net.py:make", args={"width": 5})
    assert not loaded.module.training
    assert torch.equal(loaded.module[0].weight, made[0].weight)  # type: ignore[index]
    again = architecture(json.loads(json.dumps(loaded.source)), folder)
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in made.state_dict().items()}


def test_half_precision_weights_become_float32(folder: Path) -> None:
    made = run(folder, factory="net.py:make").module
    save_file({k: v.half() for k, v in made.state_dict().items()}, folder / "a.safetensors")
    loaded = run(folder, **{"from": "a.safetensors"}, factory="net.py:make")
    assert {p.dtype for p in loaded.module.parameters()} == {torch.float32}


def test_initial_weights_follow_the_seed(folder: Path) -> None:
    def weights(seed: int) -> list[float]:
        torch.manual_seed(seed)
        found: list[float] = run(folder, factory="net.py:make").module[0].weight.flatten().tolist()  # type: ignore[index]
        return found

    assert weights(1) == weights(1) != weights(2)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"factory": "net.py:maek"}, "did you mean `make`"),
        ({"factory": "gone.py:make"}, "gone.py does not exist"),
        ({"factory": "broken.py:make"}, "nothing_of_that_name"),
        ({"factory": "net.py:make", "args": {"wdith": 3}}, "wdith"),
        ({"factory": "net.py:wrong"}, "gave a int"),
        ({"factory": "net.py:number"}, "can't be called"),
        ({"from": "a.pth"}, "weights without an architecture"),
        ({"from": "a.onnx"}, "passes can't change"),
        ({"from": "a.zip"}, "no model format"),
        ({"from": "empty"}, "without a config.json"),
    ],
)
def test_what_is_wrong_with_a_section_is_said_in_one_line(folder: Path, section: dict[str, Any], says: str) -> None:
    torch.save({"w": torch.zeros(1)}, folder / "a.pth")
    (folder / "a.onnx").write_bytes(b"")
    (folder / "a.zip").write_bytes(b"")
    (folder / "empty").mkdir()
    with pytest.raises((RecipeError, SourceError)) as caught:
        run(folder, **section)
    assert says in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "section", [{}, {"from": "a.pth", "args": {"x": 1}}, {"from": "a", "sha256": "abc"}, {"form": "a"}]
)
def test_sections_that_mean_nothing_are_refused(section: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ModelSection.model_validate(section)


def test_references_are_the_weights_and_the_factorys_file() -> None:
    section = ModelSection.model_validate({"from": "a.pth", "sha256": "0" * 64, "factory": "net.py:make"})
    assert section.references() == [("a.pth", "0" * 64), ("net.py", None)]
    assert ModelSection.model_validate({"factory": "package.module:make"}).references() == []


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
}


def hugging_face(folder: Path, config: dict[str, Any]) -> tuple[Path, torch.nn.Module]:
    import transformers

    torch.manual_seed(3)
    settings = {k: v for k, v in config.items() if k != "model_type"}
    made = getattr(transformers, config["architectures"][0])(
        transformers.AutoConfig.for_model(config["model_type"], **settings)
    ).eval()
    out = folder / "hf"
    made.save_pretrained(out)
    (out / "tokenizer.json").write_text("{}")
    return out, made


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_folder_computes_what_transformers_computes(folder: Path, tied: bool) -> None:
    path, made = hugging_face(folder, LLAMA | {"tie_word_embeddings": tied})
    loaded = run(folder, **{"from": "hf"})
    ids = torch.arange(10)[None] % 32
    with torch.no_grad():
        torch.testing.assert_close(loaded.module(ids), made(ids).logits, rtol=1e-5, atol=1e-5)
    assert loaded.source["kind"] == "llama"
    assert loaded.extra_files["tokenizer.json"] == path / "tokenizer.json"


@pytest.mark.slow
def test_another_family_goes_through_transformers_without_remote_code(folder: Path) -> None:
    config = {
        "architectures": ["BertForSequenceClassification"],
        "model_type": "bert",
        "vocab_size": 20,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 12,
    }
    _, made = hugging_face(folder, config)
    loaded = run(folder, **{"from": "hf"})
    ids = torch.arange(6)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded.module(ids), made(ids).logits)
    again = architecture(json.loads(json.dumps(loaded.source)), folder)
    assert again.state_dict().keys() == loaded.module.state_dict().keys()


@pytest.mark.slow
def test_a_folder_that_brings_its_own_code_is_refused(folder: Path) -> None:
    (folder / "own").mkdir()
    (folder / "own/config.json").write_text(json.dumps({"model_type": "mine", "auto_map": {"AutoModel": "mine.Model"}}))
    save_file({"w": torch.zeros(1)}, folder / "own/model.safetensors")
    (folder / "own/mine.py").write_text("raise SystemExit('ran')")
    with pytest.raises(SourceError, match="own code") as caught:
        run(folder, **{"from": "own"})
    assert caught.value.reason == Reason.UNSAFE_FILE


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "llama"}, "has no 'num_attention_heads'"),
        (LLAMA | {"hidden_act": "gelu"}, "gelu"),
        ({k: v for k, v in LLAMA.items() if k != "vocab_size"}, "vocab_size"),
    ],
)
def test_a_llama_configuration_that_cannot_be_kept_is_refused(folder: Path, config: dict[str, Any], says: str) -> None:
    (folder / "hf").mkdir()
    (folder / "hf/config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match=says):
        run(folder, **{"from": "hf"})


def test_a_missing_shard_and_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "hf").mkdir()
    (folder / "hf/config.json").write_text(json.dumps(LLAMA))
    (folder / "hf/pytorch_model.bin").write_bytes(b"")
    with pytest.raises(SourceError, match=r"no \.safetensors"):
        run(folder, **{"from": "hf"})
    index = {"weight_map": {"model.norm.weight": "../../elsewhere.safetensors"}}
    (folder / "hf/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SourceError, match=r"shard .* is missing"):
        run(folder, **{"from": "hf"})
