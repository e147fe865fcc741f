"""Panels drawn with matplotlib: what a `Panel` declares becomes lines, bands, points or bars on a pair of axes.

Nothing here is kept between calls: figures are made without pyplot, and settings hold inside `style()` alone.
"""

import contextlib
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from layerwise.experiments.figures import Curve, Panel
from layerwise.report.optional import require
from layerwise.report.palette import HUES, THEORY, Look
from layerwise.report.ticks import set_ticks

INK, MUTED, GRID = HUES["ink"][0], "#59636e", "#d9dee3"
_DECADES, _BEYOND = 8, 3
"""A logarithmic axis of more than 8 decades ends 3 decades beyond 96 % of the points."""
_SPARSE = 24
"""Curves with more points than this carry a marker at some of them only."""


@contextlib.contextmanager
def style(*, text: bool) -> Iterator[None]:
    """Settings of a drawing, put back afterwards; letters stay letters (`text`) or become outlines."""
    matplotlib = require("matplotlib")
    settings = {
        "svg.fonttype": "none" if text else "path",
        "svg.hashsalt": "layerwise",  # the same drawing gives the same file
        "pdf.fonttype": 42,
        "font.family": "DejaVu Sans",  # comes with matplotlib
        "font.size": 10.5,
        "axes.labelsize": 10.5,
        "axes.titlesize": 11.5,
        "axes.titlelocation": "left",
        "axes.linewidth": 0.8,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.unicode_minus": True,
        "text.color": INK,
        "text.parse_math": False,  # a dollar in a name is a dollar
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "legend.frameon": False,
        "figure.facecolor": "none",
        "savefig.facecolor": "none",
        "axes.facecolor": "none",
        "path.simplify": True,
    }
    with matplotlib.rc_context(settings):
        yield


def draw(axes: Any, panel: Panel, looks: Mapping[str, Look]) -> list[str]:
    """Draw a panel; what could not be drawn is said in words, one sentence a curve."""
    axes.set_xscale(panel.x_scale, **({"nonpositive": "mask"} if panel.x_scale == "log" else {}))
    axes.set_yscale(panel.y_scale, **({"nonpositive": "mask"} if panel.y_scale == "log" else {}))
    axes.set_xlabel(_wrap(panel.x_label))
    axes.set_ylabel(_wrap(panel.y_label))
    axes.grid(True, which="major", color=GRID, linewidth=0.6)
    notes, drawn = [note for axis in "xy" if (note := _limit(axes, axis, panel))], 0
    bars = [curve for curve in panel.curves if curve.style == "bars"]
    shared = len({value for curve in bars for value in curve.x}) < sum(len(curve.x) for curve in bars)
    group = len(bars) if shared else 1  # bars stand side by side only where two have one place
    place_of_bars = {id(curve): place if shared else 0 for place, curve in enumerate(bars)}
    for place, curve in enumerate(panel.curves):
        x, y = _shown(curve.x, panel.x_scale), _shown(curve.y, panel.y_scale)
        missing = int(np.sum(np.isnan(x) | np.isnan(y)))
        drawn += len(x) - missing
        if missing or not len(x):
            notes.append(_left_out(curve.label, missing, len(x), "log" in (panel.x_scale, panel.y_scale)))
        if missing == len(x):
            continue
        if curve.style == "bars":
            _bars(axes, curve, x, y, looks[curve.label], place_of_bars[id(curve)], group)
        else:
            _line(axes, curve, x, y, looks[curve.label], place)
            _band(axes, curve, x, panel.y_scale, looks[curve.label])
    if not drawn:
        axes.set(xscale="linear", yscale="linear", xticks=[], yticks=[])
        axes.text(0.5, 0.5, "no data yet", transform=axes.transAxes, ha="center", va="center", color=MUTED)
    else:
        axes.margins(x=0.02)
        axes.autoscale_view()
        names = panel.places or ([curve.label for curve in panel.curves] if _one_bar_each(panel, shared) else ())
        if names:
            _name_places(axes, names)
        else:
            set_ticks(axes.xaxis, panel.x_scale)
        set_ticks(axes.yaxis, panel.y_scale)
    return notes


def _one_bar_each(panel: Panel, shared: bool) -> bool:
    return not shared and all(curve.style == "bars" and list(curve.x) == [k] for k, curve in enumerate(panel.curves))


def _name_places(axes: Any, names: Sequence[str]) -> None:
    """Words in place of numbers along x, slanted so that long ones do not meet."""
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor", fontsize=11)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.grid(False, axis="x")


def _limit(axes: Any, axis: str, panel: Panel) -> str:
    """Keep a long logarithmic axis to where nearly all points are, so that a run that explodes hides no other."""
    scale = panel.x_scale if axis == "x" else panel.y_scale
    values = [_shown(getattr(curve, axis), scale) for curve in panel.curves]
    decades = np.log10(np.concatenate(values)) if values and scale == "log" else np.zeros(1)
    decades = decades[np.isfinite(decades)]
    if not len(decades) or np.ptp(decades) <= _DECADES:
        return ""
    low, high = np.clip(np.quantile(decades, [0.02, 0.98]) + _BEYOND * np.array([-1, 1]), -200, 200)
    low, high = max(low, decades.min() - 0.5), min(high, decades.max() + 0.5)
    beyond = int(np.sum((decades < low) | (decades > high)))
    if not beyond:
        return ""
    getattr(axes, f"set_{axis}lim")(10.0**low, 10.0**high)
    return f"{beyond} {'point lies' if beyond == 1 else 'points lie'} beyond the ends of the {axis} axis."


def _line(axes: Any, curve: Curve, x: np.ndarray, y: np.ndarray, look: Look, place: int) -> None:
    dash = {"points": "none", "dashed": THEORY}.get(curve.style, look.dash)
    marker = "none" if curve.style == "dashed" else look.marker
    every = None
    if curve.style == "line" and len(x) > _SPARSE:
        every = (0.04 + 0.11 * (place * 0.382 % 1.0), 0.13)  # shifted, so that markers of curves that meet stay apart
    axes.plot(
        x,
        y,
        color=HUES[look.hue][0],
        linestyle=dash,
        linewidth=1.5 if curve.style == "dashed" else 1.8,
        marker=marker,
        markersize=5.2,
        markevery=every,
        markeredgewidth=0.0,
        label=curve.label,
        solid_joinstyle="round",
    )


def _band(axes: Any, curve: Curve, x: np.ndarray, scale: str, look: Look) -> None:
    if curve.low is None or curve.high is None:
        return
    low, high = _shown(curve.low, scale), _shown(curve.high, scale)
    if curve.style == "points":
        axes.vlines(x, low, high, color=HUES[look.hue][0], linewidth=1.2, alpha=0.7)
    else:
        axes.fill_between(x, low, high, color=HUES[look.hue][0], alpha=0.18, linewidth=0)


def _bars(axes: Any, curve: Curve, x: np.ndarray, y: np.ndarray, look: Look, place: int, count: int) -> None:
    steps = np.diff(np.unique(x[np.isfinite(x)]))
    width = 0.8 * (float(steps.min()) if len(steps) else 1.0) / count
    axes.bar(
        x + (place - (count - 1) / 2) * width,
        y,
        width=0.92 * width,
        color=HUES[look.hue][0],
        alpha=bar_shade(look),
        label=curve.label,
    )
    if curve.low is not None and curve.high is not None:
        low, high = _shown(curve.low, "linear"), _shown(curve.high, "linear")
        axes.vlines(x + (place - (count - 1) / 2) * width, low, high, color=INK, linewidth=1.1)


def bar_shade(look: Look) -> float:
    """Bars have no dash, so an algorithm's second one is paler.

    >>> bar_shade(Look("blue", "o"))
    1.0
    """
    return 1.0 if look.dash == "solid" else 0.55


def _shown(values: Sequence[float | int | None], scale: str) -> np.ndarray:
    """The values, with nan where the axis has no place for them."""
    array = np.array([np.nan if value is None else value for value in values], dtype=float)
    array[~np.isfinite(array)] = np.nan
    if scale == "log":
        array[array <= 0] = np.nan
    return array


def _left_out(label: str, missing: int, count: int, log: bool) -> str:
    if not count:
        return f"{label}: no points recorded."
    why = "not finite, or not above zero on a logarithmic axis" if log else "not finite"
    return f"{label}: {missing} of {count} points not shown ({why})."


def _wrap(text: str, width: int = 44) -> str:
    return "\n".join(textwrap.wrap(text, width)) or text
