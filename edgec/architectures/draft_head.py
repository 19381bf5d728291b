"""Tiny heads that guess what a Llama will say next, from its last hidden state: drafts for speculative decoding.

The target has computed h_t, its hidden state after the final norm at position t, and x_{t+1} was sampled from it. A
head proposes x_{t+2}, x_{t+3}, …, over a reduced vocabulary of frequent tokens (EAGLE-3's way), because the whole
output layer is a fifth of a small model's weights.

* `RecurrentHead` (after Ankner et al., "Hydra", 2024, and Zhang et al., "Recurrent Drafter", 2024) keeps one state and
  no cache:

      s_0 = h_t;  for i = 1 … γ:   e = rms_norm(embedding(x_{t+i})) · embed_norm
         block 0:      u = [rms_norm(s_{i−1}) · norm_0, e];   s = s_{i−1} + down_0(silu(gate_0 u) · up_0 u)
         block b ≥ 1:  u = rms_norm(s) · norm_b;              s = s + down_b(silu(gate_b u) · up_b u)
         s_i = s;      logits of x_{t+i+1} = head · (rms_norm(s_i) · norm)

* `AttentiveHead` (after Li et al., "EAGLE", 2024) sees the whole text: one projection of [h; e] and one decoder layer
  with a KV cache of its own. It is here to be compared with; the native engine runs the recurrent one.

Both share names and shapes of `norm` and `head`. The weights that travel are those of `pack`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from edgec.architectures.llama import MLP, Attention, LlamaConfig, RMSNorm
from edgec.architectures.rope import tables
from edgec.errors import ConversionError, Reason, SourceError

Design = Literal["recurrent", "attentive"]
ROUND_TO = 32  # widths and draft vocabularies are multiples of this: the engine's group of activations
LEAST_SCALE = 1e-12


@dataclass(frozen=True)
class DraftShape:
    """A head's sizes, as the manifest has them: inner widths of its blocks, tokens it can propose."""

    design: Design
    widths: tuple[int, ...]
    vocab: int

    def __post_init__(self) -> None:
        for name, size in (*((f"widths[{i}]", w) for i, w in enumerate(self.widths)), ("vocab", self.vocab)):
            if size < ROUND_TO or size % ROUND_TO:
                raise _bad(f"{name} is {size}, and must be a multiple of {ROUND_TO}")
        if not self.widths:
            raise _bad("it has no block: give at least one width")

    def to_dict(self) -> dict[str, Any]:
        return {"design": self.design, "widths": list(self.widths), "vocab": self.vocab}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> DraftShape:
        return DraftShape(data["design"], tuple(int(w) for w in data["widths"]), int(data["vocab"]))


def _bad(what: str) -> ConversionError:
    return ConversionError(f"draft head: {what}", reason=Reason.BAD_OPTION)


class GatedBlock(nn.Module):
    """s + down(silu(gate u) · up u), u being the normalised s, with the token beside it in the first block."""

    def __init__(self, hidden: int, inputs: int, width: int, eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden, eps)
        self.gate_proj = nn.Linear(inputs, width, bias=False)
        self.up_proj = nn.Linear(inputs, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, state: torch.Tensor, token: torch.Tensor | None = None) -> torch.Tensor:
        """state (…, hidden), token (…, hidden) or None → (…, hidden)."""
        u = self.norm(state)
        if token is not None:
            u = torch.cat((u, token), -1)
        out: torch.Tensor = state + self.down_proj(functional.silu(self.gate_proj(u)) * self.up_proj(u))
        return out


class RecurrentHead(nn.Module):
    """One state, no cache. `token_map` (V_d) int32 ascending: the full vocabulary's number of each draft token."""

    def __init__(self, config: LlamaConfig, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, eps = config.hidden_size, config.norm_eps
        self.embed_norm = RMSNorm(hidden, eps)
        inputs = [2 * hidden, *[hidden] * (len(shape.widths) - 1)]
        self.blocks = nn.ModuleList(GatedBlock(hidden, i, w, eps) for i, w in zip(inputs, shape.widths, strict=True))
        self.norm = RMSNorm(hidden, eps)
        self.head = nn.Linear(hidden, shape.vocab, bias=False)
        self.register_buffer("token_map", torch.zeros(shape.vocab, dtype=torch.int32))
        self.token_map: torch.Tensor

    def step(self, state: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """s_{i−1} and the target's embedding of x_{t+i}, both (…, hidden) → s_i (…, hidden)."""
        token = self.embed_norm(embedded)
        for index, block in enumerate(self.blocks):
            state = block(state, token if index == 0 else None)
        return state

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """s_i (…, hidden) → logits of x_{t+i+1} over the draft vocabulary, (…, V_d)."""
        out: torch.Tensor = self.head(self.norm(state))
        return out

    def unroll(self, hidden: torch.Tensor, embedded: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """States after 1 … `steps` steps from every position of a text, along its own tokens.

        Args:
            hidden: h_t, (B, T, hidden).
            embedded: the embedding of x_{t+1}, (B, T, hidden).

        Returns:
            s_i of every position t for which x_{t+i} is in the text: entry i − 1 is (B, T − i + 1, hidden).
        """
        state, states = hidden, list[torch.Tensor]()
        for i in range(steps):
            length = hidden.shape[1] - i
            state = self.step(state[:, :length], embedded[:, i:])
            states.append(state)
        return states


class AttentiveHead(nn.Module):
    """fc([h; e]) and one Llama layer over the text so far, whose inputs at drafted positions are its own outputs."""

    def __init__(self, config: LlamaConfig, shape: DraftShape) -> None:
        super().__init__()
        if len(shape.widths) != 1:
            raise _bad("the attentive design has one layer: give one width")
        self.shape, self.config = shape, config
        hidden, eps = config.hidden_size, config.norm_eps
        self.embed_norm = RMSNorm(hidden, eps)
        self.state_norm = RMSNorm(hidden, eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.input_norm = RMSNorm(hidden, eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(hidden, eps)
        self.mlp = MLP(LlamaConfig(**(config.to_dict() | {"intermediate_size": shape.widths[0]})))
        self.norm = RMSNorm(hidden, eps)
        self.head = nn.Linear(hidden, shape.vocab, bias=False)
        self.register_buffer("token_map", torch.zeros(shape.vocab, dtype=torch.int32))
        self.token_map: torch.Tensor

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """As `RecurrentHead.logits`."""
        out: torch.Tensor = self.head(self.norm(state))
        return out

    def unroll(self, hidden: torch.Tensor, embedded: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """As `RecurrentHead.unroll`.

        In step i, position t + i − 1 attends to the cache that the target's hidden states gave up to t, and to the
        i − 1 positions that were drafted after it.
        """
        c, length = self.config, hidden.shape[1]
        angles = tables(length + steps, c.head_dim, c.rope_theta, c.rope_scaling)
        cos, sin = (a[:, None, :].to(hidden.device) for a in angles)
        groups = c.heads // c.kv_heads
        keys, values, states = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
        state = hidden
        for i in range(steps):
            count = length - i
            mixed = self.fc(torch.cat((self.state_norm(state[:, :count]), self.embed_norm(embedded[:, i:])), -1))
            q, k, v = self.attention.project(self.input_norm(mixed), cos[i : i + count], sin[i : i + count])
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T − i, D)
            keys.append(k.repeat_interleave(groups, 1))
            values.append(v.repeat_interleave(groups, 1))
            attended = self._attend(q, keys, values, count)
            mixed = state[:, :count] + mixed + self.attention.o_proj(attended.transpose(1, 2).flatten(2))
            state = mixed + self.mlp(self.mlp_norm(mixed))
            states.append(state)
        return states

    def _attend(
        self, q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], count: int
    ) -> torch.Tensor:
        """q of row t sees step 0's keys at 0 … t (causal), and its own run's key of every later step."""
        scores = q @ keys[0][:, :, :count].transpose(-1, -2)  # (B, H, T, T)
        causal = torch.ones(count, count, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~causal, float("-inf"))
        own = [(q * k[:, :, :count]).sum(-1, keepdim=True) for k in keys[1:]]  # each (B, H, T, 1)
        weights = torch.softmax(torch.cat((scores, *own), -1) * self.config.head_dim**-0.5, -1)
        out = weights[..., :count] @ values[0][:, :, :count]
        for j, v in enumerate(values[1:]):
            out = out + weights[..., count + j : count + j + 1] * v[:, :, :count]
        return out


Head = RecurrentHead | AttentiveHead


def build(config: LlamaConfig, shape: DraftShape) -> Head:
    """A head with random weights, whose blocks change nothing yet: layers that add to the state start at zero.

    Raises:
        SourceError: no such design.
    """
    if shape.design not in ("recurrent", "attentive"):
        raise SourceError(
            f"a draft head of design `{shape.design}`; this edgec knows `recurrent` and `attentive`",
            hint="use the edgec that built the bundle",
            reason=Reason.BAD_CHECKPOINT,
        )
    head = RecurrentHead(config, shape) if shape.design == "recurrent" else AttentiveHead(config, shape)
    for name, layer in head.named_modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            if name.endswith(("down_proj", "o_proj", "fc")):
                nn.init.zeros_(layer.weight)
    return head


def pack(head: Head) -> dict[str, torch.Tensor]:
    """What travels: `draft.<layer>.weight` int8 (out, in) with `.scale` (out) float32, norms float32, the map int32.

    Symmetric INT8 per output channel, as the quantise pass does it: w[o, i] ≈ scale[o] · q[o, i].
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, value in head.state_dict().items():
        value = value.detach().cpu()
        if value.dim() == 2:
            scale = (value.abs().amax(1) / 127).clamp(min=LEAST_SCALE).float()  # (out,)
            tensors[f"draft.{name.removesuffix('.weight')}.scale"] = scale
            value = (value.float() / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
        elif value.dtype != torch.int32:
            value = value.float()
        tensors[f"draft.{name}"] = value.contiguous()
    return tensors


def unpack(config: LlamaConfig, shape: DraftShape, tensors: Mapping[str, torch.Tensor]) -> Head:
    """The head that `pack` wrote, its INT8 weights as scale · q in float32, in evaluation mode.

    Raises:
        ConversionError: a tensor is missing, left over, or of another shape.
    """
    head = build(config, shape)
    state: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if name.startswith("draft.") and not name.endswith(".scale"):
            if value.dtype == torch.int8:
                value = value.float() * tensors[f"{name.removesuffix('.weight')}.scale"][:, None]
            state[name.removeprefix("draft.")] = value
    wanted = {name: t.shape for name, t in head.state_dict().items()}
    if {name: t.shape for name, t in state.items()} != wanted:
        wrong = sorted(n for n in {*wanted, *state} if n not in state or wanted.get(n) != state[n].shape)
        raise ConversionError(
            f"the draft head's weights are not those of a {shape.design} head with widths {list(shape.widths)} and "
            f"{shape.vocab} tokens: {', '.join(wrong[:3])}",
            hint="build the bundle again",
            reason=Reason.BAD_CHECKPOINT,
        )
    head.load_state_dict(state)
    return head.eval()
