"""Build an architecture by calling a Python factory: `models/net.py:make` or `package.module:make`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgec.errors import Reason, RecipeError
from edgec.registry import suggest

if TYPE_CHECKING:
    import torch


def find_factory(reference: str, recipe_dir: Path) -> Callable[..., Any]:
    """The function that `file.py:function` (relative to the recipe) or `package.module:function` names.

    Raises:
        RecipeError: there is no such file, module or function, or importing it fails.
    """
    where, _, name = reference.partition(":")
    try:
        module = _load_file(recipe_dir / where) if where.endswith(".py") else importlib.import_module(where)
    except Exception as cause:
        raise RecipeError(
            f"factory `{reference}` can't be imported: {type(cause).__name__}: {cause}",
            hint=f"paths are relative to {recipe_dir}" if where.endswith(".py") else "is its package installed?",
        ) from cause
    try:
        found = reduce(getattr, name.split("."), module)
    except AttributeError as cause:
        known = [n for n in vars(module) if not n.startswith("_")]
        raise RecipeError(f"{where} has no `{name}`{suggest(name, known)}") from cause
    if not callable(found):
        raise RecipeError(f"factory `{reference}` is a {type(found).__name__}, which can't be called")
    function: Callable[..., Any] = found
    return function


def _load_file(path: Path) -> Any:
    """Import a file under a name of its own, with its folder importable while it loads."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    name = f"edgec_factory_{path.stem}_{abs(hash(path.resolve())):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and torch.export look the module up by name
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(path.parent))
    return module


def build(reference: str, args: dict[str, Any], recipe_dir: Path) -> torch.nn.Module:
    """Call the factory; what it gives must be a module.

    Raises:
        RecipeError: the factory can't be found, refuses its arguments, fails, or gives something else.
    """
    import torch

    make = find_factory(reference, recipe_dir)
    try:
        module = make(**args)
    except Exception as cause:
        told = ", ".join(f"{k}={v!r}" for k, v in args.items())
        raise RecipeError(
            f"factory {reference}({told}) failed: {type(cause).__name__}: {cause}",
            hint="see `args` of the model section",
        ) from cause
    if not isinstance(module, torch.nn.Module):
        raise RecipeError(
            f"factory `{reference}` gave a {type(module).__name__}, not a torch.nn.Module", reason=Reason.BAD_RECIPE
        )
    return module
