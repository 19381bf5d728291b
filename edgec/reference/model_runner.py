"""One pass of a Llama over a packed batch: the tokens of all sequences of a step, one after the other, unpadded."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from edgec.architectures.llama import Llama, LlamaConfig, RMSNorm
from edgec.reference.attention import attention_for
from edgec.reference.cuda_graphs import DecodeGraphs
from edgec.reference.options import ReferenceOptions
from edgec.reference.quantised import round_to_int8
from edgec.reference.scheduler import Copy
from edgec.runtime.abi import Status
from edgec.runtime.failures import EngineError

CPU_MEMORY = 2 << 30  # bytes for keys and values, when nobody says how many
CUDA_SHARE = 0.8  # of the memory that is free once the weights are there


@dataclass(frozen=True)
class Rows:
    """A piece of a sequence: tokens from position `start` on, the blocks of the whole, and which rows are wanted."""

    tokens: Sequence[int]
    start: int
    table: Sequence[int]
    wanted: Sequence[int] = ()  # positions whose logits are wanted, ascending


@dataclass(frozen=True)
class Batch:
    """What the layers see, on the device: T rows of S sequences.

    Attributes:
        tokens, positions, slots: (T,) int64.
        block_tables: (S, W) int32, padded with 0.
        context_lens: (S,) int32, with this step's rows.
        query_start: (S + 1,) int32.
        wanted: (R,) int64, the rows that go through the head.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    query_start: torch.Tensor
    wanted: torch.Tensor


class ModelRunner:
    """A model and its pools of keys and values.

    `layers` is a function of tensors alone and writes nothing but the pools, so on CUDA it is captured as graphs.
    """

    capturable = True  # whether `layers` reads nothing back from the device

    def __init__(self, model: Llama, options: ReferenceOptions, context: int) -> None:
        """
        Args:
            model: float32. Its weights are shared where they can stay as they are, and copied otherwise.

        Raises:
            EngineError: OVER_BUDGET when not one block fits the memory.
        """
        self.options = options
        self.config: LlamaConfig = model.config
        self.device = torch.device(options.device)
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        self.context = context
        self.model = own_copy(model, self.device, self.dtype)
        self._attention = attention_for(self.device)
        cos, sin = self.model.rope(context, self.device)
        self._cos, self._sin = cos.to(self.dtype), sin.to(self.dtype)  # (context, 1, D)
        row = self.config.kv_heads * self.config.head_dim * self.dtype.itemsize
        self.block_bytes: int = 2 * self.config.layers * options.block_size * row
        self.blocks = self._affordable_blocks()
        slots = self.blocks * options.block_size
        shape = (slots, self.config.kv_heads, self.config.head_dim)
        try:
            self.pools: list[tuple[torch.Tensor, ...]] = [
                (
                    torch.zeros(shape, dtype=self.dtype, device=self.device),
                    torch.zeros(shape, dtype=self.dtype, device=self.device),
                )
                for _ in range(self.config.layers)
            ]
        except torch.OutOfMemoryError as error:
            raise EngineError(
                Status.OVER_BUDGET, f"{self.blocks} blocks of keys and values don't fit the device"
            ) from error
        self._graphs: DecodeGraphs | None = None
        if self.device.type == "cuda" and options.cuda_graphs and self.capturable:
            width = -(-context // options.block_size)
            like = self.batch([Rows([0], 0, [0])])
            self._graphs = DecodeGraphs(self.layers, like, max_batch=options.max_batch, table_width=width)

    def _affordable_blocks(self) -> int:
        options = self.options
        memory = options.memory
        if memory is None and options.blocks is None:
            memory = CPU_MEMORY
            if self.device.type == "cuda":
                memory = int(torch.cuda.mem_get_info(self.device)[0] * CUDA_SHARE)
        enough = options.max_batch * -(-self.context // options.block_size)
        wanted = options.blocks if options.blocks is not None else enough
        if memory is None:
            return wanted
        fitting = memory // self.block_bytes
        if fitting < 1 or (options.blocks is not None and fitting < wanted):
            needed = max(wanted if options.blocks is not None else 1, 1) * self.block_bytes
            raise EngineError(
                Status.OVER_BUDGET, f"{memory} bytes for keys and values are too few: {needed} are needed at least"
            )
        return min(wanted, fitting)

    def batch(self, pieces: Sequence[Rows]) -> Batch:
        """Pack pieces of sequences."""
        size = self.options.block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        wanted: list[int] = []
        starts = [0]
        for piece in pieces:
            span = range(piece.start, piece.start + len(piece.tokens))
            wanted.extend(starts[-1] + position - piece.start for position in piece.wanted)
            tokens.extend(piece.tokens)
            positions.extend(span)
            slots.extend(piece.table[p // size] * size + p % size for p in span)
            starts.append(len(tokens))
        width = max(len(piece.table) for piece in pieces)
        tables = [[*piece.table, *[0] * (width - len(piece.table))] for piece in pieces]
        contexts = [piece.start + len(piece.tokens) for piece in pieces]

        def tensor(values: Sequence[object], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)

        return Batch(
            tensor(tokens, torch.int64),
            tensor(positions, torch.int64),
            tensor(slots, torch.int64),
            tensor(tables, torch.int32),
            tensor(contexts, torch.int32),
            tensor(starts, torch.int32),
            tensor(wanted, torch.int64),
        )

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Keys and values of all rows go to their slots; gives the wanted rows' final hidden states, (R, hidden)."""
        graphs = self._graphs
        rows = graphs(batch) if graphs is not None and graphs.fits(batch) else self.layers(batch)
        hidden: torch.Tensor = self.model.norm(rows[batch.wanted])
        return hidden

    def layers(self, batch: Batch) -> torch.Tensor:
        """All rows through all layers, (T, hidden)."""
        x: torch.Tensor
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]  # (T, 1, D)
        x = self.model.embed_tokens(batch.tokens)[None]  # (1, T, hidden): the packed batch is one row of sequences
        for layer, pools in zip(self.model.blocks(), self.pools, strict=True):
            k_pool, v_pool = pools
            q, k, v = layer.self_attn.project(layer.input_layernorm(x), cos, sin)  # (1, T, H or Hkv, D)
            if self.options.kv == "int8":
                k, v = round_to_int8(k), round_to_int8(v)
            k_pool.index_copy_(0, batch.slots, k[0])
            v_pool.index_copy_(0, batch.slots, v[0])
            attended = self._attention(
                q[0],
                k_pool,
                v_pool,
                batch.block_tables,
                batch.context_lens,
                batch.query_start,
                self.config.head_dim**-0.5,
                self.options.block_size,
            )
            x = x + layer.self_attn.o_proj(attended.flatten(1)[None])
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states (R, hidden) → logits (R, vocab) float32."""
        out: torch.Tensor = self.model.lm_head(hidden).float()
        return out

    @torch.inference_mode()
    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Whole blocks within the pools; every source is read before a target is written."""
        if not copies:
            return
        sources = torch.tensor([c.source for c in copies], device=self.device)
        targets = torch.tensor([c.target for c in copies], device=self.device)
        for pools in self.pools:
            for pool in pools:
                blocks = pool.view(-1, self.options.block_size, *pool.shape[1:])
                blocks[targets] = blocks[sources]

    @property
    def weight_bytes(self) -> int:
        return sum(p.numel() * p.itemsize for p in self.model.parameters())


def own_copy(model: Llama, device: torch.device, dtype: torch.dtype) -> Llama:
    """Modules of our own, so that hooks on them are nobody else's; the weights are the model's where nothing changes.

    In half precision, norms stay in float32: squares overflow float16 at 256.
    """
    parameters = list(model.parameters())
    if all(p.dtype == dtype and p.device.type == device.type for p in parameters):
        own: Llama = copy.deepcopy(model, {id(p): p for p in parameters})
        return own.eval()
    own = copy.deepcopy(model).to(device=device, dtype=dtype)
    if dtype != torch.float32:
        norms = dict(model.named_modules())
        for name, module in list(own.named_modules()):
            if isinstance(module, RMSNorm):
                exact = norms[name]
                assert isinstance(exact, RMSNorm)
                own.set_submodule(name, WideNorm(copy.deepcopy(exact).to(device)))
    return own.eval()


class WideNorm(nn.Module):
    """RMSNorm in float32, whatever comes in."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(x.float()).to(x.dtype)
        return out
