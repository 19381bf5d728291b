"""The aarch64 library, run here: TVM's own runtime for Arm under qemu-user."""

from __future__ import annotations

import shutil

QEMU = "qemu-aarch64-static"


def qemu() -> str | None:
    return shutil.which(QEMU) or shutil.which("qemu-aarch64")
