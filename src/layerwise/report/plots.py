"""A panel as SVG inside a page: letters are letters, colours are the page's, and every mark can be found by a script.

Drawn here rather than by matplotlib: a panel is a tenth of the size, is made in a millisecond, and its curves keep
their numbers beside them (`Plot.data`), from which the page's script reads values aloud and draws single seeds.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from layerwise.experiments.figures import Panel
from layerwise.report import palette
from layerwise.report.arrangement import SPARSE, Arrangement, Shown, arrange, bar_shade
from layerwise.report.palette import THEORY, Look, css_name
from layerwise.report.ticks import places

WIDTH, HEIGHT = 400, 270
ROW = 25
"""Height of a named place."""
TOP, RIGHT = 10, 14
NAMES = 0.45 * WIDTH
"""Room for names of places. A longer one is cut in the drawing; the table under the figure has it whole."""


@dataclass(frozen=True)
class Axis:
    """From a value to a place in the drawing, and what is written along it."""

    scale: str
    low: float | int
    high: float | int
    start: float | int
    end: float | int
    ticks: Sequence[tuple[float | int, str]]

    def at(self, value: float | int | np.ndarray) -> Any:
        """Where a value stands."""
        if self.scale == "log":
            value = np.log(value)
        low, high = (math.log(end) if self.scale == "log" else end for end in (self.low, self.high))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def data(self) -> list[Any]:
        """What the script needs to do the same."""
        return [self.scale == "log", *(float(f"{v:.6g}") for v in (self.low, self.high, self.start, self.end))]


@dataclass(frozen=True)
class Plot:
    """A panel that is drawn."""

    svg: str
    notes: tuple[str, ...]
    data: Mapping[str, Any]
    """Axes and the numbers of every curve, as the script of the page reads them."""


def plot(panel: Panel, looks: Mapping[str, Look], prefix: str, description: str) -> Plot:
    """Draw a panel; `prefix` makes the names inside it its own, `description` is for those who listen."""
    arranged = arrange(panel)
    width, height = WIDTH, HEIGHT
    if not arranged.curves:
        middle = f'<g class="mid"><text x="{WIDTH / 2:g}" y="60" class="faint">no data yet</text></g>'
        return Plot(_svg(panel, prefix, description, 110, middle), arranged.notes, {"curves": []})
    turned = _turned(arranged)
    if turned:
        place, value, height = _named(panel, arranged)
        x_axis, y_axis = value, place
    else:
        place, value = _numbered(panel, arranged)
        x_axis, y_axis = place, value
    order = list(looks)
    parts = [_frame(panel, x_axis, y_axis, turned)]
    clip = (
        f'<clipPath id="{prefix}-clip"><rect x="{x_axis.start - 6:.5g}" y="0" width="{width - x_axis.start + 6:.5g}" '
    )
    parts.append(
        clip + f'height="{max(y_axis.start, y_axis.end) + 6:.5g}"/></clipPath><g clip-path="url(#{prefix}-clip)">'
    )
    for number, shown in enumerate(arranged.curves):
        look = looks[shown.curve.label]
        parts.append(_curve(shown, look, order.index(shown.curve.label), number, place, value, turned))
    parts.append("</g>")
    data = {
        "turned": int(turned),
        "place": place.data(),
        "value": value.data(),
        "size": height,
        "x": panel.x_label,
        "y": panel.y_label,
        "names": list(arranged.names),
        "curves": [_numbers(shown, order.index(shown.curve.label), panel.y_scale) for shown in arranged.curves],
    }
    return Plot(_svg(panel, prefix, description, height, "".join(parts)), arranged.notes, data)


def _svg(panel: Panel, prefix: str, description: str, height: float | int, inside: str) -> str:
    title, told = (escape(text, quote=False) for text in (panel.title, description))
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height:g}" role="img" aria-labelledby="{prefix}-title" '
        f'aria-describedby="{prefix}-desc"><title id="{prefix}-title">{title}</title>'
        f'<desc id="{prefix}-desc">{told}</desc>{inside}</svg>'
    )


def _turned(arranged: Arrangement) -> bool:
    """Whether names go down the side, where long ones read best; lines go from left to right if their names fit."""
    lines = any(shown.curve.style == "line" for shown in arranged.curves)
    return bool(arranged.names) and not (lines and sum(map(_width, arranged.names)) < 0.7 * WIDTH)


# --- Axes -----------------------------------------------------------------------------------------------------


def _numbered(panel: Panel, arranged: Arrangement) -> tuple[Axis, Axis]:
    """Axes of a panel whose x is a number."""
    low, high = arranged.limits["y"] or _ends(arranged, "y", panel.y_scale)
    y_ticks = places(low, high, panel.y_scale, 6)
    lines = len(_wrapped(panel.y_label, 36))
    left = 10 + 15 * lines + max((_width(label) for _, label in y_ticks), default=0.0)
    bottom = HEIGHT - 24 - 16 * len(_wrapped(panel.x_label, 46))
    start, end = arranged.limits["x"] or _ends(arranged, "x", panel.x_scale)
    x_ticks: Sequence[tuple[float | int, str]] = places(start, end, panel.x_scale, 6)
    if arranged.names:
        start, end, x_ticks = -0.3, len(arranged.names) - 0.7, list(enumerate(arranged.names))
    return (
        Axis(panel.x_scale, start, end, left, WIDTH - RIGHT, x_ticks),
        Axis(panel.y_scale, low, high, bottom, TOP, y_ticks),
    )


def _named(panel: Panel, arranged: Arrangement) -> tuple[Axis, Axis, float | int]:
    """Axes of a panel whose x are names, from top to bottom, and the height of the drawing."""
    names = [_short(name) for name in arranged.names]
    bars = [shown for shown in arranged.curves if shown.curve.style == "bars"]
    row = ROW if len(bars) < 2 or not any(shown.shift for shown in bars) else max(ROW, 11 * len(bars) + 8)
    left = 9 + max(map(_width, names))
    bottom = TOP + row * len(names)
    low, high = arranged.limits["y"] or _ends(arranged, "y", panel.y_scale)
    ticks = places(low, high, panel.y_scale, 5)
    height = bottom + 24 + 16 * len(_wrapped(panel.y_label, 40))
    place = Axis("linear", -0.5, len(names) - 0.5, TOP, bottom, list(enumerate(names)))
    return place, Axis(panel.y_scale, low, high, left, WIDTH - RIGHT, ticks), height


def _ends(arranged: Arrangement, axis: str, scale: str) -> tuple[float, float]:
    """Where an axis begins and ends: with all points, their bands, the widths of bars, and a little room."""
    found = []
    for shown in arranged.curves:
        if axis == "y":
            found += [part for part in (shown.y, shown.low, shown.high) if part is not None]
            if shown.curve.style == "bars" and scale != "log":
                found.append(np.zeros(1))
        else:
            room = abs(shown.shift) + shown.width / 2 if shown.curve.style == "bars" else 0.0
            found += [shown.x - room, shown.x + room]
    values = np.concatenate(found)
    values = values[np.isfinite(values) & ((values > 0) | (scale != "log"))]
    low, high = float(values.min()), float(values.max())
    if scale == "log":
        span = math.log10(high) - math.log10(low)
        room = (0.02 if axis == "x" else 0.05) * span if span > 1e-3 else 0.3
        return max(low * 10**-room, 1e-300), min(high * 10**room, 1e300)
    room = (0.02 if axis == "x" else 0.05) * (high - low) or 0.05 * abs(high) or 0.5
    starts_at_zero = axis == "y" and low == 0 and any(s.curve.style == "bars" for s in arranged.curves)
    return (low if starts_at_zero else low - room), high + room


def _frame(panel: Panel, x_axis: Axis, y_axis: Axis, turned: bool) -> str:
    """Grid, axes, and all that is written along them."""
    left, right = x_axis.start, x_axis.end
    top, bottom = sorted((y_axis.start, y_axis.end))
    lines = "".join(f"M{x_axis.at(v):.1f} {top:g}V{bottom:g}" for v, _ in x_axis.ticks)
    if not turned:
        lines += "".join(f"M{left:.1f} {y_axis.at(v):.1f}H{right:g}" for v, _ in y_axis.ticks)
    parts = [f'<path class="grid" d="{lines}"/><path class="axis" d="M{left:.1f} {top:g}V{bottom:g}H{right:g}"/>']
    under = (
        f'<text x="{x_axis.at(v):.0f}" y="{bottom + 17:.0f}">{escape(label, quote=False)}</text>'
        for v, label in x_axis.ticks
    )
    beside = (
        f'<text x="{left - 7:.0f}" y="{y_axis.at(v) + 4:.0f}">{escape(label, quote=False)}</text>'
        for v, label in y_axis.ticks
    )
    parts += ['<g class="mid">', *under, '</g><g class="end">', *beside, "</g>"]
    named, aside = (panel.y_label, "") if turned else (panel.x_label, panel.y_label)
    middle, centre = (left + right) / 2, (top + bottom) / 2
    parts.append('<g class="mid">')
    for number, line in enumerate(_wrapped(named, 40 if turned else 46)):
        x = min(middle, WIDTH - 3.2 * len(line) - 4) if turned else middle  # not beyond the edge
        parts.append(f'<text x="{x:.0f}" y="{bottom + 35 + 15 * number:.0f}">{escape(line, quote=False)}</text>')
    for number, line in enumerate(_wrapped(aside, 36)):
        at = f'transform="translate({13 + 15 * number} {centre:.0f}) rotate(-90)"'
        parts.append(f"<text {at}>{escape(line, quote=False)}</text>")
    return "".join([*parts, "</g>"])


def _wrapped(text: str, width: int) -> list[str]:
    if width < len(text) <= 2 * width - 12:
        width = len(text) // 2 + 6  # two lines of about one length
    lines = textwrap.wrap(text, width)
    return [*lines[:1], textwrap.shorten(" ".join(lines[1:]), width, placeholder=" …")] if len(lines) > 1 else lines


def _width(text: str) -> float:
    """About how wide a text of 12 units is, in a wide font: pages are shown in the reader's own."""
    return sum(8.8 if c.isupper() or c in "mw%×" else 4.3 if c in "iljtfr.,:;'|()[] -−" else 7.5 for c in text)


def _short(name: str) -> str:
    """A name that fits its room."""
    if _width(name) <= NAMES:
        return name
    while _width(name) > NAMES - 9:
        name = name[:-1]
    return name.rstrip() + "…"


# --- Curves ---------------------------------------------------------------------------------------------------


def _curve(shown: Shown, look: Look, key: int, number: int, place: Axis, value: Axis, turned: bool) -> str:
    """One curve as a group, whose colour is `currentcolor`; `key` is its place in the legend."""
    colour = "--ink" if look.hue == "ink" else css_name(look.hue)
    kind = shown.curve.style
    at = place.at(shown.x + (shown.shift if kind == "bars" else 0.0))
    to = value.at(shown.y)
    parts = [f'<g class="curve of-{kind}" data-key="{key}" data-curve="{number}" style="color:var({colour})">']
    parts.append(f"<title>{escape(shown.curve.label, quote=False)}</title>")
    if kind == "bars":
        parts.append(_bars(shown, look, at, to, place, value, turned))
    else:
        if shown.low is not None and shown.high is not None:
            parts.append(_spread(kind, at, value.at(shown.low), value.at(shown.high), turned))
        if kind != "points":
            parts.append(f'<path class="line" d="{_path(at, to, turned)}"{dashes(look, kind)}/>')
        if kind != "dashed":
            parts += [_mark(look, i, at, to, turned) for i in _marked(shown, number) if np.isfinite(at[i] + to[i])]
    return "".join([*parts, "</g>"])


def dashes(look: Look, kind: str) -> str:
    """The attribute that makes a line dashed, or nothing.

    >>> dashes(Look("blue", "o"), "line"), dashes(Look("blue", "o"), "dashed")
    ('', ' stroke-dasharray="5.76 3.24"')
    """
    dash = THEORY if kind == "dashed" else look.dash
    return f' stroke-dasharray="{" ".join(f"{1.8 * s:.3g}" for s in dash[1])}"' if isinstance(dash, tuple) else ""


def _path(at: np.ndarray, to: np.ndarray, turned: bool, near: float = 0.2) -> str:
    """A line through the points, broken where one is missing; steps are relative, in tenths, for the sake of size.

    Points nearer than `near` to the line through their neighbours are left out.
    """
    steps, last = [], None
    kept = _needed(at, to, near)
    for i in range(len(at)):
        if not np.isfinite(at[i] + to[i]):
            last = None
        elif kept[i] or last is None:
            x, y = (round(10 * float(v)) for v in ((to[i], at[i]) if turned else (at[i], to[i])))
            steps.append(f"M{_tenths(x)} {_tenths(y)}" if last is None else f"l{_pair(x - last[0], y - last[1])}")
            last = (x, y)
    return "".join(steps)


def _tenths(value: int) -> str:
    """A number of tenths in as few letters as SVG needs.

    >>> _tenths(1234), _tenths(-3), _tenths(50)
    ('123.4', '-.3', '5')
    """
    whole, rest = divmod(abs(value), 10)
    text = (f"{whole}" if whole or not rest else "") + (f".{rest}" if rest else "")
    return f"-{text}" if value < 0 else text


def _pair(x: int, y: int) -> str:
    first, second = _tenths(x), _tenths(y)
    return first + (second if second.startswith("-") else f" {second}")


def _needed(at: np.ndarray, to: np.ndarray, near: float) -> np.ndarray:
    """Which points a line needs (Ramer, Douglas and Peucker), so that none is further than `near` from it."""
    keep = np.ones(len(at), dtype=bool)
    if len(at) < 4 or not np.isfinite(at + to).all():
        return keep
    keep[1:-1] = False
    stack = [(0, len(at) - 1)]
    while stack:
        first, last = stack.pop()
        if last - first < 2:
            continue
        dx, dy = at[last] - at[first], to[last] - to[first]
        inner = slice(first + 1, last)
        off = np.abs(dx * (to[inner] - to[first]) - dy * (at[inner] - at[first])) / (math.hypot(dx, dy) or 1.0)
        worst = int(off.argmax())
        if off[worst] > near:
            keep[first + 1 + worst] = True
            stack += [(first, first + 1 + worst), (first + 1 + worst, last)]
    return keep


def _spread(kind: str, at: np.ndarray, low: np.ndarray, high: np.ndarray, turned: bool) -> str:
    """The band of a line, or the whiskers of points."""
    good = np.isfinite(at + low + high)
    at, low, high = at[good], low[good], high[good]
    if kind == "points":
        whiskers = zip(at, low, high, strict=True)
        form = "M{b:.1f} {a:.1f}H{c:.1f}" if turned else "M{a:.1f} {b:.1f}V{c:.1f}"
        drawn = "".join(form.format(a=a, b=b, c=c) for a, b, c in whiskers if abs(b - c) > 0.2)
        return f'<path class="whisker" d="{drawn}"/>' if drawn else ""
    if not len(at) or np.abs(high - low).max() < 0.2:
        return ""
    there, back = _path(at, high, turned, 0.5), _path(at[::-1], low[::-1], turned, 0.5)
    return f'<path class="band" d="{there}L{back[1:]}Z"/>'  # to the other end, and back along the lower edge


def _marked(shown: Shown, number: int) -> range | list[int]:
    """Points that carry a marker; of many, some, shifted so that markers of curves that meet stay apart."""
    count = len(shown.x)
    if shown.curve.style != "line" or count <= SPARSE:
        return range(count)
    return [round((count - 1) * (0.04 + 0.08 * (number * 0.382 % 1.0) + 0.13 * k)) for k in range(7)]


def _mark(look: Look, i: int, at: np.ndarray, to: np.ndarray, turned: bool) -> str:
    x, y = (to[i], at[i]) if turned else (at[i], to[i])
    return f'<use href="#m{MARKS[look.marker]}" x="{x:.1f}" y="{y:.1f}"/>'


def _bars(shown: Shown, look: Look, at: np.ndarray, to: np.ndarray, place: Axis, value: Axis, turned: bool) -> str:
    half = abs(float(place.at(place.low + shown.width) - place.start)) / 2
    floor = float(value.at(min(max(0.0, value.low), value.high))) if value.scale != "log" else value.start
    shade = f' opacity="{bar_shade(look):g}"' if bar_shade(look) < 1 else ""
    parts, whiskers = [], ""
    for a, b in zip(at, to, strict=True):
        if not np.isfinite(a + b):
            continue
        near, length = min(floor, b), abs(b - floor)
        box = (near, a - half, length, 2 * half) if turned else (a - half, near, 2 * half, length)
        x, y, w, h = box
        parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="1.5"{shade}/>')
    if shown.low is not None and shown.high is not None:
        whiskers = _spread("points", at, value.at(shown.low), value.at(shown.high), turned)
    return "".join(parts) + whiskers


# --- Numbers for the script -----------------------------------------------------------------------------------


def _numbers(shown: Shown, key: int, scale: str) -> dict[str, Any]:
    found: dict[str, Any] = {"key": key, "x": listed(shown.x, 6), "y": listed(shown.y, DIGITS[scale])}
    if shown.curve.style == "bars" and shown.shift:
        found["shift"] = float(f"{shown.shift:.4g}")
    if shown.low is not None and shown.high is not None:
        found |= {"low": listed(shown.low, 3), "high": listed(shown.high, 3)}
        if found["low"] == found["high"]:  # all seeds agree
            del found["low"], found["high"]
    return found


DIGITS = {"linear": 4, "log": 3}
"""Of values: pages say three; where all of them are near one large number, a line needs a fourth."""


def listed(values: np.ndarray, digits: int = 4) -> list[float | int | None]:
    """Numbers of so many digits, None where there is none.

    >>> listed(np.array([1.0, 0.123456, float("nan")]))
    [1, 0.1235, None]
    """
    rounded = [None if np.isnan(v) else float(f"{v:.{digits}g}") for v in values]
    return [int(v) if v is not None and abs(v) < 1e15 and v == int(v) else v for v in rounded]


MARKS = {marker: number for number, marker in enumerate(palette.MARKERS)}
"""Numbers of the markers, which pages refer to by."""
SHAPES = {
    "o": "M-3.1 0a3.1 3.1 0 1 0 6.2 0a3.1 3.1 0 1 0-6.2 0Z",
    "s": "M-2.8-2.8h5.6v5.6h-5.6Z",
    "^": "M0-3.6L3.5 2.7H-3.5Z",
    "v": "M0 3.6L3.5-2.7H-3.5Z",
    "<": "M-3.6 0L2.7-3.5V3.5Z",
    ">": "M3.6 0L-2.7-3.5V3.5Z",
    "D": "M0-3.9L3.4 0L0 3.9L-3.4 0Z",
    "P": "M-1.2-3.6h2.4v2.4h2.4v2.4h-2.4v2.4h-2.4v-2.4h-2.4v-2.4h2.4Z",
    "X": "M-3.4-1.8L-1.8-3.4L0-1.6L1.8-3.4L3.4-1.8L1.6 0L3.4 1.8L1.8 3.4L0 1.6L-1.8 3.4L-3.4 1.8L-1.6 0Z",
    "*": "M0-4.3L1.1-1.4L4.1-1.3L1.7 .6L2.5 3.5L0 1.8L-2.5 3.5L-1.7 .6L-4.1-1.3L-1.1-1.4Z",
}
"""Outlines of the markers around their middle; a page has each once and refers to it."""
