"""How likely a number this great is by chance: the upper tails of the chi-square and the Poisson distribution.

Both are incomplete gamma functions (Abramowitz and Stegun, 6.5 and 26.4): a series below, a continued fraction above.
"""

from __future__ import annotations

import math

_TERMS = 10_000
_TINY = 1e-300


def gamma_upper(a: float, x: float) -> float:
    """Q(a, x) = Γ(a, x) / Γ(a), of a > 0 and x ≥ 0."""
    if x <= 0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:  # the series of the lower part converges fast here
        term = total = 1 / a
        for n in range(1, _TERMS):
            term *= x / (a + n)
            total += term
            if term < total * 1e-16:
                break
        return max(0.0, 1 - scale * total)
    b = x + 1 - a  # Lentz's evaluation of the continued fraction
    c, d = 1 / _TINY, 1 / b
    fraction = d
    for n in range(1, _TERMS):
        an = -n * (n - a)
        b += 2
        d = 1 / _away_from_zero(an * d + b)
        c = _away_from_zero(b + an / c)
        fraction *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return scale * fraction


def _away_from_zero(x: float) -> float:
    return x if abs(x) > _TINY else _TINY


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(X ≥ statistic) of a chi-square variable; 1 without degrees of freedom."""
    return gamma_upper(freedom / 2, statistic / 2) if freedom > 0 else 1.0


def poisson_tail(count: int, mean: float) -> float:
    """P(N ≥ count) of a Poisson variable. Of independent rare events with that mean, it is no less than the truth."""
    if count <= 0:
        return 1.0
    return 1 - gamma_upper(count, mean) if mean > 0 else 0.0
