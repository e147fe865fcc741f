"""Numbers along an axis, in plain letters: 10⁻³ rather than a formula, so that they read in any font."""

import math
from typing import Any

from layerwise.report.optional import require

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def power_of_ten(exponent: int) -> str:
    """A decade as a power, in plain letters.

    >>> power_of_ten(-12), power_of_ten(0)
    ('10⁻¹²', '1')
    """
    return "10" + str(exponent).translate(_RAISED) if exponent else "1"


def decade(value: float, plain: bool) -> str:
    """The label of a tick on a logarithmic axis, as a number (`plain`) or as a power; empty between decades.

    >>> decade(0.01, plain=True), decade(0.01, plain=False), decade(0.02, plain=True)
    ('0.01', '10⁻²', '')
    """
    if not value > 0:
        return ""
    exponent = round(math.log10(value))
    if not math.isclose(value, 10.0**exponent, rel_tol=1e-6):
        return ""
    return f"{value:g}" if plain else power_of_ten(exponent)


def places(low: float, high: float, scale: str, most: int = 6) -> list[tuple[float, str]]:
    """Round values between two ends of an axis, at most so many, with their labels.

    >>> places(0.0, 1.0, "linear")
    [(0.0, '0'), (0.2, '0.2'), (0.4, '0.4'), (0.6, '0.6'), (0.8, '0.8'), (1.0, '1')]
    >>> places(1e-4, 1.0, "log")
    [(0.0001, '10⁻⁴'), (0.001, '10⁻³'), (0.01, '10⁻²'), (0.1, '10⁻¹'), (1.0, '1')]
    """
    return _log_places(low, high, most) if scale == "log" else _linear_places(low, high, most)


def _digits(value: float) -> str:
    """A number of an axis of few decades.

    >>> _digits(0.075), _digits(2000.0), _digits(3e-7)
    ('0.075', '2000', '3e-07')
    """
    return f"{value:.0f}" if 1000 <= value < 1e6 else f"{value:.3g}"


def _linear_places(low: float, high: float, most: int) -> list[tuple[float, str]]:
    size = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(size * k for k in (1, 2, 2.5, 5, 10, 20) if (high - low) / (size * k) <= most - 0.9)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    values = [round(k * step, 12 - math.floor(math.log10(step))) for k in range(first, last + 1)]
    largest = max((abs(value) for value in values), default=0.0)
    digits = max(4, math.ceil(math.log10(largest / step)) + 2) if largest else 4  # neighbours differ
    if largest >= 1e5 or 0 < largest < 1e-3:  # zeros would have to be counted
        power = math.floor(math.log10(largest))
        factor = 10.0**power
        return [(v, f"{v / factor:.{digits}g}×{power_of_ten(power)}".replace("-", "−") if v else "0") for v in values]
    return [(value, f"{value:.{digits + 2}g}".replace("-", "−")) for value in values]


def _log_places(low: float, high: float, most: int) -> list[tuple[float, str]]:
    span = math.log10(high / low) if low else math.log10(high) - math.log10(low)
    decades = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
    if span < 1.5:  # too few decades to read a value from
        digits = (1, 2, 5) if span > 0.6 else (1, 1.5, 2, 3, 4, 5, 6, 8)
        tried = (k * 10.0**e for e in range(decades.start - 1, decades.stop + 1) for k in digits)
        values = [value for value in tried if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
        if len(values) >= 2:
            return [(value, _digits(value)) for value in values]
        return _linear_places(low, high, 4)
    stride = math.ceil(len(decades) / most)
    kept = [e for e in decades if e % stride == 0]
    plain = bool(low > 5e-3 and high < 2e4)  # one way of writing along one axis
    return [(10.0**e, decade(10.0**e, plain)) for e in kept]


def set_ticks(axis: Any, scale: str) -> None:
    """Choose ticks and their labels once the limits are known."""
    ticker = require("matplotlib.ticker")
    if scale != "log":
        axis.set_major_locator(ticker.MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
        axis.get_major_formatter().set_powerlimits((-4, 5))
        return
    low, high = sorted(axis.get_view_interval())
    span = math.log10(high) - math.log10(low)
    if span < 1.5:  # too few decades to read a value from: 1, 2, 5 get numbers
        axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0) if span > 0.6 else "all", numticks=12))
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: _digits(value)))
        axis.set_minor_locator(ticker.NullLocator())
        return
    axis.set_major_locator(ticker.LogLocator(numticks=8))
    plain = bool(low > 5e-3 and high < 2e4)  # one way of writing along one axis
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: decade(value, plain)))
    axis.set_minor_formatter(ticker.NullFormatter())
    if span > 3.5:  # small ticks would stand too close to be told apart, and each costs time
        axis.set_minor_locator(ticker.NullLocator())
