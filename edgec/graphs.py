"""Torch graphs: capture one signature, load it back, fold quantised weights to INT8 constants, count weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgec.errors import StoreError

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

    from edgec.model import Signature


def register_quantized_ops() -> None:
    """Define `torch.ops.quantized_decomposed.*`, which graphs of quantised models call."""
    import torch.ao.quantization.fx._decomposed  # noqa: F401


def dynamic_shapes(signature: Signature) -> tuple[dict[int, Any], ...] | None:
    """torch.export's `dynamic_shapes` for a signature's inputs, or None when every size is fixed.

    A dimension's greatest size is given as it is; a least size of 0 or 1 is given as it is, too, since torch takes
    that as "may be 1" and does not specialise on it.
    """
    from torch.export import Dim

    if not signature.dynamic:
        return None
    dims = {name: Dim(name, min=least, max=greatest) for name, least, greatest in signature.dynamic}
    return tuple({axis: dims[d] for axis, d in enumerate(t.shape) if isinstance(d, str)} for t in signature.inputs)


def capture(module: torch.nn.Module, example: tuple[torch.Tensor, ...], signature: Signature) -> ExportedProgram:
    """The ExportedProgram of `module`'s forward at the signature's shapes.

    Raises:
        ConversionError: the forward can't be captured; the message has the user's source line.
    """
    import torch

    from edgec.blame import blame_capture

    register_quantized_ops()
    try:
        return torch.export.export(module, example, dynamic_shapes=dynamic_shapes(signature), strict=False)
    except Exception as error:  # torch.export raises whatever the user's forward raises
        raise blame_capture(signature.name, error) from error


def capture_batch(module: torch.nn.Module, example: tuple[torch.Tensor, ...], signature: Signature) -> ExportedProgram:
    """As `capture`, but with a free batch size (axis 0 of all inputs) where the module allows it.

    Calibration and training then run batches of any size; the export fixes the size again.
    """
    import torch
    from torch.export import Dim

    if not signature.dynamic and all(t.dim() > 0 for t in example):
        # Two samples: torch.export takes a size of one for a constant.
        pair = tuple(torch.cat([t, t]) for t in example)
        try:
            return torch.export.export(module, pair, dynamic_shapes=tuple({0: Dim.AUTO} for _ in example))
        except Exception:  # noqa: BLE001 -- whatever the forward raises at another size; `capture` reports at its own
            return capture(module, example, signature)
    return capture(module, example, signature)


def free_batch(module: torch.fx.GraphModule) -> bool:
    """Whether a captured graph takes any batch size (axis 0 of all inputs), as `capture_batch` makes them."""
    import torch

    inputs = [n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"]
    sizes = [t.shape[0] if isinstance(t, torch.Tensor) and t.dim() else None for t in inputs]
    if not sizes or not all(isinstance(s, torch.SymInt) for s in sizes):
        return False
    return all(s.node.shape_env.bound_sympy(s.node.expr).upper > 2**30 for s in sizes)  # type: ignore[union-attr]


def settle(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Make `train` and `eval` of a captured graph harmless: it is in evaluation mode for good, and would raise."""

    def stay(mode: bool = True) -> torch.fx.GraphModule:
        return module

    module.train = module.eval = stay  # type: ignore[method-assign]
    return module


def fold(program: ExportedProgram) -> ExportedProgram:
    """The same program with each `weight → quantize` replaced by an INT8 constant, and the float weight dropped."""
    import torch
    from torchao.quantization.pt2e.constant_fold import constant_fold
    from torchao.quantization.pt2e.quantize_pt2e import _quant_node_constraint

    graphs = program.graph.nodes
    if not any(_quant_node_constraint(n) and n.all_input_nodes[0].op == "placeholder" for n in graphs):
        return program  # nothing to fold: a float or a weight-only program
    module = program.module(check_guards=False)
    constant_fold(module, _quant_node_constraint)
    drop_unused_state(module)
    args, kwargs = program.example_inputs
    with torch.no_grad():
        return torch.export.export(module, args, kwargs, dynamic_shapes=_shapes_of(program), strict=False)


def drop_unused_state(module: torch.fx.GraphModule) -> None:
    """Delete parameters and buffers that no node reads: a folded weight's float original, above all."""
    used = {str(n.target) for n in module.graph.nodes if n.op == "get_attr"}
    for name, _ in [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]:
        if name not in used:
            owner, _, leaf = name.rpartition(".")
            delattr(module.get_submodule(owner), leaf)


def _shapes_of(program: ExportedProgram) -> tuple[dict[int, Any], ...] | None:
    """The dynamic dimensions that a program was captured with, as torch.export takes them."""
    import torch
    from torch.export import Dim

    users = set(program.graph_signature.user_inputs)
    shapes: list[dict[int, Any]] = []
    dims: dict[str, Any] = {}
    for node in program.graph.nodes:
        if node.op != "placeholder" or node.name not in users:
            continue
        axes: dict[int, Any] = {}
        for axis, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt):
                symbol = size.node.expr
                bounds = program.range_constraints[symbol]
                name = f"d{len(dims)}"
                dims.setdefault(str(symbol), Dim(name, min=int(bounds.lower), max=int(bounds.upper)))
                axes[axis] = dims[str(symbol)]
        shapes.append(axes)
    return tuple(shapes) if dims else None


def save_exported(program: ExportedProgram, path: Path) -> None:
    """Write a .pt2 whose bytes follow from the program alone.

    torch notes in `from_node` which graph a node was copied from, by the address that graph had in memory.
    """
    import torch

    for node in program.graph.nodes:
        node.meta.pop("from_node", None)
    torch.export.save(program, path)


def load_exported(path: Path, *, folded: bool) -> ExportedProgram:
    """Load a .pt2 that `export_program` wrote; `folded` gives INT8 constants in place of `weight → quantize`.

    Raises:
        StoreError: the file is missing, cut short, or not a .pt2.
    """
    import torch

    register_quantized_ops()
    try:
        program = torch.export.load(path)
    except Exception as error:  # torch's reader raises zip, JSON and runtime errors alike
        raise StoreError(
            f"{path} can't be read as an exported program: {error}".splitlines()[0], hint="delete it and build again"
        ) from error
    return fold(program) if folded else program


def count_parameters(module: torch.nn.Module) -> int:
    """Weights: tied ones once, INT8 ones too; not scales, zero points, running statistics or position tables.

    A weight is a parameter, or a persistent INT8 buffer (what a quantised layer keeps instead of one).
    """
    import torch

    seen: dict[int, int] = {}
    for _, tensor in [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]:
        if isinstance(tensor, torch.nn.Parameter) or tensor.dtype == torch.int8:
            seen.setdefault(tensor.data_ptr() or id(tensor), tensor.numel())
    return sum(seen.values())
