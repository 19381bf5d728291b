"""`edgec diff`: pairs tensors across names and layouts, and finds the first one that went wrong: planted bugs."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from edgec.diff import diff
from edgec.diff_match import Limits, Trace, first_parting, laid_out, layouts, match
from edgec.diff_subject import Subject, open_subject
from edgec.errors import SourceError, UsageError
from edgec.golden import OnnxRunner, Recording, Step, replay
from edgec.model import Program, Signature, TensorSpec
from tests.conftest import Edgec
from tests.onnx_samples import chain, initializer, qdq, save
from tests.tflite_samples import fully_connected

RNG = np.random.default_rng(5)


def test_equal_models_are_equal(tmp_path: Path) -> None:
    found = diff(open_subject(chain(tmp_path / "a.onnx")), open_subject(chain(tmp_path / "b.onnx")), None)
    assert found.equal
    assert [p.row.relative_error for p in found.outputs if p.row] == [0.0]
    assert found.alone_a == found.alone_b == 0


@pytest.mark.parametrize(
    ("weight", "shape", "tensor", "op"),
    [("w1", (8, 3, 3, 3), "conv1", "Conv"), ("w2", (8, 8, 3, 3), "conv2", "Conv"), ("w3", (8, 5), "logits", "MatMul")],
)
def test_the_operation_whose_weight_was_changed_is_found(
    tmp_path: Path, weight: str, shape: tuple[int, ...], tensor: str, op: str
) -> None:
    good = chain(tmp_path / "a.onnx")
    bad = chain(tmp_path / "b.onnx", change={weight: RNG.normal(size=shape)})
    found = diff(open_subject(good), open_subject(bad), None)
    assert found.parting is not None
    assert (found.parting.pair.a, found.parting.pair.b, found.parting.op_a) == (tensor, tensor, op)
    assert all(found.limits.holds(p) for p in found.parting.agreeing)


def renamed(path: Path, source: Path) -> Path:
    """The same graph under names that say nothing."""
    import onnx

    model = onnx.load(str(source))
    kept = {v.name for v in (*model.graph.input, *model.graph.output)} | {t.name for t in model.graph.initializer}
    for node in model.graph.node:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                if name not in kept:
                    names[i] = f"t_{zlib.crc32(name.encode())}"
    onnx.save(model, str(path))
    return path


def test_it_is_found_without_names_too(tmp_path: Path) -> None:
    good = chain(tmp_path / "a.onnx")
    bad = renamed(tmp_path / "b.onnx", chain(tmp_path / "c.onnx", change={"w2": RNG.normal(size=(8, 8, 3, 3))}))
    found = diff(open_subject(good), open_subject(bad), None)
    assert found.parting is not None
    # conv2 and relu2 have one shape: which of the two is shown first depends on what looks more alike.
    assert found.parting.pair.a in ("conv2", "relu2")
    assert [p.a for p in found.parting.agreeing] == ["relu1"]


def test_a_small_difference_is_within_the_limits_or_not_as_they_say(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
    a = open_subject(chain(tmp_path / "a.onnx", change={"w3": weights}))
    b = open_subject(chain(tmp_path / "b.onnx", change={"w3": weights * np.float32(1.0005)}))
    assert diff(a, b, None, limits=Limits(relative_error=1e-3)).equal
    assert not diff(a, b, None, limits=Limits(relative_error=1e-4)).equal


def test_nan_on_one_side_is_a_difference(tmp_path: Path) -> None:
    weights = np.ones((8, 5))
    bad = weights.copy()
    bad[0, 0] = np.nan
    a = open_subject(chain(tmp_path / "a.onnx", change={"w3": weights}))
    b = open_subject(chain(tmp_path / "b.onnx", change={"w3": bad}))
    found = diff(a, b, None)
    assert not found.equal
    assert "NaN" in found.outputs[0].fault
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["equal"] is False


def reference_of_tflite(path: Path, *, bias: float = 0.0) -> Path:
    """What tests/tflite_samples.py computes, in float with the same quantisers at the edges."""
    weights = np.arange(-6, 6).reshape(3, 4) * np.array([[0.1], [0.2], [0.3]])
    offsets = np.array([1, 2, 3]) * np.array([0.05, 0.1, 0.15]) + bias
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "sx", "zx"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "sx", "zx"], ["d"]),
        helper.make_node("Gemm", ["d", "w", "b"], ["g"], transB=1),
        helper.make_node("Relu", ["g"], ["r"]),
        helper.make_node("QuantizeLinear", ["r", "sy", "zy"], ["rq"]),
        helper.make_node("DequantizeLinear", ["rq", "sy", "zy"], ["y"]),
    ]
    constants = [
        initializer("sx", 0.5),
        initializer("zx", -3, "int8"),
        initializer("w", weights),
        initializer("b", offsets),
        initializer("sy", 0.25),
        initializer("zy", 7, "int8"),
    ]
    return save(path, nodes, constants, inputs={"x": [1, 4]}, outputs={"y": [1, 3]})


def test_tflite_against_onnx_counts_quantisation_steps(tmp_path: Path) -> None:
    tflite = open_subject(fully_connected(tmp_path / "a.tflite"))
    inputs = [Step("serve", {"image": np.array([[1.0, -2.5, 3.0, 4.5]], np.float32)})]
    found = diff(open_subject(reference_of_tflite(tmp_path / "a.onnx")), tflite, inputs)
    assert found.equal
    assert found.outputs[0].row is not None and found.outputs[0].row.off_by_n in (0, 1)
    found = diff(open_subject(reference_of_tflite(tmp_path / "b.onnx", bias=1.0)), tflite, inputs)
    assert not found.equal
    assert found.outputs[0].row is not None and found.outputs[0].row.off_by_n == 4


def test_the_steps_of_a_quantised_graph_are_known(tmp_path: Path) -> None:
    subject = open_subject(qdq(tmp_path / "q.onnx"))
    inputs = {"x": RNG.normal(size=(1, 2, 4, 4)).astype(np.float32)}
    trace = subject.trace(subject.signatures[0], inputs)
    assert trace.steps["y"] == pytest.approx(0.5)
    assert list(trace.tensors) == ["xd", "wd", "c", "y"]  # integers behind the floats are left out


STATE = Signature(
    "step",
    (TensorSpec("x", (1, 4), "float32"), TensorSpec("sum", (1, 4), "float32")),
    (TensorSpec("y", (1, 4), "float32"), TensorSpec("sum_out", (1, 4), "float32")),
    state=(("sum", "sum_out"),),
)


def accumulator(folder: Path, limit: float) -> Program:
    """y = 2 · sum, where sum grows by x at each step and is clipped at `limit`."""
    nodes = [
        helper.make_node("Add", ["sum", "x"], ["added"]),
        helper.make_node("Clip", ["added", "low", "high"], ["sum_out"]),
        helper.make_node("Mul", ["sum_out", "two"], ["y"]),
    ]
    constants = [initializer("low", -100.0), initializer("high", limit), initializer("two", 2.0)]
    folder.mkdir()
    shape: list[int | str] = [1, 4]
    save(
        folder / "step.onnx",
        nodes,
        constants,
        inputs={"x": shape, "sum": shape},
        outputs={"y": shape, "sum_out": shape},
    )
    program = Program(folder, (STATE,), None, "tensors", 21, 0)
    steps = [Step("step", {"x": np.array([[1.0, 0.5, -1.0, 0.25]], np.float32)}) for _ in range(5)]
    golden = replay(OnnxRunner({"step": program.onnx_path("step")}), (STATE,), steps)
    Recording([Step("step", s.inputs, o) for s, o in zip(steps, golden, strict=True)]).save(
        folder / "recording.safetensors"
    )
    program.save()
    return program


def test_state_is_carried_and_the_step_at_which_they_part_is_named(tmp_path: Path) -> None:
    good, bad = accumulator(tmp_path / "a", 100.0), accumulator(tmp_path / "b", 2.5)
    found = diff(open_subject(good.path), open_subject(bad.path), good.recording().steps)
    assert found.parting is not None
    assert (found.parting.step, found.parting.op_a, found.parting.pair.a) == (2, "Clip", "sum_out")
    assert [p.a for p in found.parting.agreeing] == ["added"]


def test_an_input_in_the_other_layout_is_transposed(tmp_path: Path) -> None:
    flat = [
        helper.make_node(
            "Transpose",
            [
                "image",
            ],
            ["nchw"],
            perm=[0, 3, 1, 2],
        )
    ]
    nodes = [
        *flat,
        helper.make_node("Conv", ["nchw", "w"], ["c"]),
        helper.make_node("Transpose", ["c"], ["y"], perm=[0, 2, 3, 1]),
    ]
    weights = initializer("w", RNG.normal(size=(6, 3, 1, 1)))
    last = save(tmp_path / "nhwc.onnx", nodes, [weights], inputs={"image": [1, 4, 5, 3]}, outputs={"y": [1, 4, 5, 6]})
    conv = [helper.make_node("Conv", ["image", "w"], ["y"])]
    first = save(tmp_path / "nchw.onnx", conv, [weights], inputs={"image": [1, 3, 4, 5]}, outputs={"y": [1, 6, 4, 5]})
    found = diff(open_subject(first), open_subject(last), None)
    assert found.equal
    assert found.outputs[0].transposed
    assert any("laid out" in note for note in found.notes)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_any_permutation_of_axes_can_be_undone(shape: list[int], random: object) -> None:
    array = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    moved = array.transpose(order)
    assert any(np.array_equal(laid_out(moved, array.shape, way), array) for way in layouts(array.shape, moved.shape))


def trace(**tensors: np.ndarray) -> Trace:
    return Trace(tensors, {"out": list(tensors)[-1]})


def values(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def test_tensors_are_paired_by_content_whatever_their_layout() -> None:
    x, y, out = values(1, 4, 4, 8), values(1, 4, 4, 8), values(1, 10)
    a = trace(first=x, second=y, last=out)
    b = trace(p=y.transpose(0, 3, 1, 2), q=x.reshape(16, 8), z=out)
    pairs = {p.a: p for p in match(a, b, [("out", "out")], Limits())}
    assert {n: p.b for n, p in pairs.items()} == {"first": "q", "second": "p", "last": "z"}
    assert [pairs[n].transposed for n in ("first", "second")] == [False, True]


def test_constant_and_tiny_tensors_are_not_paired_by_accident() -> None:
    out = values(10)
    a, b = (
        trace(zeros=np.zeros(100, np.float32), few=values(3), last=out),
        trace(z=np.zeros(100, np.float32), w=values(3), l=out),
    )
    assert [p.a for p in match(a, b, [("out", "out")], Limits()) if p.how == "content"] == []


def test_a_tensor_that_went_wrong_is_paired_by_its_place() -> None:
    one, three, out = values(50), values(50), values(10)
    a = trace(one=one, two=values(60), three=three, last=out)
    b = trace(i=one, ii=values(60), iii=three, iv=out)
    pairs = {p.a: p for p in match(a, b, [("out", "out")], Limits())}
    assert (pairs["two"].b, pairs["two"].how) == ("ii", "place")


def test_the_walk_stays_on_the_branch_that_differs() -> None:
    """The other branch holds a pair that differs too, but no output comes from it."""
    stem, bad, good, dead, out, fine = values(20), values(30), values(31), values(33), values(10), values(11)
    edges = {"bad": ("stem",), "good": ("stem",), "dead": ("stem",), "out": ("bad",), "fine": ("good",)}
    a = Trace(
        {"stem": stem, "dead": dead, "bad": bad, "good": good, "out": out, "fine": fine},
        {"o": "out", "f": "fine"},
        edges,
    )
    tensors = {"stem": stem, "dead": values(33), "bad": values(30), "good": good, "out": values(10), "fine": fine}
    b = Trace(tensors, {"o": "out", "f": "fine"})
    pairs = match(a, b, [("o", "o"), ("f", "f")], Limits())
    first, agreeing = first_parting(a, pairs, Limits().holds)
    assert first is not None and first.a == "bad"
    assert [p.a for p in agreeing] == ["stem"]


def test_what_cannot_be_run_is_said(tmp_path: Path) -> None:
    (tmp_path / "bundle.json").write_text(json.dumps({"targets": {"tflite": {}, "tvm": {}}}))
    with pytest.raises(UsageError, match="several artefacts") as caught:
        open_subject(tmp_path)
    assert "tflite" in caught.value.hint
    from safetensors.numpy import save_file

    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "a.safetensors")
    with pytest.raises(UsageError, match="can't be run"):
        open_subject(tmp_path / "a.safetensors")
    with pytest.raises(SourceError, match="does not exist"):
        open_subject(tmp_path / "nothing.onnx")


def test_models_with_other_inputs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has shape"):
        diff(open_subject(chain(tmp_path / "a.onnx")), open_subject(qdq(tmp_path / "b.onnx")), None)


@pytest.mark.slow
def test_exit_codes_of_the_command(edgec: Edgec) -> None:
    good, bad = (
        chain(edgec.folder / "a.onnx"),
        chain(edgec.folder / "b.onnx", change={"w2": RNG.normal(size=(8, 8, 3, 3))}),
    )
    done = edgec("diff", good, good, "--json")
    assert (done.code, done.json["equal"]) == (0, True)
    done = edgec("diff", good, bad, "--json")
    assert (done.code, done.json["parting"]["a"], done.json["parting"]["op_a"]) == (6, "conv2", "Conv")
    done = edgec("diff", good, bad)
    assert done.code == 6
    assert "they part at step 0" in done.stdout and "conv2" in done.stdout
    assert edgec("diff", good, edgec.folder / "none.onnx").code == 2
    assert edgec("diff", good, good, "--recording", good).code == 2


@pytest.mark.slow
def test_a_program_against_its_tflite_artefact(tmp_path: Path) -> None:
    """A real INT8 CNN through a real converter: equal to the last step; a spoilt program parts at what was spoilt."""
    import onnx
    from onnx import numpy_helper

    from edgec import registry
    from edgec.context import Context
    from tests.targets.programs import cnn_program

    program = cnn_program(tmp_path / "program")
    entry = registry.get_target("tflite")
    (tmp_path / "work").mkdir()
    (tmp_path / "tflite").mkdir()
    entry.convert(program, entry.options(), Context(0, 2, tmp_path / "work", tmp_path, tmp_path, tmp_path / "tflite"))
    artifact = open_subject(tmp_path / "tflite")
    steps = program.recording().steps
    found = diff(open_subject(program.path), artifact, steps)
    assert found.equal
    assert max(p.row.off_by_n or 0 for p in found.outputs if p.row) <= 1
    model = onnx.load(str(program.onnx_path("main")))
    convolutions = [n for n in model.graph.node if n.op_type == "Conv"]
    bias = next(t for t in model.graph.initializer if t.name == convolutions[2].input[2])
    bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) + np.float32(3.0), bias.name))
    onnx.save(model, str(program.onnx_path("main")))
    found = diff(open_subject(program.path), artifact, steps)
    assert found.parting is not None
    after = {n.output[0]: {n.output[0]} for n in convolutions}[convolutions[2].output[0]]
    for node in model.graph.node:  # what quantises or clips the spoilt convolution's result is as good an answer
        if set(node.input) & after and node.op_type in ("Relu", "Clip", "QuantizeLinear", "DequantizeLinear"):
            after |= set(node.output)
    assert found.parting.pair.a in after


class Counting:
    """A stateful engine that counts its runs, whichever way it is run."""

    stateful = True

    def __init__(self) -> None:
        self.runs = 0

    def run(self, signature: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.runs += 1
        return {"y": np.full(4, self.runs, np.float32)}

    def trace(self, signature: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"inner": np.ones(4, np.float32), **self.run(signature, inputs)}

    def reset(self) -> None:
        self.runs = 0


def test_an_engine_that_keeps_its_state_runs_once_a_step() -> None:
    engine = Counting()
    subject = Subject("counting", "test", (STATE,), engine)
    steps = [Step("step", {"x": np.ones((1, 4), np.float32)}) for _ in range(3)]
    assert diff(subject, Subject("counting", "test", (STATE,), Counting()), steps).equal
    assert engine.runs == 3
