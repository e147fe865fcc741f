"""Student's t: the interval of a mean over few seeds, without SciPy."""

import math
import statistics
from collections.abc import Sequence

LEVEL = 0.95


def mean_interval(values: Sequence[float | int], level: float = LEVEL) -> tuple[float, float] | None:
    """``x̄ ± t_{ν, (1+level)/2} s / √n`` with ``ν = n − 1``; None for fewer than two values or values not finite.

    >>> low, high = mean_interval([1.0, 2.0, 3.0])
    >>> print(f"{low:.3f} {high:.3f}")
    -0.484 4.484
    """
    n = len(values)
    if n < 2 or not all(math.isfinite(x) for x in values):
        return None
    mean = statistics.fmean(values)
    half = student_quantile(n - 1, level) * statistics.stdev(values) / math.sqrt(n)
    return mean - half, mean + half


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
