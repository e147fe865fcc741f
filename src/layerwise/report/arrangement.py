"""What a panel shows, before it is drawn: which points an axis has a place for, where bars stand, where axes end.

The drawing inside a page (`plots`) and the files for papers (`drawing`) both start from here, so they show the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from layerwise.experiments.figures import Curve, Panel
from layerwise.report.palette import Look

_DECADES, _BEYOND = 8, 3
"""A logarithmic axis of more than 8 decades ends 3 decades beyond 96 % of the points."""
SPARSE = 24
"""Curves with more points than this carry a marker at some of them only."""


@dataclass(frozen=True)
class Shown:
    """A curve as numbers, with NaN where an axis has no place for one."""

    curve: Curve
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None
    high: np.ndarray | None
    shift: float = 0.0
    """For bars: from x to the middle of the bar."""
    width: float = 0.8
    """For bars."""


@dataclass(frozen=True)
class Arrangement:
    """A panel, ready to be drawn."""

    curves: tuple[Shown, ...]
    """Those with at least one point that has a place."""
    names: tuple[str, ...]
    """What stands at x = 0, 1, 2, … where x is no number."""
    limits: Mapping[str, tuple[float, float] | None]
    """Ends of the axes "x" and "y" where they are not those of the points."""
    notes: tuple[str, ...]
    """What is not shown, a sentence each."""


def arrange(panel: Panel) -> Arrangement:
    """Decide what of a panel is shown and where."""
    limits, notes = {}, []
    for axis in "xy":
        limits[axis], note = _limit(panel, axis)
        notes += [note] if note else []
    bars = [curve for curve in panel.curves if curve.style == "bars"]
    shared = len({value for curve in bars for value in curve.x}) < sum(len(curve.x) for curve in bars)
    group = len(bars) if shared else 1  # bars stand side by side only where two have one place
    place_of_bars = {id(curve): place for place, curve in enumerate(bars)} if shared else {}
    curves = []
    for curve in panel.curves:
        x, y = shown(curve.x, panel.x_scale), shown(curve.y, panel.y_scale)
        if len(x) != len(y):
            raise ValueError(f"curve {curve.label!r} has {len(x)} numbers in x and {len(y)} in y")
        missing = int(np.sum(np.isnan(x) | np.isnan(y)))
        if missing or not len(x):
            notes.append(_left_out(curve.label, missing, len(x), "log" in (panel.x_scale, panel.y_scale)))
        if missing == len(x):
            continue
        low = high = None
        if curve.low is not None and curve.high is not None:
            low, high = shown(curve.low, panel.y_scale), shown(curve.high, panel.y_scale)
        place = place_of_bars.get(id(curve), 0)
        width = _bar_width(x, group)
        curves.append(Shown(curve, x, y, low, high, (place - (group - 1) / 2) * width, 0.92 * width))
    one_each = not shared and all(c.style == "bars" and list(c.x) == [k] for k, c in enumerate(panel.curves))
    names = panel.places or ([curve.label for curve in panel.curves] if one_each else ())
    return Arrangement(tuple(curves), tuple(names) if curves else (), limits, tuple(notes))


def shown(values: Sequence[float | int | None], scale: str) -> np.ndarray:
    """The values, with NaN where the axis has no place for them.

    >>> shown([1, 0, None, float("inf")], "log").tolist()
    [1.0, nan, nan, nan]
    """
    array = np.array([np.nan if value is None else value for value in values], dtype=float)
    array[~np.isfinite(array)] = np.nan
    if scale == "log":
        array[array <= 0] = np.nan
    return array


def bar_shade(look: Look) -> float:
    """Bars have no dash, so an algorithm's second one is paler.

    >>> bar_shade(Look("blue", "o"))
    1.0
    """
    return 1.0 if look.dash == "solid" else 0.55


def _bar_width(x: np.ndarray, group: int) -> float:
    steps = np.diff(np.unique(x[np.isfinite(x)]))
    return 0.8 * (float(steps.min()) if len(steps) else 1.0) / group


def _limit(panel: Panel, axis: str) -> tuple[tuple[float, float] | None, str]:
    """Keep a long logarithmic axis to where nearly all points are, so that a run that explodes hides no other."""
    scale = panel.x_scale if axis == "x" else panel.y_scale
    values = [shown(getattr(curve, axis), scale) for curve in panel.curves]
    decades = np.log10(np.concatenate(values)) if values and scale == "log" else np.zeros(1)
    decades = decades[np.isfinite(decades)]
    if not len(decades) or np.ptp(decades) <= _DECADES:
        return None, ""
    low, high = np.clip(np.quantile(decades, [0.02, 0.98]) + _BEYOND * np.array([-1, 1]), -200, 200)
    low, high = max(low, decades.min() - 0.5), min(high, decades.max() + 0.5)
    beyond = int(np.sum((decades < low) | (decades > high)))
    if not beyond:
        return None, ""
    note = f"{beyond} {'point lies' if beyond == 1 else 'points lie'} beyond the ends of the {axis} axis."
    return (float(10.0**low), float(10.0**high)), note


def _left_out(label: str, missing: int, count: int, log: bool) -> str:
    if not count:
        return f"{label}: no points recorded."
    why = "not finite, or not above zero on a logarithmic axis" if log else "not finite"
    return f"{label}: {missing} of {count} points not shown ({why})."
