"""`edgec cache`: what the store holds, and making room in it."""

from __future__ import annotations

import shutil
from datetime import datetime
from typing import Annotated, Literal

import typer

from edgec.cli.options import JsonOption
from edgec.cli.out import out


def cache(
    action: Annotated[Literal["show", "prune"], typer.Argument(help="List results, or remove old ones.")] = "show",
    keep: Annotated[
        str, typer.Option("--keep", help="With prune: the most that stays, the most recently used first.")
    ] = "5 GB",
    downloads: Annotated[bool, typer.Option("--downloads", help="With prune: also remove downloads.")] = False,
    json: JsonOption = False,
) -> None:
    """Show or prune the store of finished stages."""
    out.json = json
    from edgec.errors import UsageError
    from edgec.store import Store, default_root, tree_bytes
    from edgec.units import format_bytes, parse_bytes

    store = Store(default_root())
    if action == "prune":
        try:
            limit = parse_bytes(keep)
        except ValueError as error:
            raise UsageError(f"--keep {keep}: {error}", hint="for example --keep '5 GB', or --keep 0") from error
        removed = _prune(store, int(limit))
        if downloads:
            removed += tree_bytes(store.downloads)
            shutil.rmtree(store.downloads)
        out.document({"store": str(store.root), "removed_bytes": removed})
        out.show(f"removed {format_bytes(removed)} from {store.root}")
        return
    rows = [(e.result["stage"], tree_bytes(e.path), e.path.stat().st_mtime, e.key) for e in store.entries()]
    fetched = tree_bytes(store.downloads)
    out.document(
        {
            "store": str(store.root),
            "bytes": sum(r[1] for r in rows),
            "downloads_bytes": fetched,
            "entries": [{"stage": s, "bytes": b, "used": t, "key": k} for s, b, t, k in rows],
        }
    )
    from rich.table import Table

    table = Table(title=f"{store.root}: {format_bytes(sum(r[1] for r in rows))}, downloads {format_bytes(fetched)}")
    for column in ("stage", "size", "last used", "key"):
        table.add_column(column)
    for stage, size, used, key in reversed(rows):
        table.add_row(stage, format_bytes(size), f"{datetime.fromtimestamp(used):%Y-%m-%d %H:%M}", key[:16])
    out.show(table)


def _prune(store: object, limit: int) -> int:
    """Remove the least recently used results until at most `limit` bytes are left; gives the bytes removed."""
    from edgec.store import Store, tree_bytes

    assert isinstance(store, Store)
    sized = [(entry, tree_bytes(entry.path)) for entry in store.entries()]
    total, removed = sum(size for _, size in sized), 0
    for entry, size in sized:
        if total <= limit:
            break
        with store.lock(entry.key):
            shutil.rmtree(entry.path)
        total, removed = total - size, removed + size
    for folder in ("work", "tmp"):
        for path in (store.root / folder).iterdir():
            key = path.name.partition("-")[0]
            with store.lock(key):  # waits for a build that is at it
                if path.exists():
                    removed += tree_bytes(path)
                    shutil.rmtree(path)
    return removed
