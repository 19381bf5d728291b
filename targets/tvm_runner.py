"""Runs a TVM artefact's host library through TVM's Relax virtual machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edgec.errors import ConversionError, Reason
from edgec.model import Artifact


class TvmRunner:
    """The library with its parameters loaded.

    KV pools are updated in place: an output of `run` that is state may be handed back as the next step's state input
    without a copy, and is then overwritten. Any other array is copied first, so nobody's own data changes.
    """

    stateful = False

    def __init__(self, artifact: Artifact) -> None:
        import tvm
        from safetensors.numpy import load_file
        from tvm import relax

        self._tensor = tvm.runtime.tensor
        library = artifact.path / artifact.details["library"]
        self._machine = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
        self._signatures = {s.name: s for s in artifact.signatures}
        self._functions: dict[str, dict[str, Any]] = artifact.details["functions"]
        arrays = load_file(artifact.path / artifact.details["params"])
        tensors = {name: self._tensor(array) for name, array in arrays.items()}
        self._parameters = {n: [tensors[p] for p in f["params"]] for n, f in self._functions.items()}
        self._state: dict[int, tuple[np.ndarray, Any]] = {}  # state handed out last: array and the tensor behind it

    def run(self, signature: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """One step.

        Raises:
            ConversionError: the virtual machine refused the inputs.
        """
        spec, function = self._signatures[signature], self._functions[signature]
        arguments = [self._argument(np.asarray(inputs[t.name])) for t in spec.inputs]
        try:
            results = self._machine[function["name"]](*arguments, self._parameters[signature])
        except Exception as error:
            raise ConversionError(
                f"tvm: running `{signature}` failed: {str(error).strip().splitlines()[-1]}",
                hint="the inputs must have the signature's shapes and dtypes",
                reason=Reason.CONVERTER_FAILED,
            ) from error
        outputs: dict[str, np.ndarray] = {}
        state: dict[int, tuple[np.ndarray, Any]] = {}
        for t, result in zip(spec.outputs, results, strict=True):
            if t.name in spec.state_outputs:
                view = np.from_dlpack(result)
                state[id(view)] = (view, result)
                outputs[t.name] = view
            else:
                outputs[t.name] = result.numpy()
        if state:
            self._state = state
        return outputs

    def _argument(self, array: np.ndarray) -> Any:
        known = self._state.get(id(array))
        return known[1] if known is not None and known[0] is array else self._tensor(array)

    def trace(self, signature: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What each kernel wrote, in order, by the kernel's name and its number; then the outputs."""
        import tvm

        seen: dict[str, np.ndarray] = {}

        def watch(function: Any, name: str, before: bool, result: Any, *arguments: Any) -> None:
            # Kernels take their inputs and then what they write into; memory is used again, so it is copied.
            if before or name.startswith("vm.builtin") or not arguments:
                return
            written = arguments[-1]
            if isinstance(written, tvm.runtime.Tensor):
                seen[f"{name}#{len(seen)}"] = written.numpy().copy()

        self._machine.set_instrument(watch)
        try:
            outputs = self.run(signature, inputs)
        finally:
            self._machine.set_instrument(lambda *_: None)
        return {**seen, **outputs}

    def reset(self) -> None:
        """Forget the state handed out."""
        self._state = {}
