"""INT8 weights, float activations: layers whose weight is a table of INT8 numbers with one scale per output channel.

    w[o, i] ≈ scale[o] · q[o, i],  q in −127…127,  scale[o] = max_i |w[o, i]| / 127

A quantised layer dequantises where it computes, so that the exported graph reads `INT8 constant → dequantize → linear`;
an engine with an INT8 kernel takes the constant as it is, and may quantise activations on the fly. A head tied to the
embedding stays tied: both read one INT8 table, whose rows are the head's output channels.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from edgec.errors import Reason, StoreError

from .quantize_observers import LEAST_STEP

if TYPE_CHECKING:
    import torch
    from torch import nn


@cache
def _classes() -> tuple[type[Any], type[Any]]:
    """(QuantizedLinear, QuantizedEmbedding), made on first use because torch is imported late."""
    import torch
    import torch.ao.quantization.fx._decomposed
    from torch import nn
    from torch.nn import functional

    class QuantizedLinear(nn.Linear):
        """weight (out, in) int8, scale (out,) float32, bias (out,) float32 or None."""

        def __init__(self, like: nn.Linear, table: Table) -> None:
            nn.Module.__init__(self)
            self.in_features, self.out_features = like.in_features, like.out_features
            self.register_buffer("weight", table.weight)
            self.register_buffer("scale", table.scale)
            # Symmetric, so all zero: not worth a place in the file.
            self.register_buffer("zero_point", torch.zeros(self.out_features, dtype=torch.int64), persistent=False)
            self.bias = like.bias
            self.table = table
            self.weight: torch.Tensor
            self.scale: torch.Tensor

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_compiling():
                return functional.linear(input, self.table.floats(self.weight, self.scale), self.bias)
            weight = torch.ops.quantized_decomposed.dequantize_per_channel(
                self.weight, self.scale, self.zero_point, 0, -127, 127, torch.int8
            )
            return functional.linear(input, weight, self.bias)

        def extra_repr(self) -> str:
            return f"{self.in_features}, {self.out_features}, int8"

    class QuantizedEmbedding(nn.Embedding):
        """weight (rows, dim) int8, scale (rows,) float32: dequantises the rows that are looked up, not the table."""

        def __init__(self, like: nn.Embedding, table: Table) -> None:
            nn.Module.__init__(self)
            self.num_embeddings, self.embedding_dim = like.num_embeddings, like.embedding_dim
            self.padding_idx = like.padding_idx
            self.register_buffer("weight", table.weight)
            self.register_buffer("scale", table.scale)
            self.weight: torch.Tensor
            self.scale: torch.Tensor

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            rows = functional.embedding(input, self.weight)  # (…, dim) int8
            scale = functional.embedding(input, self.scale.unsqueeze(-1))  # (…, 1)
            return rows.to(torch.float32) * scale

        def extra_repr(self) -> str:
            return f"{self.num_embeddings}, {self.embedding_dim}, int8"

    return QuantizedLinear, QuantizedEmbedding


class Table:
    """An INT8 weight and its scales, possibly read by two layers.

    `floats` keeps the dequantised weight for running in PyTorch, where dequantising at every call would cost more than
    the product.
    """

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        self.weight, self.scale = weight, scale
        self._floats: torch.Tensor | None = None
        self._key: tuple[int, int] = (0, 0)

    def floats(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """(out, in) float32; computed anew when the buffers were loaded or moved since."""
        key = (weight.data_ptr(), weight._version + scale._version)
        if self._floats is None or self._key != key:
            self._floats, self._key = weight.to(scale.dtype) * scale.unsqueeze(-1), key
        return self._floats

    def __deepcopy__(self, memo: dict[int, Any]) -> Table:
        return Table(self.weight, self.scale)


def quantize_rows(weight: torch.Tensor) -> Table:
    """Symmetric INT8 per row (axis 0) of a (rows, columns) weight."""
    import torch

    with torch.no_grad():
        scale = (weight.abs().amax(dim=1) / 127).clamp(min=LEAST_STEP).float()  # (rows,)
        quantized = (weight.float() / scale.unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8)
    return Table(quantized, scale)


def quantizable(module: nn.Module, *, embeddings: bool) -> dict[str, nn.Module]:
    """Names of the linear layers, and of the embeddings if wanted, in the order of the module."""
    from torch import nn

    kinds = (nn.Linear, nn.Embedding) if embeddings else (nn.Linear,)
    quantized = _classes()
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, kinds) and not isinstance(layer, quantized)
    }


def quantize_layers(module: nn.Module, names: Iterable[str]) -> None:
    """Replace the named layers by INT8 ones, in place. Layers that share a weight share the INT8 table."""
    shared: dict[int, tuple[Any, Table]] = {}  # the weight is kept, so that no other object gets its id
    for name in names:
        layer = module.get_submodule(name)
        weight: Any = layer.weight
        if id(weight) not in shared:
            shared[id(weight)] = (weight, quantize_rows(weight.detach()))
        _put(module, name, layer, shared[id(weight)][1])


def replace_layers(module: nn.Module, names: Iterable[str]) -> None:
    """As `quantize_layers`, with empty tables that a checkpoint will fill.

    Raises:
        StoreError: the module has no such layer.
    """
    import torch

    shared: dict[int, tuple[Any, Table]] = {}
    for name in names:
        try:
            layer = module.get_submodule(name)
            weight: Any = layer.weight
        except AttributeError as error:
            raise StoreError(
                f"the stored model has a quantised layer `{name}` that its architecture lacks",
                hint="the model's source code changed since: build again with --force",
                reason=Reason.STORE,
            ) from error
        if id(weight) not in shared:
            table = Table(torch.zeros(weight.shape, dtype=torch.int8), torch.zeros(weight.shape[0]))
            shared[id(weight)] = (weight, table)
        _put(module, name, layer, shared[id(weight)][1])


def _put(module: nn.Module, name: str, layer: nn.Module, table: Table) -> None:
    from torch import nn

    linear, embedding = _classes()
    kind = linear if isinstance(layer, nn.Linear) else embedding
    owner, _, leaf = name.rpartition(".")
    replacement = kind(layer, table)
    replacement.train(layer.training)
    setattr(module.get_submodule(owner), leaf, replacement)


def weight_sqnr(layers: dict[str, nn.Module]) -> dict[str, float]:
    """SQNR in dB of each layer's own weight: what its rounding costs before anything else happens to it."""
    from .quantize_sensitivity import sqnr

    result: dict[str, float] = {}
    seen: dict[int, float] = {}
    for name, layer in layers.items():
        weight: Any = layer.weight
        if id(weight) not in seen:
            table = quantize_rows(weight.detach())
            seen[id(weight)] = sqnr(weight.detach(), table.weight.float() * table.scale.unsqueeze(-1))
        result[name] = seen[id(weight)]
    return result


def shapes_once(layers: dict[str, nn.Module], excluded: Iterable[str]) -> list[tuple[int, ...]]:
    """Shapes of the weights that become INT8, shared ones once."""
    left_out = set(excluded)
    weights: dict[int, Any] = {id(m.weight): m.weight for name, m in layers.items() if name not in left_out}
    return [tuple(w.shape) for w in weights.values()]
