"""Figures as pictures: one drawing a panel inside the page, and one row of panels as files for papers.

Inside a page, colours are CSS variables and letters are letters: the page decides between light and dark, letters
can be found and read aloud, and panels stand beside or below one another as the screen allows. Files have fixed
colours.
"""

import io
import math
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerwise.experiments.figures import Figure, Panel
from layerwise.report.drawing import GRID, INK, MUTED, bar_shade, draw, style
from layerwise.report.optional import require
from layerwise.report.palette import HUES, Look, css_name, looks

FORMATS = ("svg", "pdf", "png")
_SIZES = {1: (4.9, 3.4), 2: (4.9, 3.5)}
_SIZE = (4.2, 3.3)
"""Inches of a panel: the narrower its place on the page, the larger its letters stand in it."""


@dataclass(frozen=True)
class PanelPicture:
    """A panel as it stands in the page."""

    title: str
    svg: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Swatch:
    """An entry of a legend: a label and a short piece of its curve."""

    label: str
    svg: str


@dataclass(frozen=True)
class Picture:
    """A figure as it stands in the page."""

    panels: tuple[PanelPicture, ...]
    legend: tuple[Swatch, ...]


def picture(figure: Figure, prefix: str) -> Picture:
    """Draw a figure for a page; `prefix` keeps the names inside its drawings apart from those of others."""
    given = looks(curve.label for panel in figure.panels for curve in panel.curves)
    panels = [
        _panel(panel, given, _SIZES.get(len(figure.panels), _SIZE), f"{prefix}-{place}")
        for place, panel in enumerate(figure.panels)
    ]
    styles = {curve.label: curve.style for panel in figure.panels for curve in panel.curves}
    legend = [Swatch(label, _swatch(look, styles[label])) for label, look in given.items()]
    return Picture(tuple(panels), tuple(legend))


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write the figure as one row of panels with a legend: SVG and PDF with fixed colours, and PNG on white."""
    given = looks(curve.label for panel in figure.panels for curve in panel.curves)
    with style(text=False):
        width, height = _SIZES.get(len(figure.panels), _SIZE)
        whole = require("matplotlib.figure").Figure(
            figsize=(width * max(1, len(figure.panels)), height + 0.7), layout="constrained"
        )
        rows = whole.subplots(1, max(1, len(figure.panels)), squeeze=False)[0]
        handles: dict[str, Any] = {}
        for axes, panel in zip(rows, figure.panels, strict=False):
            draw(axes, panel, given)
            axes.set_title("\n".join(textwrap.wrap(panel.title, 46)))
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        if handles:
            names = [textwrap.shorten(label, 60, placeholder="…") for label in handles]
            fit = max(1, min(len(names), int(11 * width * len(figure.panels) / (max(map(len, names)) + 6))))
            columns = math.ceil(len(names) / math.ceil(len(names) / fit))  # rows of about one length
            whole.legend(handles.values(), names, loc="outside lower center", ncols=columns)
        _settle(whole)
        return [_write(whole, folder / f"{name}.{kind}", kind) for kind in FORMATS]


def _settle(whole: Any) -> None:
    """Lay the figure out once and for all, rather than again for every file."""
    whole.draw_without_rendering()
    whole.set_layout_engine("none")


def _write(whole: Any, path: Path, kind: str) -> Path:
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}  # the same records, the same bytes
    background = {"facecolor": "white"} if kind == "png" else {}
    whole.savefig(path, format=kind, dpi=200, metadata=dates[kind], **background)
    return path


def _panel(panel: Panel, given: Mapping[str, Look], size: tuple[float, float], prefix: str) -> PanelPicture:
    with style(text=True):
        whole = require("matplotlib.figure").Figure(figsize=size, layout="constrained")
        notes = draw(whole.subplots(), panel, given)
        _settle(whole)
        written = io.StringIO()
        whole.savefig(written, format="svg", metadata={"Date": None})
    return PanelPicture(panel.title, _for_page(written.getvalue(), prefix, _described(panel)), tuple(notes))


def _described(panel: Panel) -> str:
    """What a screen reader says of a drawing; the values themselves are in the table under the figure."""
    scales = {"linear": "", "log": ", logarithmic"}
    names = ", ".join(curve.label for curve in panel.curves) or "nothing"
    return (
        f"{panel.title}: {panel.y_label}{scales[panel.y_scale]}, against {panel.x_label}{scales[panel.x_scale]}, "
        f"for {names}."
    )


def _for_page(svg: str, prefix: str, description: str) -> str:
    """Make a drawing part of a page: colours by variable, names with a prefix, a description for those who listen."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r'\b(id|xlink:href|clip-path)="(#|url\(#)?', rf'\1="\2{prefix}-', body)
    body = re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL)  # it would hold for the whole page; style.css has it
    for colour, variable in _VARIABLES.items():
        body = body.replace(f": {colour}", f": var({variable})")
    body = body.replace("'DejaVu Sans'", "var(--sans)")
    body = re.sub(r' (d|x|y)="[^"]*"', _rounded, body)
    head, rest = body.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None, "matplotlib writes a viewBox"
    label = description.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    opened = f'<svg class="panel" {box[0]} role="img" aria-label="{label}" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return re.sub(r"\n\s*", "\n", opened + rest).strip()


def _rounded(attribute: re.Match) -> str:
    return re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", attribute[0])


_VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    **{light: css_name(hue) for hue, (light, _) in HUES.items() if hue != "ink"},
}


def _swatch(look: Look, kind: str) -> str:
    """A short line with its marker, as a drawing of 34 by 14."""
    colour = f"var({'--ink' if look.hue == 'ink' else css_name(look.hue)})"
    if kind == "bars":
        return _swatch_svg(
            f'<rect x="8" y="1" width="18" height="12" style="fill: {colour}; opacity: {bar_shade(look):g}"/>'
        )
    parts = []
    if kind != "points":
        dash = (3.2, 1.8) if kind == "dashed" else look.dash[1] if isinstance(look.dash, tuple) else ()
        dashes = f"; stroke-dasharray: {' '.join(f'{2 * step:g}' for step in dash)}" if dash else ""
        parts.append(f'<path d="M1 7H33" style="fill: none; stroke: {colour}; stroke-width: 2.4{dashes}"/>')
    if kind != "dashed":
        parts.append(f'<path d="{_marker(look.marker)}" style="fill: {colour}"/>')
    return _swatch_svg("".join(parts))


def _swatch_svg(inside: str) -> str:
    return f'<svg class="swatch" viewBox="0 0 34 14" width="34" height="14" aria-hidden="true">{inside}</svg>'


def _marker(name: str) -> str:
    shape = require("matplotlib.markers").MarkerStyle(name)
    polygons = shape.get_path().transformed(shape.get_transform()).to_polygons(closed_only=False)
    points = [" ".join(f"{17 + 8 * x:.2f},{7 - 8 * y:.2f}" for x, y in polygon) for polygon in polygons]
    return " ".join(f"M{polygon}Z" for polygon in points)
