"""One small real job per target: does its toolchain work, and not only lie there?

`python -m edgec.probes TARGET` runs one, and prints one line. `edgec doctor --probe` runs each in a process of its own,
since a broken native library can take its process down.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np


def probe_onnxruntime() -> str:
    """Run one QuantizeLinear and DequantizeLinear pair."""
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    one = numpy_helper.from_array(np.array(0.5, np.float32), "scale")
    zero = numpy_helper.from_array(np.array(0, np.int8), "zero")
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [3]) for n in "xy"]
    graph = helper.make_graph(nodes, "probe", ports[:1], ports[1:], [one, zero])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": np.array([0.6, -1.1, 200.0], np.float32)})
    np.testing.assert_array_equal(y, [0.5, -1.0, 63.5])
    return f"ran a quantised graph ({', '.join(onnxruntime.get_available_providers())})"


def probe_tflite() -> str:
    """Convert one layer with litert-torch and run it with LiteRT."""
    import litert_torch
    import torch
    from ai_edge_litert.interpreter import Interpreter

    torch.manual_seed(0)
    layer, x = torch.nn.Linear(4, 3).eval(), torch.ones(1, 4)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.tflite"
        litert_torch.convert(layer, (x,)).export(str(path))
        interpreter = Interpreter(str(path))
        interpreter.allocate_tensors()
        interpreter.set_tensor(interpreter.get_input_details()[0]["index"], x.numpy())
        interpreter.invoke()
        y = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
    np.testing.assert_allclose(y, layer(x).detach().numpy(), rtol=1e-5, atol=1e-6)
    return "converted a layer and ran it"


def probe_coreml() -> str:
    """Convert one layer to an .mlpackage. It runs on a Mac only."""
    import coremltools
    import torch

    exported = torch.export.export(torch.nn.Linear(4, 3).eval(), (torch.ones(1, 4),)).run_decompositions({})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.mlpackage"
        coremltools.convert(exported, minimum_deployment_target=coremltools.target.iOS18, skip_model_load=True).save(
            str(path)
        )
        assert (path / "Manifest.json").is_file()
    runs = sys.platform == "darwin"
    return "converted a layer" + ("" if runs else "; predictions need a Mac, here programs are evaluated")


def probe_tvm() -> str:
    """Compile one function with LLVM and run it (case tvm#17238: LLVM can be missing from a TVM that imports)."""
    import tvm
    from tvm import relax

    if not tvm.runtime.enabled("llvm"):
        raise RuntimeError("this TVM was built without LLVM")
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((3,), "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.add(x, x)))
    executable = tvm.compile(builder.get(), target=tvm.target.Target({"kind": "llvm"}))
    machine = relax.VirtualMachine(executable, tvm.cpu())
    y = machine["main"](tvm.runtime.tensor(np.array([1, 2, 3], np.float32))).numpy()
    np.testing.assert_array_equal(y, [2, 4, 6])
    return f"compiled with LLVM {tvm.target.codegen.llvm_version_major()} and ran it"


def probe_native() -> str:
    """Compile the engine's core, unless that has been done, load it, and have it refuse what is no bundle."""
    import ctypes

    from edgec.runtime.abi import Status
    from edgec.runtime.library import load

    core = load()
    with tempfile.TemporaryDirectory() as folder:
        status = core.edgec_engine_create(folder.encode(), None, ctypes.byref(ctypes.c_void_p()))
    if status != Status.NOT_FOUND:
        raise RuntimeError(f"opening an empty folder gave {status}: {core.edgec_last_error().decode()}")
    return f"compiled and loaded {core.edgec_version().decode()}"


PROBES: dict[str, Callable[[], str]] = {
    "onnxruntime": probe_onnxruntime,
    "tflite": probe_tflite,
    "coreml": probe_coreml,
    "tvm": probe_tvm,
    "native": probe_native,
}

if __name__ == "__main__":
    print(PROBES[sys.argv[1]]())
