"""The reference engine in this process as a reference."""

from __future__ import annotations

from collections.abc import Sequence

from edgec.reference.engine import ReferenceEngine
from edgec.reference.load import Loaded
from edgec.reference.options import ReferenceOptions
from edgec.runtime.sampling import Sampling
from edgec.validation.requests import answer
from edgec.validation.scores import Scores
from edgec.validation.subjects import Generated


class EngineReference:
    """A model in the reference engine. `rounded`: activations, keys and values are INT8, as the native engine's are."""

    philox = True

    def __init__(self, loaded: Loaded, name: str, *, rounded: bool, device: str = "cpu", context: int = 0) -> None:
        self.loaded = loaded
        self.name = name
        self.rounded = rounded
        numbers = "int8" if rounded else "float"
        self.context = context or loaded.context
        self._engine = ReferenceEngine(
            loaded.model,
            None,
            ReferenceOptions(
                device=device, kv=numbers, activations=numbers, context=self.context, max_batch=16, cuda_graphs=False
            ),
            eos=loaded.eos,
            quantised=loaded.quantised,
        )
        where = "" if device == "cpu" else f" on {device}"
        made = "INT8 weights, activations, keys and values" if rounded else "float activations, keys and values"
        self.label = f"the reference engine{where}, {made} ({loaded.origin})"

    def score(self, tokens: Sequence[int]) -> Scores:
        return Scores.whole(self._engine.logits(tokens)[:-1], tokens)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling]) -> list[Generated]:
        return answer(self._engine, prompts, sampling)

    def close(self) -> None:
        self._engine.close()
