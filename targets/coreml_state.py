"""KV pools as Core ML states: making that form of a program, and checking it.

A state is memory that Core ML keeps between calls (iOS 18). torch's ExportedProgram has the same notion, a buffer that
the graph mutates, which coremltools turns into a state. So the pools of a functional program, which are inputs and
outputs of the same shape, become mutated buffers by editing the program's signature; no node of the graph changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgec.errors import ParityError
from edgec.golden import replay

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from edgec.context import Context
    from edgec.model import Program, Signature

# Core ML keeps states in float16, whatever the program computes in: 11 bits, about 66 dB below the largest value of
# a pool. Layers of a decoder add their noise; what is broken (a stale pool, a wrong slot) is below 10 dB.
LEAST_SQNR_DB = 25.0


def with_states(exported: ExportedProgram, signature: Signature) -> ExportedProgram:
    """The same program with each state pair as a mutated buffer, named after the state's input."""
    import torch
    from torch.export.graph_signature import (
        ExportGraphSignature,
        InputKind,
        InputSpec,
        OutputKind,
        OutputSpec,
        TensorArgument,
    )

    old = exported.graph_signature
    positions = {t.name: i for i, t in enumerate(signature.inputs)}
    pairs = {positions[name]: name for name, _ in signature.state}  # user input's position → state
    outputs = {t.name: i for i, t in enumerate(signature.outputs)}
    mutated = {outputs[out]: name for name, out in signature.state}  # user output's position → state

    inputs, user = [], 0
    for spec in old.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            if user in pairs:
                spec = InputSpec(InputKind.BUFFER, spec.arg, pairs[user], persistent=True)
            user += 1
        inputs.append(spec)
    mutations, others, user = [], [], 0
    for out in old.output_specs:
        if out.kind != OutputKind.USER_OUTPUT:
            mutations.append((out, out.arg))
            continue
        if user in mutated:
            mutations.append((OutputSpec(OutputKind.BUFFER_MUTATION, out.arg, mutated[user]), out.arg))
        else:
            others.append((out, out.arg))
        user += 1
    order = [*mutations, *others]

    graph = exported.graph_module.graph
    node = graph.output_node()
    by_name = {n.name: n for n in node.args[0] if isinstance(n, torch.fx.Node)}
    node.args = (tuple(by_name[arg.name] for _, arg in order if isinstance(arg, TensorArgument)),)
    shapes = {t.name: t.sized({}) for t in signature.inputs}
    exported._state_dict = dict(exported.state_dict) | {
        name: torch.zeros(shapes[name], dtype=torch.float32) for name in pairs.values()
    }
    exported._graph_signature = ExportGraphSignature(inputs, [spec for spec, _ in order])
    return exported


def check_stateful(packages: dict[str, Path], program: Program, context: Context, *, strict: bool) -> None:
    """Replay the recording through the stateful form and compare every output with the golden.

    `strict` makes a failure an error; without it the build's own parity check sees the same runner.

    Raises:
        ParityError: an output is further off than fp16 pools explain.
    """
    from .coreml_runner import open_package

    runner = open_package(packages, program.signatures, stateful=True)
    steps = program.recording().steps
    results = replay(runner, program.signatures, steps)
    worst, where = np.inf, ""
    for i, (step, result) in enumerate(zip(steps, results, strict=True)):
        kept = program.signature(step.signature).state_outputs
        for name, golden in step.outputs.items():
            if name in kept:
                continue
            ratio = _sqnr_db(result[name], golden)
            if ratio < worst:
                worst, where = ratio, f"`{name}` of step {i} ({step.signature})"
    context.metric("stateful_sqnr_db", float(worst))
    context.note(f"KV pools as states, {len(steps)} steps: {worst:.1f} dB at the worst, {where}")
    if strict and not worst >= LEAST_SQNR_DB:
        raise ParityError(
            f"coreml: the form with KV pools as states parts from the golden: {worst:.1f} dB at {where}",
            hint="set `kv_cache: inputs` to ship the other form, which is checked on its own",
        )


def _sqnr_db(actual: np.ndarray, golden: np.ndarray) -> float:
    """10 log₁₀(‖b‖² / ‖a − b‖²); NaN anywhere counts as −∞."""
    a, b = actual.astype(np.float64).ravel(), golden.astype(np.float64).ravel()
    noise, signal = float(np.sum((a - b) ** 2)), float(np.sum(b**2))
    if not np.isfinite(noise):
        return float("-inf")
    return 300.0 if noise == 0 else float(10 * np.log10(max(signal, 1e-300) / noise))
