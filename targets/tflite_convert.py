"""ExportedProgram → .tflite bytes, through litert-torch (no TensorFlow involved).

One file holds all signatures. litert-torch shares a constant between signatures when they hold it in the same storage,
so equal weights of separately saved programs are made one first. Measured on a Llama of 30 layers and two signatures:
85 s and 3.7 GB, of which nine tenths are torch's decompositions, linear in the number of layers.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgec.errors import ConversionError, Reason

if TYPE_CHECKING:
    import torch

    from edgec.model import Program, Signature

_NO_LOWERING = re.compile(r"Lowering not found: (?P<op>\S+)")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in \S+(?:\n\s*(?P<code>[^\n]+))?')
_HINT = "leave that part in float or out of the exported module, rewrite the line, or build the other targets"


def load_modules(program: Program) -> dict[str, tuple[torch.fx.GraphModule, tuple[torch.Tensor, ...]]]:
    """Each signature's graph and example inputs; equal weights of different signatures are one tensor."""
    modules = {}
    seen: dict[tuple[str, tuple[int, ...], bytes], torch.Tensor] = {}
    for signature in program.signatures:
        exported = program.exported(signature.name)
        module = exported.module(check_guards=False)
        share_weights(module, seen)
        modules[signature.name] = (module, exported.example_inputs[0])
    return modules


def share_weights(module: torch.nn.Module, seen: dict[tuple[str, tuple[int, ...], bytes], torch.Tensor]) -> None:
    """Replace each parameter and buffer by the equal one in `seen`, which those that are new join."""
    import torch

    for owner in module.modules():
        for table in (owner._parameters, owner._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
                key = (str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(raw.data).digest())
                table[name] = seen.setdefault(key, tensor)  # type: ignore[assignment]


def to_flatbuffer(
    modules: dict[str, tuple[torch.fx.GraphModule, tuple[torch.Tensor, ...]]],
    signatures: tuple[Signature, ...],
    *,
    static_int8: bool,
    channels_last: frozenset[str] = frozenset(),
) -> bytes:
    """Convert all signatures into one file.

    Args:
        modules: from `load_modules`.
        signatures: of the Program, in the order that the file will have.
        static_int8: the graphs hold quantize and dequantize nodes around activations.
        channels_last: names of inputs that the file takes as (batch, height, width, channels).

    Raises:
        ConversionError: an operation has no TFLite form (names it and the user's line), or the converter failed.
    """
    import litert_torch
    from litert_torch.quantize.pt2e_quantizer import PT2EQuantizer, get_symmetric_quantization_config
    from litert_torch.quantize.quant_config import QuantConfig

    from edgec.graphs import dynamic_shapes

    config = None
    if static_int8:
        # Only tells the converter that the graph's scales are static; the scales themselves are in the graph.
        static = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=False)
        config = QuantConfig(pt2e_quantizer=PT2EQuantizer().set_global(static))
    converter: Any = litert_torch
    for signature in signatures:
        module, example = modules[signature.name]
        wrapped: torch.nn.Module = module
        positions = [i for i, t in enumerate(signature.inputs) if t.name in channels_last]
        if positions:
            wrapped = litert_torch.to_channel_last_io(module, args=positions)
            example = tuple(
                x.movedim(1, -1).contiguous() if i in positions else x for i, x in enumerate(example)
            )  # NCHW → NHWC
        wrapped.requires_grad_(False)  # the decomposition of batch_norm refuses statistics that want gradients
        wrapped.training = False  # captured graphs have no `eval()`; litert-torch warns of the flag
        converter = converter.signature(signature.name, wrapped, example, dynamic_shapes=dynamic_shapes(signature))
    with _translated(modules, signatures), contextlib.redirect_stdout(io.StringIO()):
        # Lightweight: constants are handed over as they lie in memory, which halves the peak.
        edge = converter.convert(quant_config=config, lightweight_conversion=config is None)
        content: bytes = edge.model_content()
    return content


@contextlib.contextmanager
def _translated(modules: dict[str, Any], signatures: tuple[Signature, ...]) -> Iterator[None]:
    """Turn the converter's errors into ours."""
    try:
        yield
    except ConversionError:
        raise
    except Exception as error:  # the converter raises RuntimeError, ValueError and MLIR's own
        dynamic = [name for s in signatures for name, _, _ in s.dynamic]
        raise blame(error, [module for module, _ in modules.values()], dynamic) from error


def blame(error: Exception, graphs: list[torch.fx.GraphModule], dynamic: list[str]) -> ConversionError:
    """The error for a failed conversion: which op, at which line of the user's, and what to do."""
    text = str(error)
    missing = _NO_LOWERING.search(text)
    if missing is None:
        # MLIR's diagnostics begin with the location that torch recorded: `…/model.py:240:0: error: …`.
        located = re.search(r"(?P<file>[^\s:]+\.py):(?P<line>\d+):\d+: error: (?P<what>[^\n]+)", text)
        if located:
            where = f"{Path(located['file']).name}:{located['line']}"
            return ConversionError(f"tflite: {where}: {located['what'][:300]}", hint=_HINT)
        if dynamic:
            # A size of −2⁶³ in the message is how jax prints one that is not known.
            sizes = ", ".join(f"`{d}`" for d in dynamic)
            return ConversionError(
                f"tflite: litert-torch can't convert this model with the dynamic dimension {sizes}",
                hint="give TFLite a fixed size: remove `dynamic` from `export`, or build the other targets only",
                reason=Reason.UNSUPPORTED_SCHEME,
            )
        first = next(iter(text.strip().splitlines()), type(error).__name__)
        return ConversionError(
            f"tflite: litert-torch failed: {first[:300]}",
            hint="run with --debug for the converter's own traceback",
        )
    op = missing["op"]
    line = _line_in(text) or next((found for g in graphs if (found := _line_of(g, op))), "")
    where = f" at {line}" if line else ""
    return ConversionError(f"tflite: {op}{where} has no TFLite operator", hint=_HINT, reason=Reason.UNSUPPORTED_OP)


def _line_in(text: str) -> str:
    """The user's own innermost line among the frames that litert-torch quotes."""
    frames = [f for f in _FRAME.finditer(text) if "site-packages" not in f["file"]]
    if not frames:
        return ""
    last = frames[-1]
    code = f" ({last['code'].strip()})" if last["code"] else ""
    return f"{Path(last['file']).name}:{last['line']}{code}"


def _line_of(graph: torch.fx.GraphModule, op: str) -> str:
    from edgec.blame import source_line

    return next((source_line(n) for n in graph.graph.nodes if str(n.target) == op), "")
