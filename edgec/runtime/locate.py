"""Where a bundle's part for the runtime lies: `edgec build`'s output folder, the bundle, or its `native` folder."""

from __future__ import annotations

from pathlib import Path

from edgec.errors import Reason, UsageError

MANIFEST = "manifest.json"


def native_folder(given: Path) -> Path:
    """The folder that the core opens.

    Raises:
        UsageError: there is none in `given`; the message says what is there instead.
    """
    for folder in (given, given / "native", given / "bundle" / "native"):
        if (folder / MANIFEST).is_file():
            return folder.resolve()
    if not given.exists():
        raise UsageError(f"there is no bundle at {given}", hint=_HINT, reason=Reason.SOURCE_NOT_FOUND)
    others = [p for p in (given, given / "bundle") if (p / "bundle.json").is_file()]
    if others:
        targets = sorted(p.name for p in others[-1].iterdir() if p.is_dir())
        raise UsageError(
            f"{given} was built for {', '.join(targets) or 'no target'}, not for the target `native`",
            hint="add `native: {}` to the recipe's targets and build it again",
        )
    raise UsageError(f"{given} is no bundle for the runtime: it has no {MANIFEST}", hint=_HINT)


def bundle_name(native: Path) -> str:
    """The recipe's name, by which the bundle goes as a model; the folder's when there is no bundle around it."""
    import json

    for folder, key in ((native, MANIFEST), (native.parent, "bundle.json")):
        try:
            name = json.loads((folder / key).read_bytes()).get("name")
        except (OSError, ValueError, AttributeError, RecursionError):
            continue
        if isinstance(name, str) and name:
            return name
    names = [p.name for p in (native, *native.parents) if p.name not in ("native", "bundle", "")]
    return names[0] if names else "edgec"


_HINT = "give the output folder of `edgec build`, or its bundle/native"
