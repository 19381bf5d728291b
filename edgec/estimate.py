"""What a stage will cost, before it runs: bytes of its result and peak memory.

Estimates, and called so wherever they are shown. Sizes follow from the number of weights; memory from a base per kind
of process (libraries loaded, measured) plus a number of copies of the float weights that the work keeps at once
(measured on SmolLM2-135M and EfficientNet-Lite0, rounded up). A stage that the store has is reported as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgec.plan import Stage
    from edgec.recipe import Recipe
    from edgec.store import Store

MIB = 1 << 20

# kind or target: (base in MiB with its libraries loaded, copies of the float32 weights held at the worst moment)
MEMORY: dict[str, tuple[int, float]] = {
    "source": (450, 3.0),
    "import": (250, 3.0),
    "pass": (700, 4.0),
    "export": (900, 8.0),
    "onnxruntime": (600, 5.0),
    "tflite": (1400, 9.0),
    "coreml": (1000, 8.0),
    "tvm": (900, 6.0),
    "validate": (900, 4.0),
}
OTHER_TARGET = (900, 8.0)


@dataclass
class Estimate:
    """Runs along the stages; `parameters` and `bytes` describe the model so far, None while nothing is known."""

    parameters: float | None
    bytes: float | None

    @staticmethod
    def start(recipe: Recipe, store: Store) -> Estimate:
        """From the checkpoint's header, when the file is at hand."""
        from edgec.sources.checkpoints import header_parameters

        return Estimate(header_parameters(recipe.model, recipe_dir=recipe.folder, cache=store.root), None)

    def known(self, stage: Stage, result: dict[str, Any]) -> None:
        """Take the numbers of a finished stage."""
        if stage.kind not in ("target", "validate"):
            self.parameters, self.bytes = result["parameters"], result["bytes"]

    def guess(self, stage: Stage) -> tuple[int | None, int | None]:
        """`(bytes, peak memory)` of a stage that has not run."""
        base, copies = MEMORY.get(stage.name if stage.kind == "target" else stage.kind, OTHER_TARGET)
        if self.parameters is None:
            return None, base * MIB
        float_bytes = 4 * self.parameters
        if stage.kind == "validate":
            return None, int(base * MIB + copies * float_bytes)
        if stage.name == "prune" and (sparsity := stage.options.get("sparsity")):
            # Structured pruning removes a share of both the inputs and the outputs of most layers.
            self.parameters *= (1 - sparsity) ** 2
            self.bytes = 4 * self.parameters
        elif stage.name == "quantize":
            self.bytes = self.parameters
        elif stage.name == "distill" or stage.name == "train":
            self.parameters = self.bytes = None  # another architecture: known once it has been built
            return None, int(base * MIB + copies * float_bytes)
        elif self.bytes is None:
            self.bytes = float_bytes
        return int(self.bytes), int(base * MIB + copies * float_bytes)
