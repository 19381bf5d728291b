"""Who computes the text that a draft head learns from: the native engine, or PyTorch.

Both answer one position of many rows at a time. The engine's INT8 products write twice as fast as bfloat16 on a CPU,
and its hidden states are the very ones that the head will start from on the device. PyTorch takes any weights, and a
GPU where there is one.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from edgec.architectures.llama import Llama

MOST_BATCH = 64  # sequences of an engine, which sizes its pool for twice as many of full length


class Writer(Protocol):
    """Computes rows of text, position by position.

    Attributes:
        hidden_size: of the target.
    """

    hidden_size: int

    def step(self, ids: torch.Tensor, start: torch.Tensor, t: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Position `t` of every row.

        Args:
            ids: (rows,) int64, the token there.
            start: (rows,) int64, the position at which the row's present text begins; it sees nothing before.
            t: the position; every call's is the one after the last one's, or 0 for new rows.

        Returns:
            Hidden states after the final norm (rows, hidden) and logits (rows, vocab), float32 on the CPU.
        """
        ...


class TorchWriter:
    """The target in PyTorch, in the type and on the device that it has."""

    def __init__(self, model: Llama, length: int) -> None:
        """
        Args:
            model: as `dense_copy` makes it.
            length: positions of a row.
        """
        weight = model.embed_tokens.weight
        self._model, self._length, self.hidden_size = model, length, model.config.hidden_size
        self._dtype, self._device = weight.dtype, weight.device
        self._cos, self._sin = (a.to(self._dtype) for a in model.rope(length, self._device))  # (length, 1, head_dim)

    def step(self, ids: torch.Tensor, start: torch.Tensor, t: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Writer.step`. Positions of a text needn't start at 0, because rotary positions are relative."""
        import torch

        model, config, rows = self._model, self._model.config, len(ids)
        groups = config.heads // config.kv_heads
        if t == 0:
            pool = (config.layers, rows, config.kv_heads, self._length, config.head_dim)
            self._keys, self._values = (torch.zeros(pool, dtype=self._dtype, device=self._device) for _ in range(2))
        with torch.no_grad():
            x = model.embed_tokens(ids.to(self._device))[:, None]  # (R, 1, hidden)
            unseen = torch.arange(t + 1)[None] < start[:, None]  # (R, t + 1): of earlier texts
            bias = torch.zeros(rows, 1, 1, t + 1, dtype=self._dtype).masked_fill_(unseen[:, None, None], float("-inf"))
            bias = bias.to(self._device)
            for i, layer in enumerate(model.blocks()):
                normed = layer.input_layernorm(x)
                q, k, v = layer.self_attn.project(normed, self._cos[t : t + 1], self._sin[t : t + 1])
                self._keys[i, :, :, t], self._values[i, :, :, t] = k[:, 0], v[:, 0]  # of (R, 1, H or Hkv, D)
                q = q.view(rows, config.kv_heads, groups, config.head_dim)
                scores = q @ self._keys[i, :, :, : t + 1].transpose(-1, -2) * config.head_dim**-0.5 + bias
                attended = torch.softmax(scores, -1) @ self._values[i, :, :, : t + 1]  # (R, Hkv, G, D)
                x = x + layer.self_attn.o_proj(attended.reshape(rows, 1, -1))
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            hidden = model.norm(x)[:, 0]  # (R, hidden)
            return hidden.float().cpu(), model.lm_head(hidden).float().cpu()


class EngineWriter:
    """The target on the native engine, each row a sequence whose blocks are placed here. Closed after use."""

    def __init__(self, folder: Path, rows: int, length: int, threads: int) -> None:
        """
        Args:
            folder: the native artefact's files, as `native_files` writes them.
            rows: texts side by side, at most.
            length: positions of a row.
            threads: to compute with.

        Raises:
            EngineError: the engine refuses the model.
            ToolMissing: the engine has to be compiled, and there is no compiler.
        """
        import numpy as np

        from edgec.runtime.abi import Speculation
        from edgec.runtime.engine import Engine, EngineOptions

        block = 16
        width = -(-length // block)
        options = EngineOptions(
            threads=threads,
            block_size=block,
            context=max(length, -(-rows * width // (2 * MOST_BATCH)) * block),
            max_batch=MOST_BATCH,
            step_tokens=2 * MOST_BATCH,
            speculation=Speculation.OFF,
            memory_budget=2**40,  # what it takes follows from the sizes above
        )
        self._engine = Engine(folder, options)
        first = int(self._engine.description["first_block"])
        self._block, self.hidden_size = block, int(self._engine.description["hidden_size"])
        self._tables = np.arange(rows * width, dtype=np.int32).reshape(rows, width) + first

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def step(self, ids: torch.Tensor, start: torch.Tensor, t: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Writer.step`. A new text takes its row's blocks from the first one on."""
        import numpy as np
        import torch

        rows = np.arange(len(ids), dtype=np.int32)
        positions = (t - start).int().numpy()
        slots = self._tables[rows, positions // self._block] * self._block + positions % self._block
        logits, hidden = self._engine.forward(
            ids.int().numpy(), positions, slots, rows, self._tables, hidden_size=self.hidden_size
        )
        assert hidden is not None
        return torch.from_numpy(hidden), torch.from_numpy(logits)


def native_files(module: Llama, ends: Sequence[int], tokenizer: Path, out: Path) -> None:
    """Write what the engine opens: a Llama's weights as the native target has them, its tokenizer, and the manifest.

    Args:
        module: with INT8 weights.
        ends: tokens that end an answer.
        tokenizer: the folder of tokenizer.json.
        out: a folder that is made, or empty.

    Raises:
        ConversionError: a weight is missing.
    """
    from edgec.targets.native import NativeOptions
    from edgec.targets.native_model import MODEL_FILE, write_manifest, write_model

    from edgec.decoder import Decoder
    from edgec.model import artifact_file

    out.mkdir(parents=True, exist_ok=True)
    decoder = Decoder(module.config.to_dict(), {}, tuple(ends))
    write_model(module.state_dict(), decoder, None, out)
    shutil.copy(tokenizer / "tokenizer.json", out)
    write_manifest(out, decoder, None, NativeOptions(), [artifact_file(out, MODEL_FILE, "model")])
