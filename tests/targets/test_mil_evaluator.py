"""The evaluator of saved ML programs: each operation against a definition that isn't ours, and the program around."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgec.targets import mil_evaluator
from edgec.targets.coreml_import import import_coremltools
from edgec.targets.mil_evaluator import MilEvaluator
from edgec.targets.mil_table import load

from edgec.errors import ConversionError, Reason, SourceError

pytestmark = pytest.mark.slow  # importing coremltools takes seconds

RNG = np.random.default_rng(0)


def f32(*shape: int, low: float = -2.0, high: float = 2.0) -> np.ndarray:
    return RNG.uniform(low, high, shape).astype(np.float32)


def i32(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


X, Y = f32(2, 3, 4), f32(2, 3, 4, low=0.5)
MASK = X > 0

# Operation, its inputs, and optionally a name of the variant: each is also computed by coremltools' value inference.
DEFINED: list[tuple[str, dict[str, Any]]] = [
    *((name, {"x": X}) for name in ("abs", "atan", "ceil", "cos", "cosh", "erf", "exp", "exp2", "floor", "round")),
    *((name, {"x": X}) for name in ("sign", "sin", "sinh", "square", "tan", "tanh", "relu", "relu6", "sigmoid")),
    *((name, {"x": X}) for name in ("softplus", "softsign", "shape", "identity")),
    *((name, {"x": f32(5, low=-0.9, high=0.9)}) for name in ("acos", "asin", "atanh")),
    ("sqrt", {"x": Y}),
    ("rsqrt", {"x": Y, "epsilon": 1e-3}),
    ("inverse", {"x": Y, "epsilon": 1e-2}),
    ("log", {"x": Y, "epsilon": 1e-2}),
    ("threshold", {"x": X, "alpha": 0.5}),
    ("clip", {"x": X, "alpha": -0.5, "beta": 0.7}),
    ("logical_not", {"x": MASK}),
    ("leaky_relu", {"x": X, "alpha": 0.1}),
    ("elu", {"x": X, "alpha": 0.7}),
    ("clamped_relu", {"x": X, "alpha": 0.3, "beta": 1.1}),
    ("linear_activation", {"x": X, "alpha": 0.3, "beta": 1.1}),
    ("sigmoid_hard", {"x": X, "alpha": 0.3, "beta": 0.4}),
    ("gelu", {"x": X, "mode": "EXACT"}),
    ("gelu", {"x": X, "mode": "TANH_APPROXIMATION"}),
    ("softmax", {"x": X, "axis": 1}),
    *((name, {"x": X, "y": Y}) for name in ("add", "sub", "mul", "maximum", "minimum", "real_div", "floor_div", "mod")),
    *((name, {"x": X, "y": Y}) for name in ("equal", "not_equal", "greater", "greater_equal", "less", "less_equal")),
    ("pow", {"x": Y, "y": X}),
    *((name, {"x": MASK, "y": Y > 1}) for name in ("logical_and", "logical_or", "logical_xor")),
    ("select", {"cond": MASK, "a": X, "b": Y}),
    ("cumsum", {"x": X, "axis": 1}),
    *((f"reduce_{n}", {"x": Y, "axes": i32(0, 2), "keep_dims": True}) for n in ("sum", "mean", "max", "min", "prod")),
    *(
        (f"reduce_{n}", {"x": Y, "axes": i32(1)})
        for n in ("l1_norm", "l2_norm", "log_sum", "log_sum_exp", "sum_square")
    ),
    ("reduce_argmax", {"x": X, "axis": 1}),
    ("reduce_argmin", {"x": X, "axis": -1, "keep_dims": True}),
    ("reshape", {"x": X, "shape": i32(2, -1)}),
    ("expand_dims", {"x": X, "axes": i32(0, 2)}),
    ("squeeze", {"x": X[:1], "axes": i32(0)}),
    ("flatten2d", {"x": X, "axis": 2}),
    ("transpose", {"x": X, "perm": i32(2, 0, 1)}),
    ("reverse", {"x": X, "axes": i32(1)}),
    ("slice_by_index", {"x": X, "begin": i32(0, 1, 0), "end": i32(2, 3, 4), "stride": i32(1, 1, 2)}),
    ("slice_by_size", {"x": X, "begin": i32(0, 1, 2), "size": i32(2, -1, 1)}),
    ("concat", {"values": [X, Y], "axis": 1}),
    ("stack", {"values": [X, Y], "axis": 1}),
    ("split", {"x": X, "split_sizes": i32(1, 3), "axis": 2}),
    ("tile", {"x": X, "reps": i32(1, 2, 3)}),
    ("pad", {"x": X, "pad": i32(1, 2, 0, 1), "mode": "constant", "constant_val": 0.5}),
    ("pad", {"x": X, "pad": i32(1, 2), "mode": "reflect"}),
    ("fill", {"shape": i32(2, 3), "value": 1.5}),
    ("range_1d", {"start": 1, "end": 9, "step": 3}),
    ("gather", {"x": X, "indices": i32(2, 0), "axis": 1, "validate_indices": False}),
    ("gather_along_axis", {"x": X, "indices": RNG.integers(0, 3, (2, 5, 4)).astype(np.int32), "axis": 1}),
    ("linear", {"x": X, "weight": f32(5, 4), "bias": f32(5)}),
    ("matmul", {"x": X, "y": Y, "transpose_y": True}),
    ("einsum", {"values": [f32(2, 3, 4, 5), f32(2, 5, 4, 6)], "equation": "bcht,bthw->bchw"}),
    ("layer_norm", {"x": X, "axes": i32(2), "gamma": f32(4), "beta": f32(4), "epsilon": 1e-4}),
    ("quantize", {"input": X, "scale": np.float32(0.02), "zero_point": np.int8(7), "output_dtype": "int8"}),
    ("quantize", {"input": X, "scale": f32(3, low=0.01, high=0.02), "axis": 1, "output_dtype": "uint8"}),
    ("scaled_dot_product_attention", {"query": f32(1, 2, 3, 4), "key": f32(1, 2, 5, 4), "value": f32(1, 2, 5, 6)}),
]


def defined(kind: str, inputs: dict[str, Any]) -> list[np.ndarray]:
    """What coremltools' own value inference makes of constants."""
    import_coremltools()
    import coremltools as ct
    from coremltools.converters.mil.mil import Builder, Function

    with Function({}, opset_version=ct.target.iOS18):
        built = getattr(Builder, kind)(**inputs)
    outputs = built if isinstance(built, list | tuple) else [built]
    return [np.asarray(o.val) for o in outputs]


@pytest.mark.parametrize("case", range(len(DEFINED)), ids=[f"{i}-{k}" for i, (k, _) in enumerate(DEFINED)])
def test_operation_is_what_coremltools_defines(case: int) -> None:
    kind, inputs = DEFINED[case]
    wanted = defined(kind, inputs)
    got = load()[kind](dict(inputs))
    got = list(got) if isinstance(got, tuple) else [got]
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert np.shape(a) == b.shape
        np.testing.assert_allclose(np.asarray(a).astype(np.float64), b.astype(np.float64), rtol=2e-5, atol=2e-6)


def test_compressed_weights_are_what_coremltools_defines() -> None:
    import_coremltools()
    from coremltools.converters.mil.mil.ops.defs.iOS18.compression import constexpr_blockwise_shift_scale

    data = RNG.integers(-128, 128, (4, 6)).astype(np.int8)
    scale, offset = f32(4, 3, low=0.01), RNG.integers(-5, 5, (4, 3)).astype(np.int8)
    wanted = constexpr_blockwise_shift_scale.decompress(data, scale, offset.astype(np.float32))
    got = load()["constexpr_blockwise_shift_scale"]({"data": data, "scale": scale, "offset": offset})
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.parametrize("mode", ["update", "add", "mul", "max"])
def test_scatter_nd_writes_rows(mode: str) -> None:
    data, rows = f32(5, 3), f32(2, 3)
    got = load()["scatter_nd"]({"data": data, "indices": i32([4], [1]), "updates": rows, "mode": mode})
    wanted = data.copy()
    for i, row in zip((4, 1), rows, strict=True):
        old = wanted[i]
        wanted[i] = {"update": row, "add": old + row, "mul": old * row, "max": np.maximum(old, row)}[mode]
    np.testing.assert_array_equal(got, wanted)
    assert got is not data


def test_scatter_along_axis_adds_to_repeated_places() -> None:
    got = load()["scatter_along_axis"](
        {"data": np.zeros((1, 3), np.float32), "indices": i32([2, 2]), "updates": f32(1, 2) * 0 + 1.5, "axis": 1}
    )
    np.testing.assert_array_equal(got, [[0, 0, 3]])


@pytest.mark.parametrize(
    "options",
    [
        {"pad_type": "valid"},
        {"pad_type": "custom", "pad": i32(1, 2, 0, 1), "strides": i32(2, 1)},
        {"pad_type": "custom", "pad": i32(1, 1, 1, 1), "groups": 4},
        {"pad_type": "custom", "pad": i32(2, 2, 2, 2), "dilations": i32(2, 2)},
    ],
)
def test_convolution_is_torchs(options: dict[str, Any]) -> None:
    import torch
    import torch.nn.functional as F

    groups = options.get("groups", 1)
    x, weight, bias = f32(2, 4, 9, 8), f32(8, 4 // groups, 3, 3), f32(8)
    top, bottom, left, right = options.get("pad", [0] * 4)
    padded = F.pad(torch.from_numpy(x), (left, right, top, bottom))
    strides, dilations = (tuple(map(int, options.get(k, (1, 1)))) for k in ("strides", "dilations"))
    wanted = F.conv2d(padded, torch.from_numpy(weight), torch.from_numpy(bias), strides, 0, dilations, groups)
    got = load()["conv"]({"x": x, "weight": weight, "bias": bias, **options})
    np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-5, atol=1e-5)


def test_same_padding_puts_the_odd_row_where_mil_says() -> None:
    x, weight = f32(1, 1, 4, 4), f32(1, 1, 2, 2)
    same = load()["conv"]({"x": x, "weight": weight, "pad_type": "same"})
    lower = load()["conv"]({"x": x, "weight": weight, "pad_type": "same_lower"})
    np.testing.assert_allclose(same[0, 0, 0, 0], (x[0, 0, :2, :2] * weight[0, 0]).sum(), rtol=1e-5)
    np.testing.assert_allclose(lower[0, 0, 1, 1], (x[0, 0, :2, :2] * weight[0, 0]).sum(), rtol=1e-5)
    assert same.shape == lower.shape == x.shape


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("kind", ["max", "avg"])
def test_pooling_is_torchs(kind: str, ceil: bool) -> None:
    import torch
    import torch.nn.functional as F

    x = f32(1, 2, 8, 7)
    given = {"x": x, "kernel_sizes": i32(3, 3), "strides": i32(2, 2), "pad_type": "custom", "pad": i32(1, 1, 1, 1)}
    given |= {"ceil_mode": ceil, "exclude_padding_from_average": True}
    if kind == "max":
        wanted = F.max_pool2d(torch.from_numpy(x), 3, 2, 1, ceil_mode=ceil)
    else:
        wanted = F.avg_pool2d(torch.from_numpy(x), 3, 2, 1, ceil_mode=ceil, count_include_pad=False)
    np.testing.assert_allclose(load()[f"{kind}_pool"](given), wanted.numpy(), rtol=1e-5, atol=1e-6)


def save(
    folder: Path, shapes: dict[str, tuple[int, ...]], build: Callable[..., Any], half: bool = False, state: bool = False
) -> Path:
    """Write a package around a few MIL operations."""
    import_coremltools()
    import coremltools as ct
    from coremltools.converters.mil.mil import Builder, types

    specs = [Builder.TensorSpec(shape, types.fp16 if state else types.fp32) for shape in shapes.values()]
    if state:
        specs.append(Builder.StateTensorSpec((3,), dtype=types.fp16))
    program = Builder.program(input_specs=specs, opset_version=ct.target.iOS18)(build)
    precision = ct.precision.FLOAT16 if half else ct.precision.FLOAT32
    model = ct.convert(
        program,
        convert_to="mlprogram",
        compute_precision=precision,
        minimum_deployment_target=ct.target.iOS18,
        skip_model_load=True,
    )
    path = folder / "m.mlpackage"
    model.save(str(path))
    return path


def test_fp16_results_are_rounded_and_overflow(tmp_path: Path) -> None:
    from coremltools.converters.mil.mil import Builder as mb

    path = save(
        tmp_path, {"x": (2,)}, lambda x: mb.mul(x=mb.mul(x=x, y=np.float32(300)), y=np.float32(0.25)), half=True
    )
    x = np.array([1000, 1 + 2**-11], np.float32)
    rounded = next(iter(MilEvaluator(path).run("main", {"x": x}).values()))
    exact = next(iter(MilEvaluator(path, rounding=False).run("main", {"x": x}).values()))
    assert rounded[0] == np.inf  # 300,000 is beyond fp16, although the result, 75,000 · …, is what float32 gives
    assert rounded[1] == 75.0  # 1 + 2⁻¹¹ isn't an fp16 number
    np.testing.assert_array_equal(exact, x * 75)


def test_state_lasts_until_reset(tmp_path: Path) -> None:
    from coremltools.converters.mil.mil import Builder as mb

    def build(x: Any, total: Any) -> Any:
        value = mb.add(x=mb.read_state(input=total), y=x)
        mb.coreml_update_state(state=total, value=value)
        return mb.mul(x=value, y=np.float16(2))

    evaluator = MilEvaluator(save(tmp_path, {"x": (3,)}, build, half=True, state=True))
    x = np.array([1, 2, 3], np.float32)
    first, second = (next(iter(evaluator.run("main", {"x": x}).values())) for _ in range(2))
    np.testing.assert_array_equal(first, 2 * x)
    np.testing.assert_array_equal(second, 4 * x)
    evaluator.reset()
    np.testing.assert_array_equal(next(iter(evaluator.run("main", {"x": x}).values())), 2 * x)


def test_trace_shows_tensors_in_order(tmp_path: Path) -> None:
    from coremltools.converters.mil.mil import Builder as mb

    path = save(tmp_path, {"x": (4,)}, lambda x: mb.exp(x=mb.sin(x=x, name="first"), name="second"))
    trace = MilEvaluator(path).trace("main", {"x": f32(4)})
    assert list(trace) == ["first", "second"]
    np.testing.assert_allclose(np.exp(trace["first"]), trace["second"], rtol=1e-6)


def test_unknown_operation_is_named(tmp_path: Path) -> None:
    from coremltools.converters.mil.mil import Builder as mb

    path = save(tmp_path, {"x": (1, 4, 6)}, lambda x: mb.sliding_windows(x=x, axis=1, size=2))
    with pytest.raises(ConversionError, match="sliding_windows") as caught:
        MilEvaluator(path).run("main", {"x": f32(1, 4, 6)})
    assert caught.value.reason == Reason.UNSUPPORTED_OP


def test_operation_without_entry_is_computed_by_coremltools(tmp_path: Path) -> None:
    from coremltools.converters.mil.mil import Builder as mb

    assert "band_part" not in load()
    path = save(tmp_path, {"x": (3, 3)}, lambda x: mb.band_part(x=x, lower=0, upper=-1))
    x = f32(3, 3)
    np.testing.assert_array_equal(next(iter(MilEvaluator(path).run("main", {"x": x}).values())), np.triu(x))


def test_index_out_of_bounds_is_an_error_that_names_the_operation(tmp_path: Path) -> None:
    from coremltools.converters.mil.mil import Builder as mb

    def build(x: Any) -> Any:
        return mb.gather(
            x=x, indices=mb.cast(x=mb.reduce_max(x=x, axes=[0], keep_dims=True), dtype="int32"), name="row"
        )

    path = save(tmp_path, {"x": (3,)}, build)
    assert next(iter(MilEvaluator(path).run("main", {"x": np.array([0, 1, 2], np.float32)}).values())) == [2]
    with pytest.raises(ConversionError, match=r"`gather` \(row\).*reach from 3 to 3"):
        MilEvaluator(path).run("main", {"x": np.array([0, 1, 3], np.float32)})


def test_a_damaged_weight_changes_the_result(tmp_path: Path) -> None:
    from coremltools.converters.mil.mil import Builder as mb

    weight = f32(64, 64)
    path = save(tmp_path, {"x": (1, 64)}, lambda x: mb.linear(x=x, weight=weight))
    x = f32(1, 64)
    before = next(iter(MilEvaluator(path).run("main", {"x": x}).values()))
    np.testing.assert_allclose(before, x @ weight.T, rtol=1e-4, atol=1e-4)
    file = next(path.rglob("weight.bin"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2 + 3] ^= 0x7F  # in the exponent of a weight
    file.write_bytes(bytes(data))
    after = next(iter(MilEvaluator(path).run("main", {"x": x}).values()))
    assert not np.allclose(before, after)


def test_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.mlpackage").mkdir()
    with pytest.raises(SourceError, match=r"x\.mlpackage"):
        MilEvaluator(tmp_path / "x.mlpackage")


def test_results_are_freed_after_their_last_use(tmp_path: Path) -> None:
    from coremltools.converters.mil.mil import Builder as mb

    path = save(tmp_path, {"x": (4,)}, lambda x: mb.add(x=mb.exp(x=mb.sin(x=x, name="a"), name="b"), y=x, name="c"))
    frees = {i.name: set(i.frees) for i in MilEvaluator(path).functions["main"].instructions}
    assert frees["b"] == {"a"}
    assert frees["c"] == {"b", "x"}
    assert mil_evaluator.Ref("a") == mil_evaluator.Ref("a")
