"""Hugging Face folders: the Llama family into our own architecture, the rest through transformers.

Code that comes with a checkpoint is never run (`trust_remote_code=False`), and weights are taken from safetensors only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgec.errors import Reason, SourceError
from edgec.sources.checkpoints import load_into, load_state_dict

if TYPE_CHECKING:
    import torch

    from edgec.architectures.llama import LlamaConfig
    from edgec.sources.models import Loaded

# Families whose layers are Llama's to the last operation.
_LLAMA = ("llama",)
_EXTRA = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
)


def _bad(path: Path, what: str, hint: str = "") -> SourceError:
    return SourceError(f"{path}: {what}", hint=hint, reason=Reason.BAD_CHECKPOINT)


def load_huggingface(path: Path) -> Loaded:
    """Load a folder with `config.json` and safetensors.

    Raises:
        SourceError: BAD_CHECKPOINT for a folder that can't be read, UNSAFE_FILE for one that wants its own code run.
    """
    from edgec.sources.models import Loaded, architecture

    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as cause:
        raise _bad(path, f"config.json can't be read: {cause}") from cause
    extra: dict[str, Path | bytes] = {n: path / n for n in _EXTRA if (path / n).is_file()}
    if config.get("model_type") in _LLAMA:
        source: dict[str, Any] = {"kind": "llama", "config": llama_config(config, path).to_dict()}
        state = _llama_names(_weights(path))
    else:
        source = {"kind": "transformers", "class": _class_name(config, path), "config": config}
        state = {f"model.{k}": v for k, v in _weights(path).items()}
    module = architecture(source, path)
    tied = {k: v for k, v in module.state_dict().items() if k not in state and _shares(module, v, state)}
    load_into(module, {**state, **tied}, path)
    return Loaded(module.eval(), source, extra)


def _weights(path: Path) -> dict[str, torch.Tensor]:
    """All shards together.  The index file, where there is one, names them; without it every .safetensors counts."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = sorted(p.name for p in path.glob("*.safetensors"))
    if not names:
        raise _bad(path, "no .safetensors in it", "convert the weights to safetensors; pickled weights are not taken")
    state: dict[str, torch.Tensor] = {}
    for name in names:
        if Path(name).name != name or not (path / name).is_file():
            raise _bad(path, f"the shard {name} is missing")
        state |= load_state_dict(path / name)
    return state


def _shares(module: torch.nn.Module, tensor: torch.Tensor, state: dict[str, torch.Tensor]) -> bool:
    """Whether a tensor that the checkpoint lacks is tied to one that it has: tied weights are saved once."""
    own = module.state_dict()
    return any(k in state and own[k].data_ptr() == tensor.data_ptr() and tensor.numel() for k in own)


def llama_config(config: dict[str, Any], path: Path) -> LlamaConfig:
    """Translate a Hugging Face `config.json` of the Llama family.

    Raises:
        SourceError: a number is missing, or the configuration uses something our Llama doesn't have.
    """
    from edgec.architectures.llama import LlamaConfig

    if config.get("hidden_act", "silu") != "silu":
        raise _bad(path, f"activation {config['hidden_act']!r} in a Llama; only silu is known")
    # transformers 5 keeps theta and scaling in one dictionary, 4 in two keys.
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {k: v for k, v in rope.items() if k != "rope_theta"}
    if (scaling or {}).get("rope_type", (scaling or {}).get("type", "default")) == "default":
        scaling = None
    try:
        heads = config["num_attention_heads"]
        return LlamaConfig(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
            rope_scaling=scaling,
            max_positions=config.get("max_position_embeddings", 2048),
            tied=config.get("tie_word_embeddings", False),
            attention_bias=config.get("attention_bias", False),
            mlp_bias=config.get("mlp_bias", False),
        )
    except KeyError as cause:
        raise _bad(path, f"config.json has no {cause}") from cause


def _llama_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our names are Hugging Face's without `model.`; old checkpoints also carry the rotary table, which is computed."""
    return {k.removeprefix("model."): v for k, v in state.items() if not k.endswith("rotary_emb.inv_freq")}


def _class_name(config: dict[str, Any], path: Path) -> str:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if config.get("model_type") not in CONFIG_MAPPING_NAMES:
        own_code = "auto_map" in config
        raise SourceError(
            f"{path}: model_type {config.get('model_type')!r} "
            + ("brings its own code, which is never run" if own_code else "is unknown to this transformers"),
            hint="write the architecture as a `factory:` beside the recipe, and take the weights from safetensors",
            reason=Reason.UNSAFE_FILE if own_code else Reason.BAD_CHECKPOINT,
        )
    names = config.get("architectures") or []
    if not names:
        raise _bad(path, "config.json has no `architectures`", "add the class that the weights were saved from")
    return str(names[0])


def build_transformers(source: dict[str, Any]) -> torch.nn.Module:
    """A transformers model that gives its logits as one tensor.

    Raises:
        SourceError: transformers has no such class.
    """
    import torch
    import transformers

    class Logits(torch.nn.Module):
        """forward(x) → the model's logits, or its last hidden state when it has no head."""

        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.model(x, return_dict=True)
            result: torch.Tensor = out["logits"] if "logits" in out else out[0]
            return result

    found = getattr(transformers, source["class"], None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise SourceError(f"transformers has no model class {source['class']!r}", reason=Reason.BAD_CHECKPOINT)
    settings = {
        k: v for k, v in source["config"].items() if k not in ("model_type", "auto_map", "torch_dtype", "dtype")
    }
    config = transformers.AutoConfig.for_model(source["config"]["model_type"], **settings)
    config.use_cache = False
    return Logits(found(config)).float()
