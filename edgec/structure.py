"""What a pass changed about an architecture, as JSON, so that the factory's module can be brought to the same form.

Pruning leaves narrower layers and fewer of them. A checkpoint holds tensors, not classes: to load it, the architecture
is built as ever and `apply` then cuts it to the shapes that `describe` saw. Nothing is pickled.

The description lists every submodule by its path with its whole-number attributes (`in_channels`, `num_heads`,
`normalized_shape`, …) and the shapes of its own tensors. Weights aren't kept: the checkpoint fills them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgec.errors import Reason, SourceError

if TYPE_CHECKING:
    from torch import nn

Description = dict[str, dict[str, Any]]


def describe(module: nn.Module) -> Description:
    """Path → `{"numbers": …, "shapes": …, "identity": True}`; keys without content are left out."""
    return {path: _describe_one(part) for path, part in module.named_modules()}


def _describe_one(part: nn.Module) -> dict[str, Any]:
    from torch import nn

    found: dict[str, Any] = {}
    if type(part) is nn.Identity:
        found["identity"] = True
    if numbers := {name: _plain(value) for name, value in vars(part).items() if _is_number(value)}:
        found["numbers"] = numbers
    tensors = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
    if shapes := {name: list(tensor.shape) for name, tensor in tensors}:
        found["shapes"] = shapes
    return found


def _is_number(value: object) -> bool:
    if isinstance(value, tuple):
        return len(value) > 0 and all(_is_number(v) for v in value)
    return isinstance(value, int) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def apply(module: nn.Module, description: Description | None) -> None:
    """Bring a freshly built module to the described form, in place; weights whose shape changes become empty.

    Raises:
        SourceError: the architecture lacks a described part, or has a table that can't be made again in its new size.
    """
    if description is None:
        return
    _remove_parts(module, description)
    # Tied weights stay tied: one new one for each old one, which is kept so that no other object gets its id.
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for path, part in module.named_modules():
        wanted = description[path]
        for name, value in wanted.get("numbers", {}).items():
            current = getattr(part, name, None)
            if current is not None and _plain(current) != value:
                setattr(part, name, tuple(value) if isinstance(value, list) else value)
        for name, shape in wanted.get("shapes", {}).items():
            _resize(part, path, name, tuple(shape), replaced)


def _remove_parts(module: nn.Module, description: Description) -> None:
    """Delete submodules that aren't described, and put Identity where it is described instead of a layer."""
    from torch import nn

    for path in [p for p, _ in module.named_modules() if p]:
        parent_path, _, name = path.rpartition(".")
        try:
            parent = module.get_submodule(parent_path)
        except AttributeError:
            continue  # it went with its parent
        if name not in dict(parent.named_children()):
            continue
        if path not in description:
            delattr(parent, name)
        elif description[path].get("identity") and type(parent.get_submodule(name)) is not nn.Identity:
            setattr(parent, name, nn.Identity())
    missing = sorted(set(description) - {path for path, _ in module.named_modules()})
    if missing:
        raise SourceError(
            f"the architecture has no `{missing[0]}`, which the model has",
            hint="was the factory changed since? build again with --force",
            reason=Reason.BAD_CHECKPOINT,
        )


def _resize(
    part: nn.Module,
    path: str,
    name: str,
    shape: tuple[int, ...],
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]],
) -> None:
    import torch
    from torch import nn

    current = getattr(part, name, None)
    if not isinstance(current, torch.Tensor) or tuple(current.shape) == shape:
        return
    if isinstance(current, nn.Parameter):
        if id(current) not in replaced:
            empty = torch.zeros(shape, dtype=current.dtype)
            replaced[id(current)] = current, nn.Parameter(empty, requires_grad=current.requires_grad)
        setattr(part, name, replaced[id(current)][1])
        return
    if name in part._non_persistent_buffers_set:
        raise SourceError(
            f"`{path}.{name}` is {tuple(current.shape)} in the architecture and {shape} in the model; no file holds it",
            hint="register the buffer as persistent, or leave that part out of pruning",
            reason=Reason.BAD_CHECKPOINT,
        )
    part.register_buffer(name, torch.zeros(shape, dtype=current.dtype))
