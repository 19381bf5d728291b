"""Checkpoint files: state dicts from .pth and .safetensors, and what a file's header says without loading it.

Weights are data. A pickle is read with `weights_only=True`, which builds tensors and plain containers and nothing else.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgec.errors import Reason, SourceError

if TYPE_CHECKING:
    import torch

    from edgec.sources.section import ModelSection

TORCH_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt", ".tar")
# Where training frameworks put the state dict inside what they save; first match wins.
_NESTED = ("state_dict", "model_state_dict", "model", "net", "params", "weights", "ema", "module")
# What wrappers put in front of every name: DataParallel and DDP, torch.compile, Lightning and the like.
_PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "network.", "backbone.")
_SHOWN = 4


@dataclass(frozen=True)
class Header:
    """What a checkpoint's header promises. `tensors` are `(name, dtype, shape, bytes)`."""

    format: str
    tensors: tuple[tuple[str, str, tuple[int, ...], int], ...]
    metadata: dict[str, str]

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for _, _, shape, _ in self.tensors)

    @property
    def bytes(self) -> int:
        return sum(size for *_, size in self.tensors)


def _bad(path: Path, what: str) -> SourceError:
    return SourceError(
        f"{path} is not a checkpoint that can be read: {what}",
        hint="is it complete? compare its size and SHA-256 with the original's",
        reason=Reason.BAD_CHECKPOINT,
    )


def read_safetensors_header(path: Path) -> Header:
    """Parse a safetensors header: 8 bytes of length, JSON, then the tensors' bytes without gaps.

    Raises:
        SourceError: BAD_CHECKPOINT when the file is truncated or isn't safetensors.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, 100 * 2**20):
            raise _bad(path, "its safetensors header is damaged")
        try:
            data = json.loads(file.read(length))
            metadata = data.pop("__metadata__", {})
            tensors = tuple(
                (name, str(t["dtype"]), tuple(int(n) for n in t["shape"]), t["data_offsets"][1] - t["data_offsets"][0])
                for name, t in data.items()
            )
            end = 8 + length + max((t["data_offsets"][1] for t in data.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as cause:
            raise _bad(path, "its safetensors header is damaged") from cause
    if size != end:
        raise _bad(path, f"it has {size:,} bytes where its header says {end:,}")
    return Header("safetensors", tensors, metadata)


def header_parameters(section: ModelSection, *, recipe_dir: Path, cache: Path) -> int | None:
    """The number of weights that a recipe's checkpoint has, by its header; None when that can't be known cheaply.

    A torch file has no header: its size, at four bytes a weight, is the guess.
    """
    from edgec.sources.fetch import at_hand

    path = at_hand(section.from_, recipe_dir=recipe_dir, cache=cache) if section.from_ else None
    if path is None:
        return None
    if path.is_dir():
        return sum(read_safetensors_header(p).parameters for p in path.glob("*.safetensors")) or None
    if path.suffix == ".safetensors":
        return read_safetensors_header(path).parameters
    if path.suffix == ".gguf":
        from edgec.sources.gguf_header import read_gguf_header

        return read_gguf_header(path).parameters
    return path.stat().st_size // 4


def load_state_dict(path: Path) -> dict[str, torch.Tensor]:
    """The state dict in a .safetensors or a torch file, on the CPU.

    Raises:
        SourceError: UNSAFE_FILE for a pickle that would run code, BAD_CHECKPOINT for a file that can't be read or holds
            no state dict, NOT_FINITE for NaN or infinity among the weights.
    """
    state = _load_safetensors(path) if path.suffix == ".safetensors" else _load_torch(path)
    check_finite(path, state)
    return state


def _load_safetensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    read_safetensors_header(path)
    try:
        return load_file(path)
    except SafetensorError as cause:
        raise _bad(path, str(cause)) from cause


def _load_torch(path: Path) -> dict[str, torch.Tensor]:
    import pickle

    import torch

    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as cause:
        if wants_code := _code_in(path, str(cause)):
            raise SourceError(
                f"{path} is refused: its pickle would run code ({wants_code}) when loaded",
                hint="save the weights alone: torch.save(model.state_dict(), …), or as safetensors",
                reason=Reason.UNSAFE_FILE,
            ) from cause
        raise _bad(path, "its pickle is damaged") from cause
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError, IndexError, TypeError) as cause:
        words = str(cause)
        if "TorchScript" in words:
            raise _bad(path, "it is a TorchScript program, not a state dict") from cause
        raise _bad(path, words.splitlines()[0].partition(". ")[0] if words else type(cause).__name__) from cause
    return _find_state(path, loaded)


def _code_in(path: Path, words: str) -> str:
    """The function or class that a refused pickle asks for, "" when it was refused for being damaged.

    torch names it, except in pickles of newer protocols, which it does not read: their opcodes are listed (not run).
    """
    import pickletools

    if named := re.search(r"GLOBAL (\S+)", words):
        return named[1]
    strings: list[str] = []
    try:
        for operation, argument, _ in pickletools.genops(path.read_bytes()):
            if operation.name in ("GLOBAL", "INST"):
                return str(argument).replace(" ", ".")
            if operation.name == "STACK_GLOBAL":
                return ".".join(strings[-2:])
            if isinstance(argument, str):
                strings.append(argument)
    except ValueError:  # not a pickle to its end
        return ""
    return ""


def _find_state(path: Path, loaded: Any) -> dict[str, torch.Tensor]:
    """The state dict itself, out of what a training framework saved around it."""
    import torch

    def is_state(value: Any) -> bool:
        return isinstance(value, dict) and bool(value) and all(isinstance(v, torch.Tensor) for v in value.values())

    if is_state(loaded):
        state: dict[str, torch.Tensor] = loaded
        return state
    if isinstance(loaded, dict):
        for key in _NESTED:
            if is_state(loaded.get(key)):
                return dict(loaded[key])
        raise _bad(path, f"no state dict among its keys {', '.join(map(str, list(loaded)[:8]))}")
    raise _bad(path, f"it holds a {type(loaded).__name__}, not a state dict")


def check_finite(where: Path | str, state: dict[str, torch.Tensor]) -> None:
    """Raise NOT_FINITE, with the tensor's name, when a weight is NaN or infinite."""
    import torch

    for name, tensor in state.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            count = int((~torch.isfinite(tensor)).sum())
            raise SourceError(
                f"{where}: {count:,} of {tensor.numel():,} values of `{name}` are NaN or infinite",
                hint="this checkpoint was saved after its training diverged: take an earlier one",
                reason=Reason.NOT_FINITE,
            )


def load_into(module: torch.nn.Module, state: dict[str, torch.Tensor], where: Path | str) -> str:
    """Load `state` into `module`, strictly, after taking off a wrapper's prefix; gives the prefix, "" mostly.

    Raises:
        SourceError: BAD_CHECKPOINT, with what is missing, unexpected, or of another shape, in one line.
    """
    own = module.state_dict()
    prefix = max(("", *_PREFIXES), key=lambda p: len(own.keys() & _strip(state, p).keys()))
    state = _strip(state, prefix) if prefix else state
    # BatchNorm's counter is absent from checkpoints older than torch 0.4.1 and plays no part in inference.
    missing = [k for k in own if k not in state and not k.endswith("num_batches_tracked")]
    unexpected = [k for k in state if k not in own]
    shapes = [
        f"{k} {list(state[k].shape)} for {list(own[k].shape)}"
        for k in own
        if k in state and state[k].shape != own[k].shape
    ]
    faults = [
        f"{len(names)} {word}: {', '.join(names[:_SHOWN])}{' …' if len(names) > _SHOWN else ''}"
        for word, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
        if names
    ]
    if faults:
        raise SourceError(
            f"{where} does not fit {type(module).__name__}: {'; '.join(faults)}",
            hint="is this the architecture, with these `args`, that the checkpoint was saved from?",
            reason=Reason.BAD_CHECKPOINT,
        )
    module.load_state_dict(state, strict=False)
    return prefix


def _strip(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {k.removeprefix(prefix): v for k, v in state.items()}
