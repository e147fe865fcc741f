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
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:.3g}"))
        axis.set_minor_locator(ticker.NullLocator())
        return
    axis.set_major_locator(ticker.LogLocator(numticks=8))
    plain = bool(low > 5e-3 and high < 2e4)  # one way of writing along one axis
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: decade(value, plain)))
    axis.set_minor_formatter(ticker.NullFormatter())
    if span > 3.5:  # small ticks would stand too close to be told apart, and each costs time
        axis.set_minor_locator(ticker.NullLocator())
