"""Small Programs for the tests of targets: a depthwise CNN (float or static INT8) and a paged decoder (INT8 weights).

They are put together here by hand, so that a target's tests need neither a recipe nor a task.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgec.golden import OnnxRunner, Recording, Step, replay
from edgec.model import LayerScheme, Program, Quantization, Signature, TensorSpec

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

    from edgec.architectures.llama import LlamaConfig

OPSET = 21
BLOCK = 4  # tokens per block of the decoder's pools
BLOCKS = 8  # blocks in each pool
TABLE = 4  # blocks in each sequence's table: a context of 16 tokens
VOCAB, HIDDEN, HEADS, KV_HEADS, MLP = 256, 64, 4, 2, 128


def cnn_program(folder: Path, quantized: bool = True) -> Program:
    """A depthwise-separable CNN on 32 × 32 images; `quantized` gives static INT8, with the float one as baseline."""
    import torch

    torch.manual_seed(0)
    module = _cnn().eval()
    example = (torch.randn(1, 3, 32, 32),)
    signature = Signature("main", (TensorSpec("image", (1, 3, 32, 32), "float32"),), (_f32("logits", 1, 10),))
    images = np.random.default_rng(1).standard_normal((2, 1, 3, 32, 32)).astype(np.float32)
    steps = [Step("main", {"image": image}) for image in images]
    exported = torch.export.export(module, example)
    if not quantized:
        return _save(folder, {signature: exported}, steps, None, _count(module))
    unfolded = _static_int8(exported.module(), example)
    step = next(
        float(n.args[1])  # type: ignore[arg-type]
        for n in reversed(list(unfolded.graph.nodes))
        if "quantize_per_tensor" in str(n.target)
    )
    layers = tuple(
        LayerScheme(name, type(m).__name__, "int8", 0)
        for name, m in module.named_modules()
        if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)
    )
    scheme = Quantization("static", layers, (("logits", step),))
    program = _save(folder, {signature: unfolded}, steps, scheme, _count(module))
    _save(folder / "float", {signature: exported}, steps, None, _count(module))
    return program


def decoder_program(folder: Path, layers: int = 2, quantized: bool = True) -> Program:
    """A small Llama as a paged step graph of two signatures, `decode` (2 sequences) and `prefill` (a chunk of 8).

    Inputs and outputs are those of `edgec.architectures.paged.PagedStep`: tokens, positions and slot_mapping (batch,
    time), block_table (batch, TABLE), pools k_<i> and v_<i> (BLOCKS · BLOCK, kv_heads, head_dim); logits, hidden and
    the pools as k_<i>_out and v_<i>_out. `quantized` gives INT8 weights per output channel, dequantised where they
    are used.
    """
    import torch
    from edgec.passes.quantize_weights import quantizable, quantize_layers

    from edgec.architectures.llama import Llama
    from edgec.architectures.paged import PagedStep

    torch.manual_seed(0)
    model = Llama(decoder_config(layers)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05) if parameter.dim() > 1 else torch.nn.init.uniform_(
            parameter, 0.5, 1.5
        )
    count = _count(model)
    names = list(quantizable(model, embeddings=True))
    graphs: dict[str, dict[Signature, ExportedProgram]] = {}
    for form in ("float", "int8") if quantized else ("float",):
        if form == "int8":
            quantize_layers(model, names)
        graphs[form] = {}
        step = PagedStep(model, BLOCK, TABLE).eval()
        for name, batch, time in (("decode", 2, 1), ("prefill", 1, 8)):
            signature = decoder_signature(name, batch, time, layers)
            graphs[form][signature] = torch.export.export(step, _zeros(signature))
    steps = decoder_steps()
    if not quantized:
        return _save(folder, graphs["float"], steps, None, count)
    kinds = {n: type(m).__name__ for n, m in model.named_modules()}
    scheme = Quantization("weight-only", tuple(LayerScheme(n, kinds[n], "int8", 0) for n in names))
    program = _save(folder, graphs["int8"], steps, scheme, count)
    _save(folder / "float", graphs["float"], steps, None, count)
    return program


def decoder_config(layers: int) -> LlamaConfig:
    from edgec.architectures.llama import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        layers=layers,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HIDDEN // HEADS,
    )


def decoder_signature(name: str, batch: int, time: int, layers: int) -> Signature:
    pool = (BLOCKS * BLOCK, KV_HEADS, HIDDEN // HEADS)
    pools = [f"{kind}_{i}" for i in range(layers) for kind in "kv"]
    inputs = [TensorSpec(n, (batch, time), "int32") for n in ("tokens", "positions", "slot_mapping")]
    inputs += [TensorSpec("block_table", (batch, TABLE), "int32"), *(_f32(n, *pool) for n in pools)]
    outputs = [_f32("logits", batch, time, VOCAB), _f32("hidden", batch, time, HIDDEN)]
    outputs += [_f32(f"{n}_out", *pool) for n in pools]
    return Signature(name, tuple(inputs), tuple(outputs), tuple((n, f"{n}_out") for n in pools))


def decoder_steps() -> list[Step]:
    """Two interleaved sequences in shared pools: each is prefilled (8 and 6 real tokens), then both decode 4 steps."""
    rng = np.random.default_rng(2)
    tables = np.array([[5, 0, 3, 6], [1, 7, 2, 4]], np.int32)
    lengths = [8, 6]
    steps = []
    for sequence, length in enumerate(lengths):
        positions = np.arange(8, dtype=np.int32)[None]
        tokens = rng.integers(0, VOCAB, (1, 8), dtype=np.int32)
        # The padding behind a short prompt is written to slots that the first decode steps overwrite.
        slots = tables[sequence][positions // BLOCK] * BLOCK + positions % BLOCK
        steps.append(_step("prefill", tokens, positions, slots.astype(np.int32), tables[sequence : sequence + 1]))
        lengths[sequence] = length
    for _ in range(4):
        positions = np.array(lengths, np.int32)[:, None]
        slots = tables[np.arange(2)[:, None], positions // BLOCK] * BLOCK + positions % BLOCK
        tokens = rng.integers(0, VOCAB, (2, 1), dtype=np.int32)
        steps.append(_step("decode", tokens, positions, slots.astype(np.int32), tables))
        lengths = [n + 1 for n in lengths]
    return steps


def _step(name: str, tokens: np.ndarray, positions: np.ndarray, slots: np.ndarray, table: np.ndarray) -> Step:
    return Step(name, {"tokens": tokens, "positions": positions, "slot_mapping": slots, "block_table": table})


def _f32(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, shape, "float32")


def _zeros(signature: Signature) -> tuple[torch.Tensor, ...]:
    import torch

    return tuple(torch.zeros(t.sized({}), dtype=getattr(torch, t.dtype)) for t in signature.inputs)


def _count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _save(
    folder: Path,
    graphs: dict[Signature, ExportedProgram],
    steps: list[Step],
    quantization: Quantization | None,
    parameters: int,
) -> Program:
    """Write the folder of a Program: .pt2 (unfolded), .onnx (folded), the recording and program.json."""
    import torch
    from edgec.passes.export_onnx import ExternalWeights, write_onnx

    from edgec.graphs import fold

    folder.mkdir(parents=True, exist_ok=True)
    for signature, exported in graphs.items():
        torch.export.save(exported, folder / f"{signature.name}.pt2")
        path = folder / f"{signature.name}.onnx"
        weights = ExternalWeights(folder)
        write_onnx(fold(exported), signature, path, opset=OPSET, external_over=1_500_000_000, weights=weights)
    signatures = tuple(graphs)
    program = Program(folder, signatures, quantization, "tensors", OPSET, parameters)
    golden = replay(OnnxRunner({s.name: program.onnx_path(s.name) for s in signatures}), signatures, steps)
    recorded = [Step(s.signature, s.inputs, outputs) for s, outputs in zip(steps, golden, strict=True)]
    Recording(recorded).save(folder / "recording.safetensors")
    program.save()
    return program


def _static_int8(module: Any, example: tuple[torch.Tensor, ...]) -> ExportedProgram:
    import torch
    from litert_torch.quantize.pt2e_quantizer import PT2EQuantizer, get_symmetric_quantization_config
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    config = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=False)
    prepared = prepare_pt2e(torch.export.export(module, example).module(), PT2EQuantizer().set_global(config))
    generator = torch.Generator().manual_seed(3)
    for _ in range(8):
        prepared(torch.randn(1, 3, 32, 32, generator=generator))
    return torch.export.export(convert_pt2e(prepared, fold_quantize=False), example)


def _cnn() -> torch.nn.Module:
    from torch import nn

    def separable(i: int, o: int) -> nn.Module:
        depthwise = (nn.Conv2d(i, i, 3, padding=1, groups=i, bias=False), nn.BatchNorm2d(i), nn.ReLU6())
        return nn.Sequential(*depthwise, nn.Conv2d(i, o, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU6())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            stem = (nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU6())
            self.features = nn.Sequential(*stem, separable(16, 32), separable(32, 64))
            self.classifier = nn.Linear(64, 10)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return self.classifier(self.features(image).mean((2, 3)))  # type: ignore[no-any-return]

    net = Net()
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d) and m.running_mean is not None and m.running_var is not None:
            m.running_mean.uniform_(-0.5, 0.5)
            m.running_var.uniform_(0.5, 1.5)
            m.weight.data.uniform_(0.5, 1.5)
    return net
