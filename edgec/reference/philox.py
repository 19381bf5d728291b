"""Random numbers from a counter: Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011).

A draw depends on nothing but the request's seed and where it is drawn, so neither batch-mates nor preemption can
disturb it, and the native engine draws the same:

    key     = (seed mod 2³², seed ÷ 2³²)
    counter = (which answer, position of the token in its sequence, what the draw is for, 0)
    u       = 53 bits of the first two output words, as a fraction

A token is drawn by a number for each token of the vocabulary, which is cheaper than this: the two words are the key of
a hash (`noise`; native/src/noise.h says why a race of exponential clocks).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WORD = 0xFFFFFFFF
TOKEN, DRAFT, ACCEPT, RESIDUAL = range(4)  # what a draw is for: see sampler.py


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds over four 32-bit words."""
    a, b, c, d = counter
    low, high = key
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (right >> 32) ^ b ^ low, right & WORD, (left >> 32) ^ d ^ high, left & WORD
        low, high = (low + 0x9E3779B9) & WORD, (high + 0xBB67AE85) & WORD
    return a, b, c, d


def uniform(seed: int, answer: int, position: int, purpose: int = TOKEN) -> float:
    """A multiple of 2⁻⁵³ in [0, 1)."""
    seed &= 2**64 - 1
    first, second, _, _ = philox4x32((answer, position, purpose, 0), (seed & WORD, seed >> 32))
    return ((first >> 5) * 2**26 + (second >> 6)) / 2**53


def noise(seed: int, answer: int, position: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Independent exponentially distributed times, one of each token, with mean 1."""
    seed &= 2**64 - 1
    key = philox4x32((answer, position, TOKEN, 0), (seed & WORD, seed >> 32))
    x = tokens.astype(np.uint32) * np.uint32(0x9E3779B9)
    for word in key[:2]:
        x = x + np.uint32(word)
        x ^= x >> np.uint32(16)
        x *= np.uint32(0x21F0AAAD)
        x ^= x >> np.uint32(15)
        x *= np.uint32(0x735A2D97)
        x ^= x >> np.uint32(15)
    return -np.log1p(-(x.astype(np.float64) + 0.5) / 2**32)


def seed_of(request: int) -> int:
    """The seed of a request that gives none: its number, mixed (SplitMix64; Steele et al., 2014)."""
    mask = 2**64 - 1
    z = request * 0x9E3779B97F4A7C15 & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31
