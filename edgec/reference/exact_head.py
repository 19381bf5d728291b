"""A recurrent draft head in the native engine's arithmetic: see exact.py.

At temperature 0 a head's last bits decide at most how many tokens a pass gives. Above, the proposals' probabilities are
part of what is drawn, so the same seed gives the native engine's tokens only where the heads agree, too.
"""

from __future__ import annotations

import torch
from torch import nn

from edgec.architectures.draft_head import GatedBlock, RecurrentHead
from edgec.reference.exact import Int8Linear, exp, rms_norm


class ExactHead:
    """Implements `speculation.HeadRunner` for a head whose weights are INT8."""

    def __init__(self, head: RecurrentHead) -> None:
        """
        Raises:
            EngineError: its weights are no INT8 weights.
        """
        self.token_map = head.token_map
        self._head = head
        self._linear = {
            layer: Int8Linear(f"draft.{name}", layer)
            for name, layer in head.named_modules()
            if isinstance(layer, nn.Linear)
        }

    def step(self, state: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        token = rms_norm(self._head.embed_norm, embedded)
        for index, block in enumerate(self._head.blocks):
            assert isinstance(block, GatedBlock)
            u = rms_norm(block.norm, state)
            if index == 0:
                u = torch.cat((u, token), -1)
            gate, up = self._linear[block.gate_proj](u), self._linear[block.up_proj](u)
            state = state + self._linear[block.down_proj]((gate / (1.0 + exp(-gate))) * up)
        return state

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        return self._linear[self._head.head](rms_norm(self._head.norm, state))
