"""ONNX operations that edgec lowers itself. A handler returns False to leave a node to TVM's importer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from . import tvm_kernels as kernels
from .tvm_import import TO_NHWC, Weight

if TYPE_CHECKING:
    from .tvm_import import Graph

Handler = Callable[["Graph", Any], bool]


def fused(graph: Graph, kernel: Callable[..., Any], *args: Any) -> Any:
    """Emit a kernel that elementwise consumers may be fused behind."""
    attributes = {"op_pattern": kernels.FUSABLE}
    return graph.builder.emit_te(kernel, *args, primfunc_attrs=attributes, primfunc_name_hint=_name(kernel))


def _name(kernel: Callable[..., Any]) -> str:
    inner = kernel.func if isinstance(kernel, partial) else kernel
    return str(inner.__name__)


def scaled(graph: Graph, accumulated: Any, weight: Weight, axis: int) -> Any:
    """Apply the weight's scale to sums whose last dimension is the output channel."""
    from tvm import relax

    scale = weight.output_scale(axis)
    if weight.scale is None or scale is None:
        return accumulated
    if weight.scale.size == 1:
        return graph.builder.emit(relax.op.multiply(accumulated, relax.const(float(scale[0]), "float32")))
    return graph.builder.emit(relax.op.multiply(accumulated, graph.constant(scale)))


def dequantize_linear(graph: Graph, node: Any) -> bool:
    """Constants keep their INT8 form; a quantised activation becomes float arithmetic (one `fake_quantize`)."""
    source, scale_name = node.input[0], node.input[1]
    scale = graph.weights[scale_name].values if scale_name in graph.weights else None
    zero = graph.weights[node.input[2]].values if len(node.input) > 2 and node.input[2] else np.zeros(1, np.int8)
    if scale is None or graph.attributes(node).get("block_size", 0):
        return False
    name = node.output[0]
    if source in graph.weights:
        values = graph.weights[source].values
        axis = graph.attributes(node).get("axis", 1) % max(values.ndim, 1)
        if values.dtype == np.int8 and values.ndim > 1 and not zero.any():
            graph.weights[name] = Weight(values, scale, axis if scale.size > 1 else None)
            return True
        along = [-1 if i == axis else 1 for i in range(values.ndim)] if scale.size > 1 else [1] * values.ndim
        steps = values.astype(np.int32) - (
            zero.astype(np.int32).reshape(along) if zero.size > 1 else zero.astype(np.int32).reshape(())
        )
        graph.weights[name] = Weight(
            steps.astype(np.float32) * (scale.reshape(along) if values.ndim else scale.reshape(()))
        )
        return True
    made = graph.quantised.get(source)
    if made is None or scale.size != 1 or (float(scale.reshape(())), int(zero.reshape(-1)[0])) != made[1:3]:
        return False
    x, step, zero_point, low, high = made
    kernel = partial(kernels.fake_quantize, scale=step, zero_point=zero_point, low=low, high=high)
    if x in graph.channels_last:
        graph.emit_channels_last(
            name, graph.builder.call_te(kernel, graph.channels_last[x], primfunc_name_hint="fake_quantize")
        )
    else:
        graph.emit(name, graph.builder.call_te(kernel, graph.value(x), primfunc_name_hint="fake_quantize"))
    return True


def quantize_linear(graph: Graph, node: Any) -> bool:
    """Remember how it was made, for the dequantize that follows; emit the real one for anyone else."""
    constants = [graph.weights.get(n) for n in node.input[1:]]
    if len(constants) == 2 and all(c is not None and c.values.size == 1 for c in constants):
        scale, zero = (c.values.reshape(()) for c in constants if c is not None)
        limits = np.iinfo(zero.dtype)
        graph.quantised[node.output[0]] = (node.input[0], float(scale), int(zero), int(limits.min), int(limits.max))
    return False


def transpose(graph: Graph, node: Any) -> bool:
    weight = graph.weights.get(node.input[0])
    if weight is None:
        order = list(graph.attributes(node).get("perm", ()))
        if order and order == sorted(order):
            graph.alias(node.output[0], node.input[0])
            return True
        return False
    order = list(graph.attributes(node).get("perm", range(weight.values.ndim)[::-1]))
    graph.weights[node.output[0]] = weight.transposed(order)
    return True


def matmul(graph: Graph, node: Any) -> bool:
    weight = graph.weights.get(node.input[1])
    if weight is None or weight.values.ndim != 2 or weight.output_scale(1) is None:
        return False
    graph.emit(node.output[0], _dense(graph, graph.value(node.input[0]), weight))
    return True


def gemm(graph: Graph, node: Any) -> bool:
    from tvm import relax

    a = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0, **graph.attributes(node)}
    weight = graph.weights.get(node.input[1])
    if weight is None or a["transA"] or a["alpha"] != 1.0 or a["beta"] != 1.0:
        return False
    weight = weight.transposed([1, 0]) if a["transB"] else weight
    if weight.output_scale(1) is None:
        return False
    result = _dense(graph, graph.value(node.input[0]), weight)
    if len(node.input) > 2 and node.input[2]:
        result = graph.builder.emit(relax.op.add(result, graph.value(node.input[2])))
    graph.values[node.output[0]] = result
    return True


def _dense(graph: Graph, x: Any, weight: Weight) -> Any:
    packed = graph.constant(kernels.pack_dense(weight.values))
    return scaled(graph, fused(graph, kernels.dense, x, packed), weight, 1)


def conv(graph: Graph, node: Any) -> bool:
    """2-D convolutions with constant weights: full and depthwise, in NHWC."""
    from tvm import relax

    weight = graph.weights.get(node.input[1])
    if weight is None or weight.values.ndim != 4 or weight.output_scale(0) is None:
        return False
    a = graph.attributes(node)
    if a.get("auto_pad", b"NOTSET") not in (b"NOTSET", "NOTSET"):
        return False
    outputs, per_group, kh, kw = weight.values.shape
    groups = int(a.get("group", 1))
    pads = tuple(int(p) for p in a.get("pads", (0, 0, 0, 0)))
    shape = kernels.ConvShape(_pair(a.get("strides")), (pads[0], pads[1], pads[2], pads[3]), _pair(a.get("dilations")))
    x = graph.as_channels_last(node.input[0])
    if groups == 1 and (kh, kw) == (1, 1) and shape.strides == (1, 1) and not any(pads):
        packed = graph.constant(kernels.pack_dense(weight.values[:, :, 0, 0].T))
        result = fused(graph, kernels.dense, x, packed)
    elif groups == 1:
        packed = graph.constant(kernels.pack_conv(weight.values))
        result = fused(graph, partial(kernels.conv, shape=shape), x, packed)
    elif per_group == 1 and groups == outputs == int(x.ty.shape[3]):
        packed = graph.constant(kernels.pack_depthwise(weight.values))
        result = fused(graph, partial(kernels.depthwise, shape=shape), x, packed)
    else:
        return False
    result = scaled(graph, result, weight, 0)
    if len(node.input) > 2 and node.input[2]:
        bias = graph.weights.get(node.input[2])
        if bias is None:
            return False
        result = relax.op.add(result, graph.constant(bias.values))
    graph.emit_channels_last(node.output[0], result)
    return True


def batch_normalization(graph: Graph, node: Any) -> bool:
    """One multiplication and one addition, fused behind the convolution before it."""
    from tvm import relax

    if node.input[0] not in graph.channels_last or not all(n in graph.weights for n in node.input[1:]):
        return False
    gamma, beta, mean, variance = (graph.weights[n].values.astype(np.float64) for n in node.input[1:5])
    factor = gamma / np.sqrt(variance + float(graph.attributes(node).get("epsilon", 1e-5)))
    x = graph.channels_last[node.input[0]]
    scaled_x = relax.op.multiply(x, graph.constant(factor.astype(np.float32)))
    graph.emit_channels_last(
        node.output[0], relax.op.add(scaled_x, graph.constant((beta - mean * factor).astype(np.float32)))
    )
    return True


def _pair(value: Any) -> tuple[int, int]:
    return (1, 1) if value is None else (int(value[0]), int(value[1]))


def gather(graph: Graph, node: Any) -> bool:
    """Rows of a table or of a KV pool, by indices that ONNX allows to be negative."""
    from tvm import relax

    source, index_name = node.input
    if source in graph.weights and index_name in graph.weights:
        return False
    axis = int(graph.attributes(node).get("axis", 0))
    extent = graph.shape(source)[axis]
    index = _non_negative(graph, index_name, extent)
    weight = graph.weights.get(source)
    if weight is not None and axis == 0 and weight.values.ndim == 2 and weight.values.dtype == np.int8:
        scale = weight.output_scale(0)
        if scale is not None:
            packed = graph.constant(kernels.pack_dense(weight.values.T))
            rows = graph.builder.emit_te(kernels.take_packed, packed, index)
            if weight.scale is not None:
                scales = relax.op.expand_dims(relax.op.take(graph.constant(scale), index, axis=0, mode="clip"), -1)
                rows = relax.op.multiply(relax.op.astype(rows, "float32"), scales)
            graph.emit(node.output[0], rows)
            return True
    graph.emit(node.output[0], relax.op.take(graph.value(source), index, axis=axis, mode="clip"))
    return True


def _non_negative(graph: Graph, name: str, extent: int) -> Any:
    from tvm import relax

    if name in graph.weights:
        values = graph.weights[name].values
        return graph.constant(np.where(values < 0, values + extent, values))
    key = (name, extent)
    if key not in graph.cache:
        index = graph.value(name)
        dtype = str(index.ty.dtype)
        negative = relax.op.less(index, relax.const(0, dtype))
        wrapped = relax.op.where(negative, relax.op.add(index, relax.const(extent, dtype)), index)
        graph.cache[key] = graph.builder.emit(wrapped)
    return graph.cache[key]


def scatter_nd(graph: Graph, node: Any) -> bool:
    """Rows written into a KV pool: in place, when nobody else reads the pool as it was."""
    from tvm import relax

    pool, index, rows = node.input
    origin, alone = graph.origin(pool)
    attributes = graph.attributes(node)
    shape = graph.shape(pool)
    count = graph.shape(index)[0]
    in_place = origin in graph.states and alone and len(shape) == 3
    if not in_place or attributes.get("reduction", b"none") != b"none" or graph.shape(index) != (count, 1):
        return False
    key = ("scatter", shape, count)
    if key not in graph.cache:
        kernel = kernels.scatter_rows(shape[0], shape[1], shape[2], count)
        graph.cache[key] = graph.builder.add_func(kernel, "scatter_rows")
    flat = ("flat", index)
    if flat not in graph.cache:
        graph.cache[flat] = graph.builder.emit(relax.op.reshape(graph.value(index), (count,)))
    args = relax.Tuple([graph.value(pool), graph.cache[flat], graph.value(rows)])
    out = relax.TensorType(shape, "float32")
    graph.emit(node.output[0], relax.op.call_tir_inplace(graph.cache[key], args, [0], out))
    return True


def clip(graph: Graph, node: Any) -> bool:
    from tvm import relax

    limits: list[float | None] = [None, None]
    for i, name in enumerate(node.input[1:3]):
        if name:
            if name not in graph.weights:
                return False
            limits[i] = float(graph.weights[name].values.reshape(()))
    low, high = limits
    info = np.finfo(np.float32)
    low, high = float(info.min) if low is None else low, float(info.max) if high is None else high
    return _elementwise(graph, node, lambda x: relax.op.clip(x, low, high))


def unary(graph: Graph, node: Any) -> bool:
    if node.input[0] in graph.weights:
        return False
    rest = [graph.value(n) if n else None for n in node.input[1:]]
    return _elementwise(graph, node, lambda x: graph.convert_with_tvm(node, [x, *rest]))


def _elementwise(graph: Graph, node: Any, function: Callable[[Any], Any]) -> bool:
    source, name = node.input[0], node.output[0]
    if source in graph.channels_last:
        graph.emit_channels_last(name, function(graph.channels_last[source]))
    else:
        graph.emit(name, function(graph.value(source)))
    return True


def binary(graph: Graph, node: Any) -> bool:
    """Stay channels last when one side is, and the other is too, or is a constant that broadcasts along channels."""
    if not any(n in graph.channels_last for n in node.input):
        return False
    sides = []
    for name in node.input:
        if name in graph.channels_last:
            sides.append(graph.channels_last[name])
        elif name in graph.weights and graph.weights[name].scale is None:
            values = graph.weights[name].values
            if values.ndim > 4:
                return False
            if values.size > 1:
                values = values.reshape((1,) * (4 - values.ndim) + values.shape).transpose(TO_NHWC)
            sides.append(graph.constant(np.ascontiguousarray(values)))
        elif len(graph.shape(name)) == 4:
            sides.append(graph.as_channels_last(name))
        else:
            return False
    graph.emit_channels_last(node.output[0], graph.convert_with_tvm(node, sides))
    return True


def spatial_mean(graph: Graph, node: Any) -> bool:
    """Global average pooling, in either of its ONNX forms, without leaving NHWC."""
    from tvm import relax

    source, name = node.input[0], node.output[0]
    if source not in graph.channels_last:
        return False
    keep = True
    if node.op_type == "ReduceMean":
        attributes = graph.attributes(node)
        keep = bool(attributes.get("keepdims", 1))
        axes = graph.weights[node.input[1]].values.tolist() if len(node.input) > 1 else attributes.get("axes", ())
        if sorted(int(i) % 4 for i in axes) != [2, 3]:
            return False
    mean = relax.op.mean(graph.channels_last[source], axis=[1, 2], keepdims=keep)
    if keep:
        graph.emit_channels_last(name, mean)
    else:
        graph.emit(name, mean)
    return True


def pool(graph: Graph, node: Any) -> bool:
    from tvm import relax

    source = node.input[0]
    a = graph.attributes(node)
    if source not in graph.channels_last or a.get("auto_pad", b"NOTSET") != b"NOTSET" or len(node.output) > 1:
        return False
    options = {
        "pool_size": _pair(a["kernel_shape"]),
        "strides": _pair(a.get("strides")),
        "padding": tuple(int(p) for p in a.get("pads", (0, 0, 0, 0))),
        "dilation": _pair(a.get("dilations")),
        "ceil_mode": bool(a.get("ceil_mode", 0)),
        "layout": "NHWC",
    }
    if node.op_type == "MaxPool":
        result = relax.op.nn.max_pool2d(graph.channels_last[source], **options)
    else:
        count = bool(a.get("count_include_pad", 0))
        result = relax.op.nn.avg_pool2d(graph.channels_last[source], count_include_pad=count, **options)
    graph.emit_channels_last(node.output[0], result)
    return True


def concat(graph: Graph, node: Any) -> bool:
    from tvm import relax

    axis = int(graph.attributes(node)["axis"])
    if axis not in (1, -3) or not all(n in graph.channels_last for n in node.input):
        return False
    graph.emit_channels_last(node.output[0], relax.op.concat([graph.channels_last[n] for n in node.input], axis=3))
    return True


HANDLERS: dict[str, Handler] = {
    "QuantizeLinear": quantize_linear,
    "DequantizeLinear": dequantize_linear,
    "Transpose": transpose,
    "MatMul": matmul,
    "Gemm": gemm,
    "Conv": conv,
    "BatchNormalization": batch_normalization,
    "Gather": gather,
    "ScatterND": scatter_nd,
    "Clip": clip,
    "ReduceMean": spatial_mean,
    "GlobalAveragePool": spatial_mean,
    "MaxPool": pool,
    "AveragePool": pool,
    "Concat": concat,
    **dict.fromkeys(("Add", "Sub", "Mul", "Div"), binary),
    **dict.fromkeys(("Relu", "Sigmoid", "Tanh", "HardSigmoid", "HardSwish", "LeakyRelu", "Exp", "Sqrt", "Erf"), unary),
}
