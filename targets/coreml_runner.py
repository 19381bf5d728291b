"""Runners over .mlpackage folders: Core ML itself on a Mac, the evaluator elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .mil_evaluator import MilEvaluator

if TYPE_CHECKING:
    from edgec.model import Runner, Signature

Arrays = dict[str, np.ndarray]


def open_package(packages: Mapping[str, Path], signatures: tuple[Signature, ...], stateful: bool) -> Runner:
    """A runner over one package per signature (the same path when one package holds several functions)."""
    if sys.platform == "darwin":
        return CoreMLRunner(packages, signatures, stateful)
    return EvaluatorRunner(packages, signatures, stateful)


class EvaluatorRunner:
    """Runs and traces signatures by evaluating the saved program. `rounding` as in MilEvaluator."""

    proof = "evaluated"

    def __init__(
        self,
        packages: Mapping[str, Path],
        signatures: tuple[Signature, ...],
        stateful: bool,
        *,
        rounding: bool = True,
    ) -> None:
        self.stateful = stateful
        opened = {path: MilEvaluator(path, rounding=rounding) for path in sorted(set(packages.values()))}
        self.evaluators = {name: opened[path] for name, path in packages.items()}
        self.signatures = {s.name: s for s in signatures}

    def run(self, signature: str, inputs: Mapping[str, np.ndarray]) -> Arrays:
        evaluator = self.evaluators[signature]
        outputs = evaluator.run(_function(evaluator, signature), inputs)
        return _typed(outputs, self.signatures[signature])

    def trace(self, signature: str, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Every tensor of the program in the order of its computation."""
        evaluator = self.evaluators[signature]
        return evaluator.trace(_function(evaluator, signature), inputs)

    def reset(self) -> None:
        for evaluator in self.evaluators.values():
            evaluator.reset()


def _function(evaluator: MilEvaluator, signature: str) -> str:
    """A package with one function calls it `main`, whatever the signature's name."""
    return signature if signature in evaluator.functions else "main"


class CoreMLRunner:
    """Runs signatures on Core ML (macOS), letting it choose among CPU, GPU and Neural Engine."""

    proof = "executed"

    def __init__(self, packages: Mapping[str, Path], signatures: tuple[Signature, ...], stateful: bool) -> None:
        from .coreml_import import import_coremltools

        import_coremltools()
        import coremltools as ct

        self.stateful = stateful
        self.signatures = {s.name: s for s in signatures}
        several = len(set(packages.values())) < len(packages)
        self.models = {
            name: ct.models.MLModel(str(path), function_name=name if several else None)
            for name, path in packages.items()
        }
        self.state: Any = None

    def run(self, signature: str, inputs: Mapping[str, np.ndarray]) -> Arrays:
        model, spec = self.models[signature], self.signatures[signature]
        known = {t.name: t for t in spec.inputs}
        feeds = {
            name: np.asarray(value, np.float32 if known[name].dtype.startswith("float") else np.int32)
            for name, value in inputs.items()
            if name in known and not (self.stateful and name in spec.state_inputs)
        }
        if not self.stateful:
            return _typed(model.predict(feeds), spec)
        if self.state is None:  # one state serves all functions of a package
            self.state = model.make_state()
        return _typed(model.predict(feeds, state=self.state), spec)

    def reset(self) -> None:
        self.state = None


def _typed(outputs: Mapping[str, Any], signature: Signature) -> Arrays:
    """Outputs with the Signature's dtypes and shapes (Core ML gives scalars as vectors of one)."""
    result = {}
    for spec in signature.outputs:
        if spec.name in outputs:
            array = np.asarray(outputs[spec.name]).astype(spec.dtype, copy=False)
            fixed = all(isinstance(d, int) for d in spec.shape)
            result[spec.name] = array.reshape(spec.sized({})) if fixed else array
    return result
