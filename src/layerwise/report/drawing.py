"""Panels drawn with matplotlib, for files that go into papers: lines, bands, points or bars on a pair of axes.

Nothing here is kept between calls: figures are made without pyplot, and settings hold inside `style()` alone.
"""

import contextlib
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from layerwise.experiments.figures import Panel
from layerwise.report.arrangement import SPARSE, Shown, arrange, bar_shade
from layerwise.report.optional import require
from layerwise.report.palette import HUES, THEORY, Look
from layerwise.report.ticks import set_ticks

INK, MUTED, GRID = HUES["ink"][0], "#59636e", "#d9dee3"


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
    arranged = arrange(panel)
    axes.set_xscale(panel.x_scale, **({"nonpositive": "mask"} if panel.x_scale == "log" else {}))
    axes.set_yscale(panel.y_scale, **({"nonpositive": "mask"} if panel.y_scale == "log" else {}))
    axes.set_xlabel(_wrap(panel.x_label))
    axes.set_ylabel(_wrap(panel.y_label))
    axes.grid(True, which="major", color=GRID, linewidth=0.6)
    for axis, ends in arranged.limits.items():
        if ends is not None:
            getattr(axes, f"set_{axis}lim")(*ends)
    for place, shown in enumerate(arranged.curves):
        look = looks[shown.curve.label]
        if shown.curve.style == "bars":
            _bars(axes, shown, look)
        else:
            _line(axes, shown, look, place)
            _band(axes, shown, look)
    if not arranged.curves:
        axes.set(xscale="linear", yscale="linear", xticks=[], yticks=[])
        axes.text(0.5, 0.5, "no data yet", transform=axes.transAxes, ha="center", va="center", color=MUTED)
    else:
        axes.margins(x=0.02)
        axes.autoscale_view()
        if arranged.names:
            _name_places(axes, arranged.names)
        else:
            set_ticks(axes.xaxis, panel.x_scale)
        set_ticks(axes.yaxis, panel.y_scale)
    return list(arranged.notes)


def _name_places(axes: Any, names: Sequence[str]) -> None:
    """Words in place of numbers along x, slanted so that long ones do not meet."""
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor", fontsize=11)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.grid(False, axis="x")


def _line(axes: Any, shown: Shown, look: Look, place: int) -> None:
    style = shown.curve.style
    dash = {"points": "none", "dashed": THEORY}.get(style, look.dash)
    marker = "none" if style == "dashed" else look.marker
    every = None
    if style == "line" and len(shown.x) > SPARSE:
        every = (0.04 + 0.11 * (place * 0.382 % 1.0), 0.13)  # shifted, so that markers of curves that meet stay apart
    axes.plot(
        shown.x,
        shown.y,
        color=HUES[look.hue][0],
        linestyle=dash,
        linewidth=1.5 if style == "dashed" else 1.8,
        marker=marker,
        markersize=5.2,
        markevery=every,
        markeredgewidth=0.0,
        label=shown.curve.label,
        solid_joinstyle="round",
    )


def _band(axes: Any, shown: Shown, look: Look) -> None:
    if shown.low is None or shown.high is None:
        return
    if shown.curve.style == "points":
        axes.vlines(shown.x, shown.low, shown.high, color=HUES[look.hue][0], linewidth=1.2, alpha=0.7)
    else:
        axes.fill_between(shown.x, shown.low, shown.high, color=HUES[look.hue][0], alpha=0.18, linewidth=0)


def _bars(axes: Any, shown: Shown, look: Look) -> None:
    axes.bar(
        shown.x + shown.shift,
        shown.y,
        width=shown.width,
        color=HUES[look.hue][0],
        alpha=bar_shade(look),
        label=shown.curve.label,
    )
    if shown.low is not None and shown.high is not None:
        axes.vlines(shown.x + shown.shift, shown.low, shown.high, color=INK, linewidth=1.1)


def _wrap(text: str, width: int = 44) -> str:
    return "\n".join(textwrap.wrap(text, width)) or text
