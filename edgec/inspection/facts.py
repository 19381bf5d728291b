"""What an inspection says, whatever the format."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from edgec.errors import Reason, SourceError


@dataclass(frozen=True)
class Port:
    """An input or output: `shape` holds sizes, or names ("?" when it has none) of dynamic dimensions."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    scale: float | None = None  # of a tensor that is quantised at the model's edge
    zero_point: int | None = None


@dataclass(frozen=True)
class Graph:
    """One entry point: a subgraph, a signature, a function."""

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    ops: dict[str, int]

    @property
    def op_count(self) -> int:
        return sum(self.ops.values())


@dataclass(frozen=True)
class Quantized:
    """Quantised tensors of one kind. `what` is "weights", "biases" or "activations"; scales are None when unread."""

    what: str
    dtype: str
    granularity: str  # per tensor, per channel, per block of N, palette
    tensors: int
    parameters: int
    least_scale: float | None
    greatest_scale: float | None


@dataclass(frozen=True)
class Weights:
    """All constant tensors of one dtype."""

    dtype: str
    tensors: int
    parameters: int
    bytes: int


@dataclass(frozen=True)
class Inspection:
    path: str
    format: str
    bytes: int
    graphs: tuple[Graph, ...] = ()
    weights: tuple[Weights, ...] = ()
    quantized: tuple[Quantized, ...] = ()
    metadata: dict[str, str] = field(default_factory=dict)
    parts: tuple[Inspection, ...] = ()  # of a folder: its artefacts

    @property
    def parameters(self) -> int:
        return sum(w.parameters for w in self.weights)

    def to_dict(self) -> dict[str, Any]:
        """What `edgec inspect --json` prints."""
        data = asdict(self)
        del data["parts"]
        return {**data, "parameters": self.parameters, "parts": [p.to_dict() for p in self.parts]}


@dataclass
class Tally:
    """Collects tensors into `Weights` and `Quantized` groups, in the order in which they come."""

    _weights: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0, 0]))
    _quantized: dict[tuple[str, str, str], list[Any]] = field(default_factory=dict)

    def weight(self, dtype: str, parameters: int, size: int) -> None:
        for i, n in enumerate((1, parameters, size)):
            self._weights[dtype][i] += n

    def quantized(self, what: str, dtype: str, granularity: str, parameters: int, scales: Iterable[float] = ()) -> None:
        group = self._quantized.setdefault((what, dtype, granularity), [0, 0, None, None])
        group[0] += 1
        group[1] += parameters
        values = [float(s) for s in scales]
        if values:
            group[2] = min(values) if group[2] is None else min(group[2], *values)
            group[3] = max(values) if group[3] is None else max(group[3], *values)

    def weights(self) -> tuple[Weights, ...]:
        return tuple(Weights(k, *v) for k, v in sorted(self._weights.items(), key=lambda item: -item[1][2]))

    def quantized_groups(self) -> tuple[Quantized, ...]:
        return tuple(Quantized(*key, *group) for key, group in self._quantized.items())


def by_count(ops: Iterable[str]) -> dict[str, int]:
    """Operations by kind, the most frequent first."""
    return dict(Counter(sorted(ops)).most_common())


def damaged(path: Path, what: str, why: object) -> SourceError:
    """The error for a file that does not hold what its name or its first bytes promise."""
    text = str(why).strip().splitlines()
    return SourceError(
        f"{path} is not {what} that can be read: {text[0][:200] if text else type(why).__name__}",
        hint="it may be truncated, or something else under this name: compare its size and SHA-256 with the original's",
        reason=Reason.BAD_CHECKPOINT,
    )


def size_of(path: Path) -> int:
    """Bytes of a file or of a folder's files."""
    if path.is_dir():
        return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    return path.stat().st_size
