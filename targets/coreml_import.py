"""Importing coremltools, and only coremltools."""

from __future__ import annotations

import logging
import sys
from functools import cache


@cache
def import_coremltools() -> None:
    """Import coremltools without TensorFlow and without its chatter; every entry into it here calls this first.

    coremltools imports each framework that it can convert from, merely to look at its version. TensorFlow alone
    costs 0.6 GB and several seconds that way. Its warnings at import (no runtime on Linux, versions of torch newer
    than its tests) are known, and are no news to anyone.
    """
    logging.getLogger("coremltools").setLevel(logging.CRITICAL)
    if "tensorflow" in sys.modules:
        import coremltools

        return
    sys.modules["tensorflow"] = None  # type: ignore[assignment]
    try:
        import coremltools  # noqa: F401
    finally:
        del sys.modules["tensorflow"]
