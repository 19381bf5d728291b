"""Models on disk between stages: JSON and safetensors, or a .pt2 for captured graphs. Nothing here unpickles anything.

A folder holds `model.json` (source, quantisation, metrics, structure) and

* `weights.safetensors` for models that are rebuilt from their architecture: float ones, and weight-only quantised ones.
  Tied weights are written once, and tied again by the architecture.
* `draft.safetensors` beside it for a model with a draft head.
* `graph.pt2` (torch.export) for "static" models, whose module is a captured graph of quantize and dequantize nodes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgec.draft import DRAFT_FILE, Draft
from edgec.errors import Reason, SourceError, StoreError
from edgec.model import Model, Quantization

if TYPE_CHECKING:
    import torch

    from edgec.tasks.base import Task

    Architecture = Callable[[dict[str, Any], Path], torch.nn.Module]

MODEL, WEIGHTS, GRAPH = "model.json", "weights.safetensors", "graph.pt2"


def model_bytes(model: Model) -> int:
    """Bytes of the weights as the model stores them: one per INT8 weight, also where a graph still holds it in float.

    A static model's graph keeps float weights in front of their quantize nodes; what counts is what a target encodes.
    A draft head counts.
    """
    import torch

    module = model.module
    if not is_graph(model):
        tensors = {t.data_ptr(): t for t in module.state_dict().values() if t.numel()}
        own: int = sum(t.numel() * t.element_size() for t in tensors.values())
        return own if model.draft is None else own + model.draft.bytes
    assert isinstance(module, torch.fx.GraphModule)
    total, seen = 0, set()
    for node in module.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name in seen:
            continue
        seen.add(name)
        tensor = module.get_parameter(name) if name in dict(module.named_parameters()) else module.get_buffer(name)
        quantised = any("quantize_per" in str(user.target) for user in node.users)
        total += tensor.numel() * (1 if quantised and tensor.dim() > 1 else tensor.element_size())
    return total


def is_graph(model: Model) -> bool:
    """Whether the module is a captured graph, which has no architecture to be rebuilt from."""
    return model.quantization is not None and model.quantization.scheme == "static"


def save_model(model: Model, folder: Path) -> None:
    """Write `model` into `folder` (made if needed).

    Raises:
        StoreError: the disk is full or read-only.
    """
    from safetensors.torch import save_file

    from edgec.structure import describe

    try:
        folder.mkdir(parents=True, exist_ok=True)
        if is_graph(model):
            _save_graph(model, folder)
        else:
            tensors: dict[str, torch.Tensor] = {}
            owners: dict[tuple[int, int, torch.Size, torch.dtype], str] = {}
            for name, tensor in model.module.state_dict().items():
                key = (tensor.data_ptr(), tensor.storage_offset(), tensor.shape, tensor.dtype)
                if tensor.numel() and owners.setdefault(key, name) != name:
                    continue  # tied: the architecture ties it again
                tensors[name] = tensor.detach().contiguous()
            save_file(tensors, folder / WEIGHTS)
            if model.draft is not None:
                model.draft.save(folder / DRAFT_FILE)
        description = {
            "source": model.source,
            "quantization": _json(model.quantization),
            "metrics": model.metrics,
            "structure": None if is_graph(model) else describe(model.module),
        }
        (folder / MODEL).write_text(json.dumps(description, indent=1, sort_keys=True))
    except OSError as error:
        raise StoreError(f"{folder} can't be written: {error}", hint="free some space, or set another cache") from error


def _save_graph(model: Model, folder: Path) -> None:
    from edgec.graphs import capture, save_exported

    signature = model.task.signatures(model.module)[0]
    program = capture(model.module, model.task.example(signature), signature)
    save_exported(program, folder / GRAPH)


def load_model(folder: Path, task: Task, recipe_dir: Path, *, architecture: Architecture | None = None) -> Model:
    """Read what `save_model` wrote, in evaluation mode.

    Args:
        folder: as given to `save_model`.
        task: the task of the recipe.
        recipe_dir: what a factory's relative path in the model's source is relative to.
        architecture: builds the module without weights from the source; `edgec.sources.models.architecture` by default.

    Raises:
        StoreError: a file is missing, cut short or not what it should be.
        SourceError: the weights do not fit the architecture.
    """
    description = _read_description(folder / MODEL)
    quantization = Quantization.from_dict(description["quantization"])
    if quantization is not None and quantization.scheme == "static":
        module = _load_graph(folder / GRAPH)
    else:
        module = _load_weights(folder / WEIGHTS, description, quantization, recipe_dir, architecture)
    draft = Draft.load(folder / DRAFT_FILE) if (folder / DRAFT_FILE).is_file() else None
    return Model(module, task, description["source"], quantization, description["metrics"], draft)


def _read_description(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
        missing = {"source", "quantization", "metrics", "structure"} - set(data)
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(path, error) from error
    if missing:
        raise _damaged(path, f"no {', '.join(sorted(missing))}")
    description: dict[str, Any] = data
    return description


def _load_graph(path: Path) -> torch.nn.Module:
    from edgec.graphs import load_exported, settle

    module: torch.nn.Module = settle(load_exported(path, folded=False).module(check_guards=False))
    return module


def _load_weights(
    path: Path,
    description: dict[str, Any],
    quantization: Quantization | None,
    recipe_dir: Path,
    architecture: Architecture | None,
) -> torch.nn.Module:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from edgec.structure import apply

    build = architecture or _default_architecture()
    module = build(description["source"], recipe_dir)
    apply(module, description["structure"])
    if quantization is not None:
        from edgec.passes.quantize_weights import replace_layers

        replace_layers(module, [layer.name for layer in quantization.layers if layer.dtype == "int8"])
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from error
    load_tied(module, tensors, str(path))
    return module.eval()


def _default_architecture() -> Architecture:
    from edgec.sources.models import architecture

    return architecture


def load_tied(module: torch.nn.Module, tensors: dict[str, torch.Tensor], where: str) -> None:
    """Strict `load_state_dict`, but for names that are tied in `module` to one that is there.

    Raises:
        SourceError: a weight is missing, left over, or of another shape; the message has the first few.
    """
    state = module.state_dict()
    owners = {t.data_ptr(): name for name, t in state.items() if name in tensors}
    missing = [n for n, t in state.items() if n not in tensors and t.data_ptr() not in owners]
    extra = [n for n in tensors if n not in state]
    wrong = [
        f"{n} {tuple(t.shape)} instead of {tuple(state[n].shape)}"
        for n, t in tensors.items()
        if n in state and t.shape != state[n].shape
    ]
    for what, names in (("lacks", missing), ("has unknown", extra), ("has wrong shapes:", wrong)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise SourceError(
                f"{where} {what} {', '.join(names[:3])}{more}",
                hint="these weights are of another architecture: compare the recipe's factory and args",
                reason=Reason.BAD_CHECKPOINT,
            )
    module.load_state_dict(tensors, strict=False)


def _damaged(path: Path, why: object) -> StoreError:
    return StoreError(f"{path} is damaged: {str(why).splitlines()[0][:200]}", hint="delete it and build again")


def _json(quantization: Quantization | None) -> dict[str, Any] | None:
    from dataclasses import asdict

    return None if quantization is None else asdict(quantization)
