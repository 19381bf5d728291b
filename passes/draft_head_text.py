"""Text that a target writes, with its hidden states: what a draft head learns from (self-distillation).

Rows of one batch are streams: each begins with a prompt, goes on with what the target says to it, and takes the next
prompt where the answer ends. A text sees only itself (keys from its own first position on); its positions need not
start at 0, because rotary positions are relative. So no row ever waits for another, and prompts are read in the same
steps in which other rows are answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from edgec.architectures.llama import Llama


@dataclass(frozen=True)
class Streams:
    """Rows of text, one after the other.

    Attributes:
        tokens: (rows, length) int32.
        starts: (rows, length) int32: the row's position at which the text of this token begins.
        written: (rows, length) bool: the token is the target's own, no prompt's.
        hidden: (rows, length, hidden) float16: what the target computed at each token, after its final norm.
        normalisers: (rows, length) float32: log Σ exp of the target's logits there, over its whole vocabulary.
        temperatures: (rows,) float32 that the row was sampled at.
    """

    tokens: torch.Tensor
    starts: torch.Tensor
    written: torch.Tensor
    hidden: torch.Tensor
    normalisers: torch.Tensor
    temperatures: torch.Tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def dense_copy(module: Llama, dtype: torch.dtype) -> Llama:
    """A Llama with the same numbers in `dtype`, INT8 weights as scale · q; without gradients, in evaluation mode."""
    import torch

    from edgec.architectures.llama import Llama

    state = module.state_dict()
    dense = {}
    for name, value in state.items():
        if value.dtype == torch.int8:
            value = value.float() * state[f"{name.removesuffix('.weight')}.scale"].float()[:, None]
        dense[name] = value.to(dtype)
    copy = Llama(module.config).to(dtype)
    copy.load_state_dict({name: dense[name] for name in copy.state_dict()})
    return copy.eval().requires_grad_(False)


def write_streams(
    model: Llama,
    prompts: Iterator[list[int]],
    *,
    length: int,
    temperatures: Sequence[float],
    ends: Sequence[int],
    longest: int,
    seed: int,
    on_step: Callable[[int], None] = lambda _: None,
) -> Streams:
    """Let the target write, one row for each temperature.

    Args:
        model: as `dense_copy` makes it; computes in its own type.
        prompts: tokens of prompts, without end; one longer than half of `length` is cut.
        length: tokens of a row.
        temperatures: of each row; 0 takes the most likely token.
        ends: tokens that end an answer.
        longest: tokens of an answer after which it ends anyway.
        seed: of the sampling.
        on_step: hears of every position that is done.
    """
    import torch

    rows, config = len(temperatures), model.config
    dtype, device = model.embed_tokens.weight.dtype, model.embed_tokens.weight.device
    generator = torch.Generator().manual_seed(seed)
    cos, sin = (a.to(dtype) for a in model.rope(length, device))  # (length, 1, head_dim)
    pool = (config.layers, rows, config.kv_heads, length, config.head_dim)
    keys, values = (torch.zeros(pool, dtype=dtype, device=device) for _ in range(2))
    out = Streams(
        torch.zeros(rows, length, dtype=torch.int32),
        torch.zeros(rows, length, dtype=torch.int32),
        torch.zeros(rows, length, dtype=torch.bool),
        torch.zeros(rows, length, config.hidden_size, dtype=torch.float16),
        torch.zeros(rows, length),
        torch.tensor(temperatures, dtype=torch.float32),
    )
    warm, cold = (torch.nonzero(rows_).flatten() for rows_ in (out.temperatures > 0, out.temperatures <= 0))
    waiting = [_next_prompt(prompts, length) for _ in range(rows)]  # of each row's prompt, what is not read yet
    start, said = torch.zeros(rows, dtype=torch.int64), [0] * rows
    ids = torch.tensor([w.pop(0) for w in waiting])
    groups = config.heads // config.kv_heads
    with torch.no_grad():
        for t in range(length):
            x = model.embed_tokens(ids.to(device))[:, None]  # (R, 1, hidden)
            unseen = torch.arange(t + 1)[None] < start[:, None]  # (R, t + 1): of earlier texts
            bias = torch.zeros(rows, 1, 1, t + 1, dtype=dtype).masked_fill_(unseen[:, None, None], float("-inf"))
            bias = bias.to(device)
            for i, layer in enumerate(model.blocks()):
                normed = layer.input_layernorm(x)
                q, k, v = layer.self_attn.project(normed, cos[t : t + 1], sin[t : t + 1])  # (R, 1, H or Hkv, D)
                keys[i, :, :, t], values[i, :, :, t] = k[:, 0], v[:, 0]
                q = q.view(rows, config.kv_heads, groups, config.head_dim)
                scores = q @ keys[i, :, :, : t + 1].transpose(-1, -2) * config.head_dim**-0.5 + bias
                attended = torch.softmax(scores, -1) @ values[i, :, :, : t + 1]  # (R, Hkv, G, D)
                x = x + layer.self_attn.o_proj(attended.reshape(rows, 1, -1))
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            hidden = model.norm(x)[:, 0]  # (R, hidden)
            out.tokens[:, t], out.starts[:, t], out.hidden[:, t] = ids.int(), start.int(), hidden.half().cpu()
            out.written[:, t] = torch.tensor([s > 0 for s in said])
            logits = model.lm_head(hidden).float().cpu()  # sampled here, so that every device draws alike
            out.normalisers[:, t] = logits.logsumexp(-1)
            ids = torch.zeros(rows, dtype=torch.int64)
            ids[cold] = logits[cold].argmax(-1)
            ids[warm] = _sample(logits[warm] / out.temperatures[warm, None], generator)
            for row in range(rows):
                if waiting[row]:
                    ids[row] = waiting[row].pop(0)
                elif said[row] and (int(out.tokens[row, t]) in ends or said[row] >= longest):
                    waiting[row] = _next_prompt(prompts, length)
                    ids[row], start[row], said[row] = waiting[row].pop(0), t + 1, 0
                else:
                    said[row] += 1
            on_step(t + 1)
    return out


def _next_prompt(prompts: Iterator[list[int]], length: int) -> list[int]:
    return next(prompts)[: max(1, length // 2)]


def _sample(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One token of each row (R, vocab) by inversion of its distribution function."""
    import torch

    total = torch.softmax(logits, -1).cumsum(-1)
    drawn = torch.rand(len(logits), 1, generator=generator) * total[:, -1:]
    return torch.searchsorted(total, drawn, right=True).squeeze(1).clamp_(max=logits.shape[-1] - 1)
