"""The on-device runtime: the C++ core in `native/`, its host binding, and what a bundle gets of it.

`Engine` opens a bundle; `Sampling` says how to answer. They are imported when they are first asked for: modules of this
room are also used where the core is only compiled.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgec.runtime.engine import Engine, EngineOptions
    from edgec.runtime.events import Answer, Event, Request
    from edgec.runtime.sampling import Sampling

__all__ = ["Answer", "Engine", "EngineOptions", "Event", "Request", "Sampling"]

_HOMES = {
    "Engine": "engine",
    "EngineOptions": "engine",
    "Answer": "events",
    "Event": "events",
    "Request": "events",
    "Sampling": "sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(name)
    return getattr(import_module(f"edgec.runtime.{_HOMES[name]}"), name)
