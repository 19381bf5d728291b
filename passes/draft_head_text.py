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

    from .draft_head_writers import Writer

SAMPLE_BLOCK = 128  # tokens whose weights are added before one of them is drawn


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
    writer: Writer,
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
        writer: computes the target, for as many rows of this length.
        prompts: tokens of prompts, without end; one longer than half of `length` is cut.
        length: tokens of a row.
        temperatures: of each row; 0 takes the most likely token.
        ends: tokens that end an answer.
        longest: tokens of an answer after which it ends anyway.
        seed: of the sampling.
        on_step: hears of every position that is done.
    """
    import torch

    rows = len(temperatures)
    generator = torch.Generator().manual_seed(seed)
    out = Streams(
        torch.zeros(rows, length, dtype=torch.int32),
        torch.zeros(rows, length, dtype=torch.int32),
        torch.zeros(rows, length, dtype=torch.bool),
        torch.zeros(rows, length, writer.hidden_size, dtype=torch.float16),
        torch.zeros(rows, length),
        torch.tensor(temperatures, dtype=torch.float32),
    )
    kinds = [(t, [i for i, own in enumerate(temperatures) if own == t]) for t in sorted(set(temperatures))]
    waiting = [_next_prompt(prompts, length) for _ in range(rows)]  # of each row's prompt, what is not read yet
    start, said = torch.zeros(rows, dtype=torch.int64), [0] * rows
    ids = torch.tensor([w.pop(0) for w in waiting])
    for t in range(length):
        hidden, logits = writer.step(ids, start, t)
        out.tokens[:, t], out.starts[:, t], out.hidden[:, t] = ids.int(), start.int(), hidden.half()
        out.written[:, t] = torch.tensor([s > 0 for s in said])
        greatest, ids = logits.max(-1)
        weights = logits.sub_(greatest[:, None]).exp_()
        out.normalisers[:, t] = weights.sum(-1).log_() + greatest
        for temperature, those in kinds:
            if temperature > 0:
                ids[those] = _draw(weights[those].pow_(1 / temperature), generator)
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


def _draw(weights: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One token of each row (R, vocab), each with a probability like its weight: first a block of tokens, then one."""
    import torch
    from torch.nn import functional

    rows, vocab = weights.shape
    if vocab % SAMPLE_BLOCK:
        weights = functional.pad(weights, (0, -vocab % SAMPLE_BLOCK))
    weights = weights.view(rows, -(-vocab // SAMPLE_BLOCK), SAMPLE_BLOCK)
    reach = weights.sum(-1).cumsum(-1)  # (R, blocks)
    drawn = torch.rand(rows, 1, generator=generator) * reach[:, -1:]
    block = torch.searchsorted(reach, drawn, right=True).clamp_(max=reach.shape[1] - 1)  # (R, 1)
    before = torch.where(block > 0, reach.gather(1, (block - 1).clamp(min=0)), 0.0)
    chosen = weights.gather(1, block[..., None].expand(-1, -1, SAMPLE_BLOCK)).squeeze(1)  # (R, SAMPLE_BLOCK)
    inside = torch.searchsorted(chosen.cumsum(-1), drawn - before, right=True)
    # Rounding may put a draw behind its block's end; the block's last token that has any weight is meant then.
    last = (chosen > 0).long().mul_(torch.arange(1, SAMPLE_BLOCK + 1)).amax(-1, keepdim=True) - 1
    return (block * SAMPLE_BLOCK + torch.minimum(inside, last)).squeeze(1)
