"""The reference engine in this process as a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgec.errors import ToolMissing, UsageError
from edgec.reference.engine import ReferenceEngine
from edgec.reference.load import Loaded
from edgec.reference.options import ReferenceOptions
from edgec.runtime.sampling import Sampling
from edgec.validation.requests import answer
from edgec.validation.scores import Scores
from edgec.validation.subjects import Generated

SHAKE = 1e-7  # about a unit in the last place of float32


def check_device(device: str) -> None:
    """
    Raises:
        UsageError: no such device.
        ToolMissing: CUDA is asked for, and isn't here.
    """
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"--device {device}: it must be cpu or cuda")
    if kind == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ToolMissing(f"--device {device}: PyTorch finds no CUDA device here", hint="use --device cpu")


class EngineReference:
    """A model in the reference engine. `rounded`: activations, keys and values are INT8, as the native engine's are."""

    philox = True
    batch = 16

    def __init__(self, loaded: Loaded, name: str, *, rounded: bool, device: str = "cpu", context: int = 0) -> None:
        self.loaded = loaded
        self.name = name
        self.rounded = rounded
        self._device = device
        numbers = "int8" if rounded else "float"
        self.context = context or loaded.context
        self._engine = ReferenceEngine(
            loaded.model,
            None,
            ReferenceOptions(
                device=device,
                kv=numbers,
                activations=numbers,
                context=self.context,
                max_batch=self.batch,
                cuda_graphs=False,
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

    def shaken(self) -> EngineReference:
        """The same with embeddings changed by one part in ten million: what rounding makes of less than nothing."""
        import torch

        from edgec.reference.model_runner import own_copy

        model = own_copy(self.loaded.model, torch.device("cpu"), torch.float32)
        table = model.embed_tokens.weight.detach()
        noise = torch.randn(table.shape, generator=torch.Generator().manual_seed(0))
        model.embed_tokens.weight = torch.nn.Parameter(table * (1 + SHAKE * noise))  # the head keeps its own
        loaded = replace(self.loaded, model=model)
        return EngineReference(loaded, self.name, rounded=self.rounded, device=self._device, context=self.context)

    def close(self) -> None:
        self._engine.close()
