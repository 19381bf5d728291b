"""The native engine's arithmetic, bit for bit: INT8 products, and every float sum in the engine's order.

Rounding activations to INT8 makes a network chaotic: two sums that differ in their last bit end on different sides of a
rounding now and then, the next layers round that difference again, and after thirty layers of SmolLM2 two correct
implementations are 0.004 nats apart, as far as either is from float. So the engine can only be held against arithmetic
that is the same to the last bit. Its contract, from which this is written:

    products      y[n] = scale_w[n] · Σ_g scale_x[g] · (Σ_{k in group g} x[k] · w[n, k]): in a group of 32 the sum is of
                  integers, and exact; over the groups it is float32, in order
    lanes         sums of RMSNorm and softmax run over eight lanes, lane i taking elements i, i + 8, …, in order; then
                  ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7))
    attention     of float keys: scores over channels in order; values over positions in order; divided by the sum at
                  the end. Of INT8 keys: queries, and weights times the values' scales, become integers of fourteen
                  bits, so that both sums are of integers, and exact; the second one by digits of seven bits
    exp           the polynomial below; multiplications and additions are never fused

Integers below 2²⁴ are exact in float32, so float products of INT8 numbers, 32 at a time, are the integer ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection

import numpy as np
import torch
from torch import nn

from edgec.architectures.llama import Layer, Llama, RMSNorm
from edgec.architectures.rope import inverse_frequencies
from edgec.reference.attention import gather
from edgec.reference.model_runner import Batch, ModelRunner
from edgec.reference.options import ReferenceOptions
from edgec.reference.quantised import GROUP
from edgec.runtime.abi import Status
from edgec.runtime.failures import EngineError

LANES = 8
QUERY_LEVELS = 8128.0  # 63.5 · 128
WEIGHT_LEVELS = 16256.0  # 127 · 128
DIGIT = 128.0
SMALL = 1 << 18  # floats of which products are made at once, before they are summed
ROWS = 64  # of a batch that go through a layer together: what fits a cache


def sum_of_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Σ_i a[i] · b[i] over the first axis, each product rounded, added in order; the other axes broadcast."""
    first = a[0] * b[0]
    if a.device.type == "cpu" and len(a) * first.numel() <= SMALL:
        # NumPy sums pairwise along contiguous memory only; over another axis it adds slice by slice.
        products = (a * b).contiguous().view(len(a), -1).numpy()
        if products.shape[1] > 1:
            return torch.from_numpy(np.add.reduce(products, axis=0)).view(first.shape)
    product = torch.empty_like(first)
    for i in range(1, len(a)):
        torch.mul(a[i], b[i], out=product)
        first += product
    return first


def lane_sum(x: torch.Tensor) -> torch.Tensor:
    """Σ over the last axis, in eight lanes: (…, n) → (…, 1)."""
    x = nn.functional.pad(x, (0, -x.shape[-1] % LANES))
    lanes = x.view(*x.shape[:-1], -1, LANES).movedim(-2, 0)  # (n / 8, …, 8)
    v = sum_of_products(lanes, torch.ones_like(lanes[:, ..., :1]))
    v = v[..., :4] + v[..., 4:]
    v = v[..., :2] + v[..., 2:]
    return v[..., :1] + v[..., 1:]


def exp(x: torch.Tensor) -> torch.Tensor:
    """e^x within 2 ulp, after Cephes' expf; 0 below −87.33654."""
    under = x < -87.33654
    x = x.clamp(_f32(-87.33654), _f32(88.02969))
    n = (x * _f32(1.44269504088896341)).round()
    r = (x - n * _f32(0.693359375)) - n * _f32(-2.12194440e-4)
    p = torch.full_like(r, 1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + _f32(coefficient)
    p = (p * (r * r) + r) + 1.0
    power = ((n.int() + 127) << 23).view(torch.float32)
    return torch.where(under, 0.0, p * power)


def divide(a: torch.Tensor | float, b: torch.Tensor | float) -> torch.Tensor:
    """a / b, correctly rounded: with a number on one side PyTorch may multiply by a reciprocal instead."""
    like = a if isinstance(a, torch.Tensor) else b
    assert isinstance(like, torch.Tensor)
    return torch.div(*(torch.as_tensor(x, dtype=like.dtype, device=like.device).expand_as(like) for x in (a, b)))


def _f32(x: float) -> float:
    """A float64 that is a float32: PyTorch rounds scalars to the tensor's type, and this says so."""
    return float(np.float32(x))


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (…, D) → whole numbers within ±127, and their scales (…, 1)."""
    greatest = x.abs().amax(-1, keepdim=True)
    inverse = torch.where(greatest > 0, divide(127.0, greatest), 0.0)
    return (x * inverse).round(), divide(greatest, 127.0)


def rms_norm(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    square = divide(lane_sum(x * x), float(x.shape[-1])) + _f32(norm.eps)
    root = square.double().sqrt().float()  # correctly rounded, as a float32 square root in MKL is not
    return (x * divide(1.0, root)) * norm.weight


class Int8Linear:
    """A linear layer whose weights are scale[n] · q[n, k], over activations that are quantised as they come."""

    def __init__(self, name: str, layer: nn.Linear) -> None:
        q, scale = integers_of(name, layer.weight.detach())
        q = nn.functional.pad(q, (0, -q.shape[1] % GROUP))
        self.groups = q.view(len(q), -1, GROUP).permute(1, 2, 0).contiguous()  # (G, 32, N)
        self.scale = scale
        self.bias = layer.bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(T, K) → (T, N)."""
        x = nn.functional.pad(x, (0, -x.shape[1] % GROUP))
        q, scale = quantise(x.view(len(x), -1, GROUP))  # (T, G, 32), (T, G, 1)
        out = self._product(q.transpose(0, 1).contiguous(), scale.transpose(0, 1)) * self.scale
        return out if self.bias is None else out + self.bias

    def _product(self, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """q (G, T, 32), scale (G, T, 1)."""
        groups, rows = q.shape[:2]
        if groups * rows * self.groups.shape[2] <= SMALL:
            return sum_of_products(q @ self.groups, scale)
        out = (q[0] @ self.groups[0]) * scale[0]
        part = torch.empty_like(out)
        for g in range(1, groups):
            torch.mm(q[g], self.groups[g], out=part)
            out += part.mul_(scale[g])
        return out


def float_linear(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """A layer that the recipe left in float: (T, K) → (T, N), over k in order."""
    out = sum_of_products(x.T[:, :, None], layer.weight.T[:, None])
    return out if layer.bias is None else out + layer.bias


def integers_of(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What float weights scale[n] · q[n, k] (N, K) were made of: q as float (N, K), scale (N,).

    The greatest |q| of a row is 127; its scale is found to the last bit by trying the neighbours of max / 127.

    Raises:
        EngineError: they are no INT8 weights.
    """
    guess = weight.abs().amax(1, keepdim=True) / 127.0
    scale, found = guess.clone(), torch.zeros(len(weight), 1, dtype=torch.bool, device=weight.device)
    for candidate in (guess, torch.nextafter(guess, guess * 2), torch.nextafter(guess, guess * 0)):
        q = (weight / candidate).round().nan_to_num_(0.0)
        fits = ((q * candidate == weight) & (q.abs() <= 127)).all(1, keepdim=True)
        scale = torch.where(fits & ~found, candidate, scale)
        found |= fits
    if not found.all():
        raise EngineError(
            Status.INVALID_ARGUMENT,
            f"{name} has no INT8 weights (its row {int((~found).nonzero()[0, 0])} is no multiple of one scale): "
            "INT8 activations are for a model whose weights are INT8",
        )
    return (weight / scale).round().nan_to_num_(0.0), scale[:, 0]


class ExactRunner(ModelRunner):
    """A model with INT8 weights and activations, as the native engine computes it; keys and values INT8 or float32."""

    capturable = False

    def __init__(
        self, model: Llama, options: ReferenceOptions, context: int, *, quantised: Collection[str] = ()
    ) -> None:
        """
        Args:
            quantised: the linear layers with INT8 weights.

        Raises:
            EngineError: not all of them have such weights, or the options ask for another type than float32.
        """
        if options.dtype != "float32":
            raise EngineError(
                Status.INVALID_ARGUMENT, f"activations are int8 and dtype is {options.dtype}: it must be float32"
            )
        super().__init__(model, options, context)
        self._linear: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Linear):
                self._linear[name] = (
                    Int8Linear(name, module) if name in quantised else functools.partial(float_linear, module)
                )
        if unknown := sorted(set(quantised) - set(self._linear)):
            raise EngineError(Status.INVALID_ARGUMENT, f"{unknown[0]} is no linear layer of the model")
        c = self.config
        frequencies, factor = inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling)
        angles = (torch.arange(context).float()[:, None] * frequencies).double().to(self.device)
        self._half_cos = (angles.cos().float() * _f32(factor))[:, None]  # (context, 1, D / 2)
        self._half_sin = (angles.sin().float() * _f32(factor))[:, None]
        if options.kv == "int8":
            slots = self.blocks * options.block_size
            for layer, (k, v) in enumerate(self.pools):
                scales = [torch.zeros(slots, c.kv_heads, 1, device=self.device) for _ in "kv"]
                self.pools[layer] = (k, v, *scales)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        return rms_norm(self.model.norm, self.layers(batch)[batch.wanted])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            out: torch.Tensor = self._linear["lm_head"](hidden)
        return out

    def layers(self, batch: Batch) -> torch.Tensor:
        cos, sin = self._half_cos[batch.positions], self._half_sin[batch.positions]
        x: torch.Tensor = self.model.embed_tokens(batch.tokens)
        for number, layer in enumerate(self.model.blocks()):
            normed = rms_norm(layer.input_layernorm, x)
            q, k, v = (self._rows(f"layers.{number}.self_attn.{n}_proj", normed) for n in "qkv")
            q, k = (rotate(t.view(len(x), -1, self.config.head_dim), cos, sin) for t in (q, k))
            self._store(number, batch.slots, k, v.view(k.shape))
            x = x + self._rows(f"layers.{number}.self_attn.o_proj", self._attend(number, q, batch))
            x = x + self._feed_forward(number, layer, x)
        return x

    def _rows(self, name: str, x: torch.Tensor) -> torch.Tensor:
        linear = self._linear[name]
        out: torch.Tensor = torch.cat([linear(x[start : start + ROWS]) for start in range(0, len(x), ROWS)])
        return out

    def _feed_forward(self, number: int, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        normed = rms_norm(layer.post_attention_layernorm, x)
        gate, up = (self._rows(f"layers.{number}.mlp.{n}_proj", normed) for n in ("gate", "up"))
        return self._rows(f"layers.{number}.mlp.down_proj", (gate / (1.0 + exp(-gate))) * up)

    def _store(self, number: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        parts: list[torch.Tensor] = [k, v]
        if self.options.kv == "int8":
            (k, k_scale), (v, v_scale) = quantise(k), quantise(v)
            parts = [k, v, k_scale, v_scale]
        for pool, part in zip(self.pools[number], parts, strict=True):
            pool.index_copy_(0, slots, part)

    def _attend(self, number: int, q: torch.Tensor, batch: Batch) -> torch.Tensor:
        """q (T, H, D) → (T, H · D); one sequence after the other, some of its queries at a time."""
        size, starts = self.options.block_size, batch.query_start.tolist()
        out = torch.empty_like(q)
        for s, context in enumerate(batch.context_lens.tolist()):
            table = batch.block_tables[s : s + 1, : -(-context // size)].long()
            seen = [gather(pool, table, size)[0, :context] for pool in self.pools[number]]  # (L, Hkv, D or 1)
            for start in range(starts[s], starts[s + 1], ROWS):
                end = min(start + ROWS, starts[s + 1])
                last = context - starts[s + 1] + end
                positions = torch.arange(last - (end - start), last, device=q.device)
                out[start:end] = attend(q[start:end], [part[:last] for part in seen], positions)
        return out.flatten(1)


def attend(q: torch.Tensor, seen: list[torch.Tensor], positions: torch.Tensor) -> torch.Tensor:
    """q (n, H, D) at `positions` (n,); keys and values (L, Hkv, D), and their scales (L, Hkv, 1) when they are INT8."""
    n, heads, dim = q.shape
    k, v, *scales = seen
    q = q.view(n, k.shape[1], heads // k.shape[1], dim)
    root = _f32(1.0 / math.sqrt(dim))
    if scales:
        scores = _integer_scores(q, k, root) * scales[0][:, :, 0].T[:, None, None]
    else:
        q = (q * root).permute(3, 1, 2, 0)[..., None]  # (D, Hkv, group, n, 1)
        scores = sum_of_products(q, k.permute(2, 1, 0)[:, :, None, None])  # (Hkv, group, n, L)
    hidden = torch.arange(len(k), device=q.device) > positions[:, None]  # (n, L)
    scores = scores.masked_fill(hidden, float("-inf"))
    weights = exp(scores - scores.amax(-1, keepdim=True)).masked_fill(hidden, 0.0)
    inverse = divide(1.0, lane_sum(weights))  # (Hkv, group, n, 1)
    if scales:
        mixed = _integer_mix(weights * scales[1][:, :, 0].T[:, None, None], v, inverse)
    else:
        mixed = sum_of_products(weights.permute(3, 0, 1, 2)[..., None], v[:, :, None, None]) * inverse
    return mixed.permute(2, 0, 1, 3).flatten(1, 2)


def _integer_scores(q: torch.Tensor, k: torch.Tensor, root: float) -> torch.Tensor:
    """Queries (n, Hkv, group, D) against INT8 keys (L, Hkv, D): (Hkv, group, n, L), without the keys' scales."""
    greatest = q.abs().amax(-1, keepdim=True)
    inverse = torch.where(greatest > 0, divide(QUERY_LEVELS, greatest), 0.0)
    whole = (q * inverse).round().double().permute(1, 2, 0, 3)  # (Hkv, group, n, D)
    sums = (whole @ k.double().permute(1, 2, 0)[:, None]).float()  # exact in float64, rounded once
    return sums * (divide(greatest, QUERY_LEVELS) * root).permute(1, 2, 0, 3)


def _integer_mix(weights: torch.Tensor, v: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Weights (Hkv, group, n, L), which have the values' scales, over INT8 values (L, Hkv, D): (Hkv, group, n, D)."""
    greatest = weights.amax(-1, keepdim=True)
    whole = (weights * torch.where(greatest > 0, divide(WEIGHT_LEVELS, greatest), 0.0)).round().double()
    high = (whole / DIGIT).floor()
    values = v.double().transpose(0, 1)[:, None]  # (Hkv, 1, L, D)
    sums = (high @ values).float() * DIGIT + ((whole - high * DIGIT) @ values).float()
    return sums * (divide(greatest, WEIGHT_LEVELS) * inverse)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x (T, H, D); cos, sin (T, 1, D / 2)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
