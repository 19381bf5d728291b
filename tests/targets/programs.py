"""Small Programs for the tests of targets: a depthwise CNN (float or static INT8) and a paged decoder (INT8 weights).

They are made here by hand, without the passes, so that a target's tests depend on nothing but the contracts.
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
        return _save(folder, {signature: (exported, exported)}, steps, None, _count(module))
    unfolded, folded = (_static_int8(exported.module(), example, fold) for fold in (False, True))
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
    program = _save(folder, {signature: (unfolded, folded)}, steps, scheme, _count(module))
    _save(folder / "float", {signature: (exported, exported)}, steps, None, _count(module))
    return program


def decoder_program(folder: Path, layers: int = 2, quantized: bool = True) -> Program:
    """A Llama-like paged step graph of two signatures, `decode` (2 sequences) and `prefill` (a chunk of 8 tokens).

    Inputs: tokens, positions and slots (batch, time), block_table (batch, TABLE), and per layer k_<i> and v_<i>
    (BLOCKS · BLOCK, kv_heads, head_dim). Outputs: logits (batch, time, vocab), hidden (batch, time, hidden) and the
    pools as k_<i>_out and v_<i>_out. `quantized` gives INT8 weights per output channel,
    dequantised where they are used.
    """
    import torch

    torch.manual_seed(0)
    module = _decoder(layers).eval()
    count = _count(module)
    graphs: dict[str, dict[Signature, tuple[ExportedProgram, ExportedProgram]]] = {}
    for form in ("float", "int8") if quantized else ("float",):
        if form == "int8":
            module.quantize()  # type: ignore[operator]
        graphs[form] = {}
        for name, batch, time in (("decode", 2, 1), ("prefill", 1, 8)):
            signature = decoder_signature(name, batch, time, layers)
            exported = torch.export.export(module, _zeros(signature))
            graphs[form][signature] = (exported, exported)
    steps = decoder_steps()
    if not quantized:
        return _save(folder, graphs["float"], steps, None, count)
    names = [n for n, m in module.named_modules() if hasattr(m, "scale")]
    scheme = Quantization("weight-only", tuple(LayerScheme(n, "Linear", "int8", 0) for n in names))
    program = _save(folder, graphs["int8"], steps, scheme, count)
    _save(folder / "float", graphs["float"], steps, None, count)
    return program


def decoder_signature(name: str, batch: int, time: int, layers: int) -> Signature:
    pool = (BLOCKS * BLOCK, KV_HEADS, HIDDEN // HEADS)
    pools = [f"{kind}_{i}" for i in range(layers) for kind in "kv"]
    inputs = [TensorSpec(n, (batch, time), "int32") for n in ("tokens", "positions", "slots")]
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
    return Step(name, {"tokens": tokens, "positions": positions, "slots": slots, "block_table": table})


def _f32(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, shape, "float32")


def _zeros(signature: Signature) -> tuple[torch.Tensor, ...]:
    import torch

    return tuple(torch.zeros(t.sized({}), dtype=getattr(torch, t.dtype)) for t in signature.inputs)


def _count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _save(
    folder: Path,
    graphs: dict[Signature, tuple[ExportedProgram, ExportedProgram]],
    steps: list[Step],
    quantization: Quantization | None,
    parameters: int,
) -> Program:
    """Write the folder of a Program: .pt2 (unfolded), .onnx (folded), the recording and program.json."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    for signature, (unfolded, folded) in graphs.items():
        torch.export.save(unfolded, folder / f"{signature.name}.pt2")
        torch.onnx.export(
            folded,
            (),
            folder / f"{signature.name}.onnx",
            dynamo=True,
            opset_version=OPSET,
            optimize=False,
            verbose=False,
            external_data=False,
            input_names=[t.name for t in signature.inputs],
            output_names=[t.name for t in signature.outputs],
        )
    signatures = tuple(graphs)
    program = Program(folder, signatures, quantization, "tensors", OPSET, parameters)
    golden = replay(OnnxRunner({s.name: program.onnx_path(s.name) for s in signatures}), signatures, steps)
    recorded = [Step(s.signature, s.inputs, outputs) for s, outputs in zip(steps, golden, strict=True)]
    Recording(recorded).save(folder / "recording.safetensors")
    program.save()
    return program


def _static_int8(module: Any, example: tuple[torch.Tensor, ...], fold: bool) -> ExportedProgram:
    import torch
    from litert_torch.quantize.pt2e_quantizer import PT2EQuantizer, get_symmetric_quantization_config
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    config = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=False)
    prepared = prepare_pt2e(torch.export.export(module, example).module(), PT2EQuantizer().set_global(config))
    generator = torch.Generator().manual_seed(3)
    for _ in range(8):
        prepared(torch.randn(1, 3, 32, 32, generator=generator))
    return torch.export.export(convert_pt2e(prepared, fold_quantize=fold), example)


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


def _decoder(layers: int) -> torch.nn.Module:
    import torch
    import torch.nn.functional as F
    from torch import nn

    head_dim, repeat, context = HIDDEN // HEADS, HEADS // KV_HEADS, TABLE * BLOCK

    class Int8Linear(nn.Module):
        """y = x Wᵀ; float until `quantize`, then INT8 with one scale per output channel."""

        def __init__(self, i: int, o: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(o, i) * 0.05, requires_grad=False)
            self.quantized = False

        def quantize(self) -> None:
            scale = self.weight.abs().amax(1) / 127  # (o,)
            weight = (self.weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
            del self.weight
            self.register_buffer("weight", weight)
            self.register_buffer("scale", scale)
            self.register_buffer("zero_point", torch.zeros(len(scale), dtype=torch.int64))
            self.quantized = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.quantized:
                return F.linear(x, self.weight)
            dequantize = torch.ops.quantized_decomposed.dequantize_per_channel.default
            return F.linear(x, dequantize(self.weight, self.scale, self.zero_point, 0, -128, 127, torch.int8))

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight

    def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]  # (B, T, H, D/2)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = Norm(), Norm()
            self.q, self.o = Int8Linear(HIDDEN, HEADS * head_dim), Int8Linear(HEADS * head_dim, HIDDEN)
            self.k, self.v = Int8Linear(HIDDEN, KV_HEADS * head_dim), Int8Linear(HIDDEN, KV_HEADS * head_dim)
            self.gate, self.up, self.down = Int8Linear(HIDDEN, MLP), Int8Linear(HIDDEN, MLP), Int8Linear(MLP, HIDDEN)

        def forward(
            self, x: Any, cos: Any, sin: Any, slots: Any, reads: Any, mask: Any, k_pool: Any, v_pool: Any
        ) -> Any:
            batch, time, _ = x.shape
            h = self.norm1(x)
            q = rope(self.q(h).view(batch, time, HEADS, head_dim), cos, sin)
            k = rope(self.k(h).view(batch, time, KV_HEADS, head_dim), cos, sin)
            v = self.v(h).view(batch, time, KV_HEADS, head_dim)
            k_pool = torch.index_put(k_pool, (slots,), k.reshape(-1, KV_HEADS, head_dim))  # (slots, Hkv, D)
            v_pool = torch.index_put(v_pool, (slots,), v.reshape(-1, KV_HEADS, head_dim))
            read = (batch, context, KV_HEADS, head_dim)
            keys = k_pool.index_select(0, reads).view(read).permute(0, 2, 3, 1)  # (B, Hkv, D, S)
            values = v_pool.index_select(0, reads).view(read).permute(0, 2, 1, 3)  # (B, Hkv, S, D)
            q = q.view(batch, time, KV_HEADS, repeat, head_dim).permute(0, 2, 3, 1, 4)
            scores = torch.matmul(q.reshape(batch, KV_HEADS, repeat * time, head_dim), keys) * head_dim**-0.5
            scores = scores.view(batch, KV_HEADS, repeat, time, context).masked_fill(~mask, -1e9)
            p = scores.softmax(-1).view(batch, KV_HEADS, repeat * time, context)
            out = torch.matmul(p, values).view(batch, KV_HEADS, repeat, time, head_dim).permute(0, 3, 1, 2, 4)
            x = x + self.o(out.reshape(batch, time, HEADS * head_dim))
            h = self.norm2(x)
            return x + self.down(F.silu(self.gate(h)) * self.up(h)), k_pool, v_pool

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCAB, HIDDEN)
            self.layers = nn.ModuleList([Layer() for _ in range(layers)])
            self.norm = Norm()
            self.head = Int8Linear(HIDDEN, VOCAB)
            self.register_buffer("inverse", 1e4 ** -(torch.arange(0, head_dim, 2) / head_dim), persistent=False)

        def quantize(self) -> None:
            for m in self.modules():
                if isinstance(m, Int8Linear):
                    m.quantize()

        def forward(self, tokens: Any, positions: Any, slots: Any, block_table: Any, *pools: Any) -> Any:
            angle = positions.float()[..., None] * self.inverse
            cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]  # (B, T, 1, D/2)
            reads = (block_table[:, :, None] * BLOCK + torch.arange(BLOCK, dtype=torch.int32)).reshape(-1)
            mask = (torch.arange(context) <= positions[:, :, None])[:, None, None]  # (B, 1, 1, T, S)
            flat = slots.reshape(-1).long()  # ONNX scatters by int64 only
            x = self.embedding(tokens)
            updated: list[torch.Tensor] = []
            for i, layer in enumerate(self.layers):
                x, k, v = layer(x, cos, sin, flat, reads, mask, pools[2 * i], pools[2 * i + 1])
                updated += [k, v]
            hidden = self.norm(x)
            return (self.head(hidden), hidden, *updated)

    # The operator library registers itself when this is imported.
    import torch.ao.quantization.fx._decomposed

    return Decoder()
