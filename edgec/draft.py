"""A draft head on its way from the pass to the bundle: its sizes, and its weights as a device reads them.

One safetensors file holds both, in a model's folder between stages and among a program's companions. What the tensors
are, says architectures/draft_head.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgec.errors import Reason, StoreError

if TYPE_CHECKING:
    import torch

DRAFT_FILE = "draft.safetensors"
_SHAPE = "shape"


@dataclass(frozen=True)
class Draft:
    """`shape` is `DraftShape.to_dict()`; `tensors` are those of `pack`: INT8 weights, their scales, norms, the map."""

    shape: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def save(self, path: Path) -> None:
        from safetensors.torch import save_file

        save_file(self.tensors, path, metadata={_SHAPE: json.dumps(self.shape, sort_keys=True)})

    @staticmethod
    def load(path: Path) -> Draft:
        """Read what `save` wrote.

        Raises:
            StoreError: the file is damaged.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                shape = json.loads((file.metadata() or {})[_SHAPE])
                return Draft(shape, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise StoreError(
                f"{path} is damaged: {str(error).splitlines()[0][:200]}",
                hint="delete it and build again",
                reason=Reason.STORE,
            ) from error
