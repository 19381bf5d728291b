"""Task `tensors`: a model without data. Seeded random inputs, and how near the outputs stay to the source model's.

For models whose data is elsewhere, and for trying a conversion out. The metric is the mean cosine of the outputs with
the float source's (1 for the source itself); SQNR in dB stands beside it. Random inputs say whether a conversion is
right; they don't say how good a quantised model is on real data, and calibration is only as good as their distribution.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field, WithJsonSchema

from edgec.errors import RecipeError
from edgec.golden import Step
from edgec.model import Signature, TensorSpec
from edgec.registry import Options, register_task
from edgec.tasks.base import Arrays, Task, TaskContext

if TYPE_CHECKING:
    import torch

    from edgec.model import Runner

SHAPE = {"type": "array", "items": {"type": "integer", "minimum": 1}}


class InputOptions(Options):
    """One input: uniform integers, or normal floats."""

    shape: tuple[Annotated[int, Field(ge=1)], ...] = Field(description="sizes, the batch first")
    dtype: Literal["float32", "int32", "int64"] = Field("float32", description="NumPy's name of the element type")
    mean: float = Field(0.0, description="of a float input")
    std: float = Field(1.0, gt=0, description="standard deviation of a float input")
    high: int = Field(2, ge=1, description="an integer input is drawn from 0 to one below this")


def _shape_alone(value: Any) -> Any:
    return {"shape": value} if isinstance(value, list | tuple) else value


Input = Annotated[
    InputOptions,
    BeforeValidator(_shape_alone),
    WithJsonSchema({"anyOf": [SHAPE, InputOptions.model_json_schema()]}),
]


class TensorsOptions(Options):
    """What goes in."""

    inputs: dict[str, Input] = Field(
        min_length=1,
        description="name → shape, or {shape, dtype, mean, std, high}, in the order of the model's arguments",
    )
    outputs: tuple[str, ...] = Field(
        (), description="names of the outputs, in order; output, output_1 … when not given"
    )
    samples: int = Field(16, ge=1, description="how many samples calibrate, and how many evaluate")


@register_task("tensors")
class TensorsTask(Task):
    """See the module's text."""

    kind = "tensors"
    metric = "cosine"

    def __init__(self, options: TensorsOptions, context: TaskContext) -> None:
        self.options = options
        self.seed = context.seed

    def data_references(self) -> list[tuple[str, str | None]]:
        return []

    def signatures(self, module: torch.nn.Module) -> tuple[Signature, ...]:
        import torch

        with torch.no_grad():
            result = module(*self._sample("example", 0))
        outputs = result if isinstance(result, tuple | list) else (result,)
        names = self.options.outputs or tuple("output" if i == 0 else f"output_{i}" for i in range(len(outputs)))
        if len(names) != len(outputs):
            raise RecipeError(
                f"task `tensors` names {len(names)} outputs, the model gives {len(outputs)}",
                hint="name all of them in `outputs`, or none",
            )
        return (
            Signature(
                name="main",
                inputs=tuple(TensorSpec(n, o.shape, o.dtype) for n, o in self.options.inputs.items()),
                outputs=tuple(
                    TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch."))
                    for n, t in zip(names, outputs, strict=True)
                ),
            ),
        )

    def example(self, signature: Signature) -> tuple[torch.Tensor, ...]:
        return self._sample("example", 0)

    def bind(self, module: torch.nn.Module, signature: Signature) -> torch.nn.Module:
        return module

    def calibration(self) -> Iterator[tuple[torch.Tensor, ...]]:
        for i in range(self.options.samples):
            yield self._sample("calibration", i)

    def record(self) -> list[Step]:
        return [Step("main", self._named("record", i)) for i in range(min(4, self.options.samples))]

    def reference(self, runner: Runner) -> Arrays:
        found: Arrays = {}
        for i in range(self.options.samples):
            for name, value in runner.run("main", self._named("evaluation", i)).items():
                found[f"{i}/{name}"] = value
        return found

    def evaluate(self, runner: Runner, reference: Arrays | None, *, limit: int | None = None) -> dict[str, float]:
        from edgec.parity import EXACT_DB, cosine

        count = min(limit or self.options.samples, self.options.samples)
        cosines, signal, noise = [], 0.0, 0.0
        for i in range(count):
            for name, value in runner.run("main", self._named("evaluation", i)).items():
                wanted = value if reference is None else reference[f"{i}/{name}"]
                a, b = value.astype(np.float64), wanted.astype(np.float64)
                cosines.append(cosine(a, b))
                signal += float((b * b).sum())
                noise += float(((a - b) ** 2).sum())
        sqnr = 10 * np.log10(signal / noise) if noise > 0 and signal > 0 else EXACT_DB
        return {"cosine": float(np.mean(cosines)), "sqnr_db": float(min(sqnr, EXACT_DB))}

    def _named(self, use: str, index: int) -> Arrays:
        return {name: t.numpy() for name, t in zip(self.options.inputs, self._sample(use, index), strict=True)}

    def _sample(self, use: str, index: int) -> tuple[torch.Tensor, ...]:
        """Inputs number `index` for one use; no two uses share a sample."""
        import torch

        uses = ("example", "calibration", "evaluation", "record")
        random = np.random.default_rng((self.seed, uses.index(use), index))
        tensors = []
        for o in self.options.inputs.values():
            if o.dtype == "float32":
                values = random.normal(o.mean, o.std, o.shape).astype(np.float32)
            else:
                values = random.integers(0, o.high, o.shape).astype(o.dtype)
            tensors.append(torch.from_numpy(values))
        return tuple(tensors)
