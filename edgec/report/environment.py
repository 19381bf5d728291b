"""What machine and what tools made a result."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from edgec.stagekey import FALLBACK_LIBRARIES, LIBRARIES, installed_version


def environment(threads: int) -> dict[str, str]:
    """Platform, processor, cores, memory and threads, as text."""
    import psutil

    return {
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "threads": str(threads),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def tools() -> dict[str, str]:
    """Version of every library that can change a result, of those installed."""
    found = {}
    for name in sorted({*FALLBACK_LIBRARIES, *(n for names in LIBRARIES.values() for n in names), "numpy"}):
        if installed := installed_version(name):
            found[name] = installed
    return found
