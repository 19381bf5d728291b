"""Evaluate a saved .mlpackage without Core ML: its MIL program, operation by operation, in NumPy.

Core ML runs on Apple's systems only, but a package is a complete program with documented semantics. This module loads
what was written to disk (not the converter's memory), through coremltools' own MIL loader, and computes each
operation by the table in mil_table.py. It proves that the *program* computes the model; it says nothing of Apple's
kernels, which may accumulate in other orders and precisions.

Precision: floats are float32 arrays throughout. With `rounding` (the default) the result of each operation that MIL
types as fp16 is rounded to fp16, overflow to infinity included, so a float16 program loses here what it loses on a
device that accumulates in float32 inside an operation. Without it a float16 program is evaluated as if it were float32,
which separates the converter's errors from the precision's.

An operation that is neither in the table nor defined by coremltools' `value_inference` is an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgec.errors import ConversionError, Reason, SourceError

from . import mil_table

Array = np.ndarray


@dataclass(frozen=True)
class Output:
    """One result of an operation: its name in the program and its NumPy dtype; `half` when MIL types it fp16."""

    name: str
    dtype: np.dtype[Any]
    half: bool


@dataclass
class Instruction:
    """One operation, ready to run.

    Attributes:
        inputs: by MIL name: a constant, a `Ref` to an earlier result, or a list of these.
        compute: from the table, or None for an operation that the evaluator itself handles (states).
        frees: results that nothing uses after this operation.
    """

    kind: str
    name: str
    inputs: dict[str, Any]
    outputs: tuple[Output, ...]
    compute: mil_table.Compute | None
    operation: Any
    frees: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ref:
    """A result, a program input, or a state, by name."""

    name: str


@dataclass
class MilFunction:
    """One function of the program. `inputs` and `states` give shape and dtype by name."""

    name: str
    inputs: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
    states: dict[str, tuple[int, ...]]
    outputs: tuple[str, ...]
    instructions: list[Instruction] = field(default_factory=list)


class MilEvaluator:
    """A saved .mlpackage, ready to be evaluated.

    Args:
        package: the .mlpackage folder.
        rounding: round fp16 results to fp16 (see the module).

    Raises:
        SourceError: the package can't be read as an ML program.
        ConversionError: (from `run`) an operation is unknown or fails, with its name.
    """

    def __init__(self, package: Path, *, rounding: bool = True) -> None:
        self.package = package
        self.rounding = rounding
        self.states: dict[str, Array] = {}
        self._weights: dict[Any, Array] = {}  # float forms of constants, shared by functions
        self.functions = {name: self._prepare(name, f) for name, f in _load(package).items()}

    def reset(self) -> None:
        """Make every state zero again."""
        self.states = {}

    def run(self, function: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Evaluate one function; floats come back as float32, states are kept until `reset`.

        `inputs` holds every input of the function by name; more are ignored.
        """
        f = self.functions[function]
        values: dict[str, Array] = {}
        for _name, _value in self._steps(f, inputs, values, free=True):
            pass
        return {name: values[name] for name in f.outputs}

    def trace(self, function: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """As `run`, but gives every tensor that is computed, in order."""
        values: dict[str, Array] = {}
        return dict(self._steps(self.functions[function], inputs, values, free=False))

    def _steps(
        self, f: MilFunction, inputs: Mapping[str, Array], values: dict[str, Array], *, free: bool
    ) -> Iterator[tuple[str, Array]]:
        """Compute the function's results in order, into `values`."""
        for name, (_shape, dtype) in f.inputs.items():
            half = dtype == np.float16
            values[name] = self._typed(inputs[name], Output(name, np.dtype(np.float32) if half else dtype, half))
        for instruction in f.instructions:
            for out, value in zip(instruction.outputs, self._compute(f, instruction, values), strict=True):
                values[out.name] = self._typed(value, out)
                yield out.name, values[out.name]
            if free:
                for name in instruction.frees:
                    values.pop(name, None)

    def _typed(self, value: Any, out: Output) -> Array:
        array = np.asarray(value)
        if out.half and self.rounding:
            with np.errstate(over="ignore"):
                return array.astype(np.float16).astype(np.float32)
        return array if array.dtype == out.dtype else array.astype(out.dtype)

    def _compute(self, f: MilFunction, instruction: Instruction, values: dict[str, Array]) -> tuple[Any, ...]:
        def get(value: Any) -> Any:
            if isinstance(value, list):
                return [get(v) for v in value]
            return values[value.name] if isinstance(value, Ref) else value

        if instruction.kind == "read_state":
            name = instruction.inputs["input"].name
            return (self._state(f, name),)
        if instruction.kind == "coreml_update_state":
            name = instruction.inputs["state"].name
            self.states[name] = self._typed(get(instruction.inputs["value"]), Output(name, np.dtype(np.float32), True))
            return (self.states[name],) * len(instruction.outputs)
        inputs = {key: get(value) for key, value in instruction.inputs.items()}
        try:
            with np.errstate(all="ignore"):
                if instruction.compute is not None:
                    result = instruction.compute(inputs)
                else:
                    result = _by_value_inference(instruction, inputs)
        except ConversionError:
            raise
        except Exception as error:  # whatever NumPy or torch raise, the operation must be named
            raise ConversionError(
                f"coreml: evaluating MIL operation `{instruction.kind}` ({instruction.name}) of "
                f"{self.package.name}/{f.name} failed: {error}",
                hint="look at its inputs with `edgec inspect`; the package itself may be invalid",
            ) from error
        return result if isinstance(result, tuple) else (result,)

    def _state(self, f: MilFunction, name: str) -> Array:
        if name not in self.states:
            self.states[name] = np.zeros(f.states[name], np.float32)
        return self.states[name]

    def _prepare(self, name: str, function: Any) -> MilFunction:
        """Turn a loaded MIL function into instructions, and note when each result is last used."""
        from coremltools.converters.mil.mil import types

        prepared = MilFunction(name, {}, {}, tuple(v.name for v in function.outputs))
        for key, var in function.inputs.items():
            if types.is_state(var.sym_type):
                prepared.states[key] = tuple(int(d) for d in var.sym_type.wrapped_type().get_shape())
            else:
                dims = tuple(int(d) if isinstance(d, int | np.integer) else -1 for d in var.shape)
                prepared.inputs[key] = (dims, np.dtype(types.nptype_from_builtin(var.dtype)))
        table = mil_table.load()
        for op in function.operations:
            if op.op_type == "const" or (op.outputs and all(v.val is not None for v in op.outputs)):
                continue  # its users hold the value
            if op.op_type.startswith("constexpr_"):
                self._materialise(op)
                continue
            inputs = {k: self._input(v) for k, v in op.inputs.items() if v is not None and not k.startswith("_")}
            outputs = tuple(_output(v) for v in op.outputs)
            prepared.instructions.append(Instruction(op.op_type, op.name, inputs, outputs, table.get(op.op_type), op))
        _note_last_uses(prepared)
        return prepared

    def _input(self, var: Any) -> Any:
        if isinstance(var, list | tuple):
            return [self._input(v) for v in var]
        if var.op is not None and var.op.op_type.startswith("constexpr_"):
            return self._materialise(var.op)
        if var.val is None:
            return Ref(var.name)
        value = var.val
        if isinstance(value, np.ndarray | np.generic) and value.dtype == np.float16:
            return self._float(value)
        return value

    def _float(self, half: Any) -> Array:
        return np.asarray(half).astype(np.float32)

    def _materialise(self, op: Any) -> Array:
        """The float weight that a constexpr operation stands for: once per content, whoever uses it."""
        import hashlib

        digest = hashlib.sha256(op.op_type.encode())
        for key, var in op.inputs.items():
            if var is not None:
                value = np.ascontiguousarray(var.val)
                digest.update(f"{key}{value.dtype}{value.shape}".encode() + value.tobytes())
        key = digest.digest()
        if key not in self._weights:
            compute = mil_table.load().get(op.op_type)
            inputs = {k: v.val for k, v in op.inputs.items() if v is not None}
            value = compute(inputs) if compute else op.materialized_val_inference()
            self._weights[key] = self._typed(value, _output(op.outputs[0]))
        return self._weights[key]


def _load(package: Path) -> dict[str, Any]:
    """The functions of a saved package, by name."""
    from .coreml_import import import_coremltools

    import_coremltools()
    from coremltools.converters.mil.frontend.milproto.load import load
    from coremltools.models.utils import _try_get_weights_dir_path, load_spec

    try:
        spec = load_spec(str(package))
        program = load(spec, spec.specificationVersion, _try_get_weights_dir_path(str(package)) or "")
    except Exception as error:
        raise SourceError(
            f"{package}: not a readable ML program package: {error}",
            hint="only .mlpackage folders of type mlprogram can be evaluated; convert the model again",
            reason=Reason.BAD_CHECKPOINT,
        ) from error
    functions: dict[str, Any] = program.functions
    return functions


def _output(var: Any) -> Output:
    from coremltools.converters.mil.mil import types

    half = var.dtype == types.fp16
    return Output(var.name, np.dtype(np.float32) if half else np.dtype(types.nptype_from_builtin(var.dtype)), half)


def _note_last_uses(function: MilFunction) -> None:
    """Fill `frees`, walking backwards: a name's first appearance from the end is its last use."""
    seen = set(function.outputs)
    for instruction in reversed(function.instructions):
        used = {o.name for o in instruction.outputs}
        stack = list(instruction.inputs.values())
        while stack:
            value = stack.pop()
            if isinstance(value, list):
                stack += value
            elif isinstance(value, Ref):
                used.add(value.name)
        instruction.frees = tuple(sorted(used - seen))
        seen |= used


def _by_value_inference(instruction: Instruction, inputs: dict[str, Any]) -> Any:
    """Let coremltools compute an operation that the table lacks, from constants, where it defines it."""
    from coremltools.converters.mil.mil import Builder, Function

    outer = instruction.operation.enclosing_block
    while getattr(outer, "outer_op", None) is not None:
        outer = outer.outer_op.enclosing_block
    with Function({}, opset_version=outer.opset_version):
        built = getattr(Builder, instruction.kind)(**{k: _plain(v) for k, v in inputs.items()})
    outs = built if isinstance(built, list | tuple) else [built]
    if any(o.val is None for o in outs):
        raise ConversionError(
            f"coreml: the evaluator doesn't know the MIL operation `{instruction.kind}` ({instruction.name})",
            hint=f"enter `{instruction.kind}` in the table (targets/mil_*.py), or check the package on a Mac",
            reason=Reason.UNSUPPORTED_OP,
        )
    return tuple(o.val for o in outs)


def _plain(value: Any) -> Any:
    """What the MIL builder takes for a constant."""
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, np.ndarray) and value.dtype == np.int64:
        return value.astype(np.int32)
    return bool(value) if isinstance(value, np.bool_) else value
