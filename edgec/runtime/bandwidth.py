"""How fast this machine reads memory: the bound on decoding, which reads every weight once a step."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_BYTES = 256 << 20  # well beyond any cache
_CHUNK = 1 << 20


def read_bandwidth(threads: int, *, size: int = _BYTES, repeats: int = 5) -> float:
    """Bytes a second that `threads` threads read together, the median of `repeats` passes over `size` bytes.

    NumPy's `bitwise_or.reduce` is a vector loop with nothing to compute, and runs without Python's lock. It was the
    fastest of its reductions.
    """
    import numpy as np

    words = np.ones(size // 8, np.uint64)
    per = -(-len(words) // threads)
    parts = [words[i * per : (i + 1) * per] for i in range(threads)]

    def read(part: NDArray[np.uint64]) -> int:
        return int(np.bitwise_or.reduce(part))

    rates = []
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, parts))  # pages are there, threads are up
        for _ in range(repeats):
            start = time.perf_counter()
            list(pool.map(read, parts))
            rates.append(words.nbytes / (time.perf_counter() - start))
    return statistics.median(rates)
