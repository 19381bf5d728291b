"""What must hold of an export before any target sees it: finite numbers, parity, every declared size, softmax.

Parity is relative to the scale of each output, since an absolute tolerance passes anything whose outputs are small.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgec.errors import ConversionError, ParityError, Reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import onnx
    import torch

    from edgec.golden import Arrays, OnnxRunner
    from edgec.model import Model, Quantization, Runner, Signature

FLOAT_TOLERANCE = 1e-3
"""Largest difference over largest value: float32 sums in another order differ by 1e-6 to 1e-4 over tens of layers."""

INT8_TOLERANCE = 0.05
"""RMS of the difference over that of the output. A value on the border of two INT8 steps may round the other way, and
carry on; a wrong weight or a lost reshape gives 0.3 and more."""


def check_finite_weights(model: Model) -> None:
    """Refuse NaN anywhere and infinity in weights; an infinite *buffer* may be a mask (outputs are checked later)."""
    import torch

    module = model.module
    parameters = {id(p) for p in module.parameters()}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not tensor.is_floating_point():
            continue
        bad = ~torch.isfinite(tensor) if id(tensor) in parameters else torch.isnan(tensor)
        if bool(bad.any()):
            raise ConversionError(
                f"weight `{name}` holds {int(bad.sum())} values that are not finite",
                hint="the checkpoint is damaged or the training diverged: take an earlier one",
                reason=Reason.NOT_FINITE,
            )


def check_finite_outputs(outputs: Mapping[str, np.ndarray], where: str) -> None:
    for name, array in outputs.items():
        if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
            share = 1 - np.isfinite(array).mean()
            raise ConversionError(
                f"{where}: output `{name}` is not finite ({share:.1%} of its values)",
                hint="look for a division by zero, or an overflow in half precision, in the model; then export again",
                reason=Reason.NOT_FINITE,
            )


def difference(expected: np.ndarray, actual: np.ndarray, *, quantized: bool) -> float:
    """Relative difference: the largest over the largest (float), or RMS over RMS (INT8). 0 for equal integers."""
    if expected.shape != actual.shape:
        return float("inf")
    a, b = expected.astype(np.float64), actual.astype(np.float64)
    if quantized:
        error, scale = np.sqrt(np.mean((a - b) ** 2)), np.sqrt(np.mean(a**2))
    else:
        error, scale = np.abs(a - b).max(initial=0.0), np.abs(a).max(initial=0.0)
    if error == 0:
        return 0.0
    return float(error / scale) if scale > 0 else float("inf")


def check_parity(
    expected: Mapping[str, np.ndarray], actual: Mapping[str, np.ndarray], quantization: Quantization | None, where: str
) -> float:
    """Compare torch's outputs with ONNX Runtime's; gives the worst relative difference.

    Raises:
        ParityError: an output differs by more than the tolerance.
    """
    static = quantization is not None and quantization.scheme == "static"
    limit = INT8_TOLERANCE if static else FLOAT_TOLERANCE
    worst = 0.0
    for name, value in expected.items():
        d = difference(value, actual[name], quantized=static)
        if not d <= limit:
            raise ParityError(
                f"{where}: output `{name}` of ONNX differs from PyTorch's by {d:.2g} of its scale (limit {limit:g})",
                hint="the exporter made another model of it: build with --debug, and report the recipe",
            )
        worst = max(worst, d)
    return worst


def sizes_to_try(signature: Signature) -> Iterator[dict[str, int]]:
    """The least, a middle and the greatest size of each dynamic dimension (the others at their middle), then all at
    their least and all at their greatest."""
    middle = {name: (least + greatest) // 2 for name, least, greatest in signature.dynamic}
    tried: list[dict[str, int]] = []
    for name, least, greatest in signature.dynamic:
        tried += [{**middle, name: size} for size in (least, middle[name], greatest)]
    tried += [{n: least for n, least, _ in signature.dynamic}, {n: greatest for n, _, greatest in signature.dynamic}]
    yield from (s for i, s in enumerate(tried) if s not in tried[:i])


def resized(signature: Signature, example: tuple[torch.Tensor, ...], sizes: Mapping[str, int]) -> Arrays:
    """The example inputs, cropped or repeated along each dynamic axis: real values at another size."""
    arrays: Arrays = {}
    for spec, tensor in zip(signature.inputs, example, strict=True):
        array = tensor.numpy()
        for axis, size in enumerate(spec.sized(sizes)):
            if array.shape[axis] != size:
                array = np.take(array, np.arange(size) % array.shape[axis], axis=axis)
        arrays[spec.name] = np.ascontiguousarray(array)
    return arrays


def check_sizes(
    torch_runner: Runner,
    onnx_runner: Runner,
    signature: Signature,
    example: tuple[torch.Tensor, ...],
    quantization: Quantization | None,
) -> int:
    """Run both at every size of `sizes_to_try` and compare; gives the number of sizes.

    Raises:
        ParityError: one of them fails or differs at a size; the message has the sizes.
    """
    count = 0
    for sizes in sizes_to_try(signature):
        where = f"signature `{signature.name}` at {', '.join(f'{k}={v}' for k, v in sizes.items())}"
        feeds = resized(signature, example, sizes)
        try:
            expected, actual = torch_runner.run(signature.name, feeds), onnx_runner.run(signature.name, feeds)
        except Exception as error:  # either engine may raise anything at a size that it can't take
            raise ParityError(
                f"{where}: can't be run: {str(error).splitlines()[0][:300]}",
                hint="narrow the dimension's range, or remove what ties the model to one size",
            ) from error
        check_parity(expected, actual, quantization, where)
        count += 1
    return count


def check_softmax(path: Path, runner_feeds: Mapping[str, np.ndarray]) -> int:
    """Every softmax of the graph must sum to 1 on real inputs, after its own quantisation; gives the number checked.

    An INT8 softmax has steps of 1/256, so that a sum over n values may be off by n/512, but never by more than a half.

    Raises:
        ConversionError: with reason `invariant-broken`; the message names the layer and its sum.
    """
    import onnx
    import onnxruntime as ort

    model = onnx.load(path, load_external_data=False)
    consumers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in node.input:
            consumers.setdefault(name, []).append(node)
    taps: dict[str, tuple[str, int]] = {}  # tensor → (softmax node, axis)
    for node in model.graph.node:
        if node.op_type == "Softmax":
            axis = next((a.i for a in node.attribute if a.name == "axis"), -1)
            taps[_after_quantization(node.output[0], consumers)] = (node.name, axis)
    if not taps:
        return 0
    known = {o.name for o in model.graph.output}
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(t) for t in taps if t not in known)
    probe = path.with_suffix(".probe.onnx")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    try:
        onnx.save(model, probe)
        session = ort.InferenceSession(str(probe), options, providers=["CPUExecutionProvider"])
        values = session.run(list(taps), dict(runner_feeds))
    finally:
        probe.unlink(missing_ok=True)
    for value, (name, axis) in zip(values, taps.values(), strict=True):
        sums = value.sum(axis=axis, dtype=np.float64)
        worst = float(sums.flat[np.abs(sums - 1).argmax()])
        if abs(worst - 1) > min(0.5, 1e-3 + value.shape[axis] / 512):
            raise ConversionError(
                f"softmax `{name}` sums to {worst:.3g} and not to 1 after quantisation",
                hint="calibrate with more data, or leave it in float with `exclude_types: [softmax]`",
                reason=Reason.INVARIANT_BROKEN,
            )
    return len(taps)


def _after_quantization(tensor: str, consumers: Mapping[str, list[onnx.NodeProto]]) -> str:
    """`tensor` itself, or what DequantizeLinear makes of it when it is quantised right away."""
    for op in ("QuantizeLinear", "DequantizeLinear"):
        following = [n for n in consumers.get(tensor, []) if n.op_type == op]
        if not following:
            return tensor
        tensor = following[0].output[0]
    return tensor


def golden_feeds(runner: OnnxRunner, signature: str, inputs: Mapping[str, np.ndarray]) -> Arrays:
    """`inputs` without those that the graph lost because nothing reads them."""
    wanted = {i.name for i in runner.sessions[signature].get_inputs()}
    return {k: v for k, v in inputs.items() if k in wanted}
