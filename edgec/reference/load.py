"""Where the reference's model comes from: a recipe, a bundle, or a checkpoint.

From a recipe the model is what the build's own stages make of it, through the same store: for float weights, the model
in front of `quantize`; for INT8 weights the exported Program, the very numbers that every target encodes. A bundle
holds its recipe. One that has travelled to where the recipe's source can't be had gives its native artefact's weights,
and `Loaded.origin` says so: a fault in those weights is then the reference's, too.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch

from edgec.architectures.draft_head import DraftShape, Head, unpack
from edgec.architectures.llama import Llama, LlamaConfig
from edgec.build import Listener, build
from edgec.checkpoint import load_model
from edgec.decoder import program_state, read_decoder
from edgec.draft import DRAFT_FILE, Draft
from edgec.errors import EdgecError, Reason, SourceError, StoreError, UsageError
from edgec.model import Program
from edgec.plan import make_plan
from edgec.recipe import Recipe, load_recipe
from edgec.reference.native_weights import read_native
from edgec.reference.tokenizer import ReferenceTokenizer
from edgec.registry import get_target, get_task
from edgec.report.document import StageRecord
from edgec.runtime.locate import MANIFEST
from edgec.store import Store, default_root
from edgec.tasks.base import TaskContext

Weights = Literal["float", "int8"]
_RECIPE_SUFFIXES = (".yaml", ".yml", ".json")
_ABSENT = (Reason.SOURCE_NOT_FOUND, Reason.BAD_RECIPE)  # why a travelled bundle's source can't be had


@dataclass(frozen=True)
class Loaded:
    """A model to serve.

    Attributes:
        model: float32, in evaluation mode. INT8 weights stand in it as scale · q, exactly.
        tokenizer: None when the model came without one.
        name: what it goes by.
        eos: the tokens that end an answer.
        context: positions that it was trained for.
        quantised: names of the linear layers whose weights are INT8.
        origin: what was read, for people.
        draft: the draft head of a model with INT8 weights whose recipe trains one.
    """

    model: Llama
    tokenizer: ReferenceTokenizer | None
    name: str
    eos: tuple[int, ...]
    context: int
    quantised: frozenset[str]
    origin: str
    draft: Head | None = None


def load(
    what: str | Path,
    *,
    weights: Weights = "float",
    store: Store | None = None,
    sha256: str | None = None,
    listener: Listener | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Loaded:
    """Load a model.

    Args:
        what: a recipe; a bundle, or the output folder of `edgec build`; a Hugging Face folder, a GGUF file, or any
            other reference that a recipe's `model: {from: …}` takes.
        weights: "int8" are those that the recipe's quantise pass fixed.
        store: where stages are looked up and kept; by default the user's.
        sha256: of a model reference that has to be downloaded.
        listener: hears the stages that must run first.
        note: hears what is done in another way than asked for.

    Raises:
        UsageError: there are no such weights, or `what` is nothing that can be loaded.
        EdgecError: as a build's stages raise it.
    """
    store = store or Store(default_root())
    listener = listener or _Silent()
    path = Path(what)
    if (bundle := _bundle(path)) is not None:
        return _from_bundle(bundle, weights, store, listener, note)
    if path.suffix.lower() in _RECIPE_SUFFIXES and not path.is_dir():
        return _from_recipe(load_recipe(path), weights, store, listener)
    if weights == "int8":
        raise UsageError(
            f"{what} is a float checkpoint: INT8 weights are what a recipe's `quantize` pass makes of one",
            hint="give the recipe or a bundle, or leave out --weights int8",
        )
    return _from_checkpoint(str(what), sha256, store)


def _from_recipe(recipe: Recipe, weights: Weights, store: Store, listener: Listener) -> Loaded:
    if recipe.model.is_onnx:
        raise UsageError(
            f"{recipe.path}: its model is an ONNX file, and the reference runs PyTorch models of the Llama family"
        )
    quantize = next((use for use in recipe.passes if use.name == "quantize"), None)
    if weights == "int8":
        if quantize is None:
            raise UsageError(
                f"{recipe.path}: the recipe has no `quantize` pass, so there are no INT8 weights",
                hint="leave out --weights int8",
            )
        # Float twins of targets are no concern here, and exporting them is half the work.
        alone = dataclasses.replace(recipe, targets=tuple(t for t in recipe.targets if not get_target(t.name).twin))
        whole = _stored(recipe, "export", store)
        return _from_program(whole or _run(alone, "export", store, listener), recipe)
    before: tuple[Any, ...] = recipe.passes if quantize is None else recipe.passes[: recipe.passes.index(quantize)]
    return _from_stage(_run(recipe, before[-1].id if before else "source", store, listener), recipe, store)


def _from_program(folder: Path, recipe: Recipe) -> Loaded:
    program = Program.open(folder)
    decoder = read_decoder(program, "reference")
    scheme = program.quantization.scheme if program.quantization is not None else "float"
    if scheme != "weight-only":
        raise UsageError(
            f"{recipe.path}: the recipe's scheme is `{scheme}`, and the reference takes INT8 weights of `weight-only`"
        )
    config = LlamaConfig.from_dict(decoder.architecture)
    model, quantised = dequantised(config, program_state(program), str(recipe.path))
    tokenizer = ReferenceTokenizer.open(folder / "companions")
    origin = f"{recipe.path}: the exported program, INT8 weights"
    path = program.companion(DRAFT_FILE)
    draft = None if path is None else head_of(config, Draft.load(path))
    return Loaded(model, tokenizer, recipe.name, decoder.eos, config.max_positions, quantised, origin, draft)


def _from_stage(folder: Path, recipe: Recipe, store: Store) -> Loaded:
    context = TaskContext(recipe.folder, store.root, recipe.seed)
    task = get_task(recipe.task.name).create(recipe.task.options, context)
    module = load_model(folder, task, recipe.folder).module
    source = _stored(recipe, "source", store)
    tokenizer = None if source is None else ReferenceTokenizer.open(source)
    return _loaded(module, tokenizer, recipe.name, f"{recipe.path}: the model before it is quantised, float weights")


def _from_checkpoint(reference: str, sha256: str | None, store: Store) -> Loaded:
    from edgec.sources.models import load as load_checkpoint
    from edgec.sources.section import ModelSection

    section = ModelSection.model_validate({"from": reference, "sha256": sha256})
    loaded = load_checkpoint(section, recipe_dir=Path.cwd(), cache=store.root)
    with tempfile.TemporaryDirectory(prefix="edgec-") as folder:
        for name, content in loaded.extra_files.items():
            (Path(folder) / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
        template = Path(reference) / "chat_template.jinja"
        if template.is_file():
            (Path(folder) / template.name).write_bytes(template.read_bytes())
        tokenizer = ReferenceTokenizer.open(Path(folder))
    path = Path(reference).expanduser()
    return _loaded(loaded.module, tokenizer, path.name if path.is_dir() else path.stem, f"{reference}: float weights")


def _from_bundle(
    bundle: Path, weights: Weights, store: Store, listener: Listener, note: Callable[[str], None]
) -> Loaded:
    absent = "it holds no recipe"
    if (bundle / "recipe.json").is_file():
        try:
            # Without its gates: they may be on targets that this bundle was built without.
            recipe = load_recipe(bundle / "recipe.json", overrides=["gates={}"])
            return _from_recipe(recipe, weights, store, listener)
        except EdgecError as error:  # a stage's own, from its process
            if error.reason not in _ABSENT:
                raise
            absent = error.message
    native = next((f for f in (bundle, bundle / "native") if (f / MANIFEST).is_file()), None)
    if native is None:
        raise SourceError(
            f"{bundle}: its source can't be had ({absent}), and it has no native artefact to read instead",
            hint="give the recipe, where its sources are",
        )
    if weights == "float":
        raise SourceError(
            f"{bundle}: its source can't be had ({absent}), and the bundle itself has INT8 weights only",
            hint="give the recipe, where its sources are; or --weights int8",
        )
    note(f"{absent}; the weights are those of {native / 'model.safetensors'}")
    found = read_native(native)
    model, quantised = dequantised(found.config, found.state, str(native))
    tokenizer = ReferenceTokenizer.open(native)
    origin = f"{native / 'model.safetensors'}: the bundle's own INT8 weights"
    draft = None if found.draft is None else head_of(found.config, found.draft)
    return Loaded(model, tokenizer, found.name, found.eos, found.config.max_positions, quantised, origin, draft)


def head_of(config: LlamaConfig, draft: Draft) -> Head:
    """A draft head in float32, its INT8 weights as scale · q.

    Raises:
        EdgecError: weights and sizes don't fit, or its vocabulary is no part of the model's.
    """
    head = unpack(config, DraftShape.from_dict(draft.shape), draft.tensors)
    tokens = head.token_map.tolist()
    if any(a >= b for a, b in pairwise([-1, *tokens, config.vocab_size])):
        raise SourceError(
            f"the draft head's vocabulary (draft.token_map) is not ascending within the {config.vocab_size} tokens "
            "of the model",
            hint="build the bundle again",
            reason=Reason.BAD_CHECKPOINT,
        )
    return head


def _loaded(module: torch.nn.Module, tokenizer: ReferenceTokenizer | None, name: str, origin: str) -> Loaded:
    if not isinstance(module, Llama):
        raise UsageError(
            f"{origin.partition(':')[0]}: the reference runs models of the Llama family, and this one is a "
            f"{type(module).__name__}",
            reason=Reason.UNSUPPORTED_MODEL,
        )
    eos = () if tokenizer is None else tokenizer.eos
    return Loaded(module.float().eval(), tokenizer, name, eos, module.config.max_positions, frozenset(), origin)


def dequantised(config: LlamaConfig, state: dict[str, torch.Tensor], where: str) -> tuple[Llama, frozenset[str]]:
    """A Llama with float32 weights scale[o] · q[o, i], and the names of the linear layers whose q are INT8.

    Args:
        state: `<layer>.weight` int8 (out, in) and `<layer>.scale` (out,) float32, or `<layer>.weight` float.

    Raises:
        SourceError: a weight is missing or of another shape.
    """
    with torch.device("meta"):  # the random weights of a new module would only be thrown away
        model = Llama(config)
    weights: dict[str, torch.Tensor] = {}
    quantised: set[str] = set()
    for name, parameter in model.named_parameters():
        weight, layer = state.get(name), name.removesuffix(".weight")
        if weight is None or weight.shape != parameter.shape:
            found = "lacks it" if weight is None else f"has the shape {tuple(weight.shape)}"
            raise SourceError(
                f"{where}: the model has a weight `{name}` {tuple(parameter.shape)}, and the file {found}",
                reason=Reason.BAD_CHECKPOINT,
            )
        if weight.dtype == torch.int8:
            weight = weight.float() * state[f"{layer}.scale"].float()[:, None]
            quantised.add(layer)
        weights[name] = weight.float()
    if config.tied:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
        if "embed_tokens" in quantised:
            quantised.add("lm_head")
    model.load_state_dict(weights, assign=True)
    if config.tied:
        model.lm_head.weight = model.embed_tokens.weight
    return model.eval(), frozenset(quantised - {"embed_tokens"})


def _stored(recipe: Recipe, until: str, store: Store) -> Path | None:
    """The result of a stage, if it and all before it are in the store."""
    entry = make_plan(recipe, store, until=until).stages[-1].entry
    return None if entry is None else entry.out


def _run(recipe: Recipe, until: str, store: Store, listener: Listener) -> Path:
    """The result of a stage; it and those before it run as far as the store lacks them."""
    found = _stored(recipe, until, store)
    if found is None:
        with tempfile.TemporaryDirectory(prefix="edgec-") as folder:
            outcome = build(recipe, store, out=Path(folder), listener=listener, until=until)
        if outcome.error is not None:
            raise outcome.error
        found = _stored(recipe, until, store)
    if found is None:
        raise StoreError(f"the store has no result of `{until}`, although it was just made", hint="is it being pruned?")
    return found


def _bundle(path: Path) -> Path | None:
    """The bundle that a path means: itself, the one in a build's output folder, or a native artefact alone."""
    for folder in (path, path / "bundle"):
        if (folder / "bundle.json").is_file():
            return folder
    try:
        is_native = "abi" in json.loads((path / MANIFEST).read_bytes())
    except (OSError, ValueError, TypeError):
        return None
    parent = path.resolve().parent
    return (parent if (parent / "bundle.json").is_file() else path) if is_native else None


class _Silent:
    """A listener that says nothing."""

    def started(self, stage: str) -> None: ...

    def event(self, stage: str, event: dict[str, Any]) -> None: ...

    def finished(self, stage: str, record: StageRecord) -> None: ...
