"""A recipe's `model:` section → a torch module with its weights, and what builds its architecture again.

Formats: a Python factory with a state dict (.pth, .safetensors) or with its own initial weights, a Hugging Face folder
or `hf:` id, and GGUF. An ONNX file has no module: `onnx_program.py` makes a Program of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgec.errors import Reason, RecipeError, SourceError
from edgec.sources.checkpoints import TORCH_SUFFIXES, check_finite, load_into, load_state_dict
from edgec.sources.fetch import fetch

if TYPE_CHECKING:
    import torch

    from edgec.sources.section import ModelSection


@dataclass(frozen=True)
class Loaded:
    """A module in evaluation mode with float32 weights.

    Attributes:
        source: what `architecture` builds the empty module from; JSON, with a key `kind`.
        extra_files: what belongs to the model beside its weights (a tokenizer), by file name.
    """

    module: torch.nn.Module
    source: dict[str, Any]
    extra_files: dict[str, Path | bytes] = field(default_factory=dict)


def load(section: ModelSection, *, recipe_dir: Path, cache: Path) -> Loaded:
    """Fetch, verify and load the model that a recipe names.

    Raises:
        RecipeError: the section can't mean anything (a state dict without a factory, an unknown format).
        SourceError: the file is missing, another one, unsafe, damaged, or holds NaN.
    """
    if section.from_ is None:
        return _from_factory(section, None, recipe_dir)
    path = fetch(section.from_, section.sha256, recipe_dir=recipe_dir, cache=cache)
    kind = section.format or file_format(path)
    if kind == "gguf":
        from edgec.sources.gguf import load_gguf

        return _checked(load_gguf(path), path)
    if kind == "hf":
        from edgec.sources.huggingface import load_huggingface

        return _checked(load_huggingface(path), path)
    if kind == "onnx":
        raise RecipeError(
            f"{path.name} is ONNX, which passes can't change",
            hint="a recipe from an ONNX file has targets only: remove its passes",
        )
    if section.factory is None:
        raise RecipeError(
            f"{path.name} holds weights without an architecture",
            hint="name what builds it: `factory: models/net.py:make_net`, relative to the recipe",
        )
    return _from_factory(section, path, recipe_dir)


def file_format(path: Path) -> str:
    """ "hf", "gguf", "onnx", "safetensors" or "state-dict", by the name.

    Raises:
        SourceError: none of them.
    """
    if path.is_dir():
        if (path / "config.json").is_file():
            return "hf"
        raise SourceError(f"{path} is a folder without a config.json", hint="name the checkpoint file inside it")
    kinds = {
        ".gguf": "gguf",
        ".onnx": "onnx",
        ".safetensors": "safetensors",
        **dict.fromkeys(TORCH_SUFFIXES, "state-dict"),
    }
    if path.suffix.lower() not in kinds:
        raise SourceError(
            f"{path.name}: no model format goes by the name `{path.suffix}`",
            hint=f"known: {', '.join(sorted(kinds))}; or say `format:` in the model section",
            reason=Reason.BAD_CHECKPOINT,
        )
    return kinds[path.suffix.lower()]


def architecture(source: dict[str, Any], recipe_dir: Path) -> torch.nn.Module:
    """The module that `source` (see `Loaded.source`) describes, with whatever weights its builder gives it.

    Raises:
        RecipeError: a factory that can't be found or fails.
        SourceError: a kind that this edgec doesn't know, or a configuration that is no longer accepted.
    """
    kind = source.get("kind")
    if kind == "factory":
        from edgec.sources.factory import build

        return build(source["factory"], source["args"], recipe_dir).float()
    if kind == "llama":
        from edgec.architectures.llama import Llama, LlamaConfig

        return Llama(LlamaConfig.from_dict(source["config"]))
    if kind == "transformers":
        from edgec.sources.huggingface import build_transformers

        return build_transformers(source)
    raise SourceError(f"no architecture of kind {kind!r} is known", hint="was this made by a newer edgec?")


def _from_factory(section: ModelSection, path: Path | None, recipe_dir: Path) -> Loaded:
    assert section.factory is not None
    source = {"kind": "factory", "factory": section.factory, "args": section.args}
    module = architecture(source, recipe_dir)
    if path is not None:
        load_into(module, load_state_dict(path), path)
    else:
        check_finite(Path(section.factory), module.state_dict())
    return Loaded(module.eval(), source)


def _checked(loaded: Loaded, path: Path) -> Loaded:
    check_finite(path, loaded.module.state_dict())
    loaded.module.float().eval()
    return loaded
