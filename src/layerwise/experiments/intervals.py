"""Intervals over few seeds, without SciPy: of a mean (Student's t) and of a share (Clopper and Pearson)."""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import cache

LEVEL = 0.95


def mean_interval(
    values: Sequence[float | int],
    level: float = LEVEL,
    span: tuple[float | int, float | int] = (-math.inf, math.inf),
) -> tuple[float, float] | None:
    """``x̄ ± t_{ν, (1+level)/2} s / √n`` with ``ν = n − 1``; None for fewer than two values or values not finite.

    A mean of values in `span` lies in `span`, so the interval is cut to it: what is cut off cannot be the mean, and the
    interval covers it as often as before.

    >>> low, high = mean_interval([1.0, 2.0, 3.0])
    >>> print(f"{low:.3f} {high:.3f}")
    -0.484 4.484
    >>> mean_interval([1.0, 2.0, 3.0], span=(0, math.inf))[0]
    0.0
    """
    n = len(values)
    if n < 2 or not all(math.isfinite(x) for x in values):
        return None
    mean = statistics.fmean(values)
    half = student_quantile(n - 1, level) * statistics.stdev(values) / math.sqrt(n)
    # A value outside its span is an error of whoever declared the span: it is shown, not hidden.
    low, high = min(span[0], *values), max(span[1], *values)
    return float(max(mean - half, low)), float(min(mean + half, high))


def share_interval(held: int, n: int, level: float = LEVEL) -> tuple[float, float]:
    """The interval of a share of which `held` of `n` draws were seen: exact, and inside [0, 1].

    The lower end is the share at which `held` or more would be seen with probability ``(1 − level)/2``, the upper end
    that at which `held` or fewer would.

    Reference: Clopper and Pearson, Biometrika 26 (1934).

    >>> print("{:.3f} {:.3f}".format(*share_interval(7, 8)))
    0.473 0.997
    """
    tail = (1 - level) / 2
    low = 0.0 if held == 0 else _root(lambda p: at_most(held - 1, n, p) - (1 - tail))
    high = 1.0 if held == n else _root(lambda p: at_most(held, n, p) - tail)
    return low, high


def at_most(k: int, n: int, p: float) -> float:
    """The probability of at most k of n, where each comes with probability p.

    >>> round(at_most(1, 2, 0.75), 4)
    0.4375
    """
    return math.fsum(math.comb(n, j) * p**j * (1 - p) ** (n - j) for j in range(k + 1))


def _root(decreasing: Callable[[float], float]) -> float:
    """Where a decreasing function on [0, 1] changes sign, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if decreasing(middle) > 0 else (low, middle)
    return (low + high) / 2


def student_probability(t: float, nu: int) -> float:
    """``P(|T| ≤ t)`` for ν degrees of freedom, a finite sum in ``θ = arctan(t/√ν)``.

    Reference: Abramowitz and Stegun 26.7.3 (ν odd) and 26.7.4 (ν even).

    >>> round(student_probability(1.0, 1), 6)
    0.5
    """
    theta = math.atan(t / math.sqrt(nu))
    sine, cosine = math.sin(theta), math.cos(theta)
    term = cosine if nu % 2 else 1.0
    total = term if nu > 1 else 0.0
    for j in range(3 if nu % 2 else 2, nu - 1, 2):
        term *= cosine**2 * (j - 1) / j
        total += term
    return 2 / math.pi * (theta + sine * total) if nu % 2 else sine * total


@cache  # of many seeds it takes a sum as long, and every claim of a run asks for the same one
def student_quantile(nu: int, level: float = LEVEL) -> float:
    """The t with ``P(|T| ≤ t) = level``, by bisection.

    >>> round(student_quantile(4), 4)
    2.7764
    """
    low, high = 0.0, 1.0
    while student_probability(high, nu) < level:
        low, high = high, 2 * high
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return middle
        low, high = (middle, high) if student_probability(middle, nu) < level else (low, middle)
