"""Figures as pictures: one drawing a panel inside the page, and one row of panels as files for papers.

Inside a page, colours are CSS variables and letters are letters: the page decides between light and dark, letters
can be found and read aloud, and panels stand beside or below one another as the screen allows. Files have fixed
colours.
"""

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerwise.experiments.figures import Curve, Figure, Panel
from layerwise.report import wording
from layerwise.report.arrangement import bar_shade, shown
from layerwise.report.drawing import draw, style
from layerwise.report.optional import require
from layerwise.report.palette import Look, css_name, looks
from layerwise.report.plots import DIGITS, MARKS, Plot, dashes, listed, plot

FORMATS = ("svg", "pdf", "png")
_SIZES = {1: (4.9, 3.4), 2: (4.9, 3.5)}
_SIZE = (4.2, 3.3)
"""Inches of a panel in a file: the narrower its place, the larger its letters stand in it."""
MOST_SEEDS = 12
"""Seeds that a reader can choose from; of more, the first ones."""
POINTS, OF_SEEDS = 600, 1200
"""Points that a figure keeps as numbers, and those of single seeds: of long curves every second (third, …) one, and
fewer seeds to choose from. The lines are drawn from all of them."""
_TOLD = 12
"""Curves whose ends a description names; the table under the figure has all."""


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
    data: str
    """The numbers of its curves, of each seed where there are several, as JSON for the script of the page."""


def picture(figure: Figure, prefix: str, by_seed: Mapping[int, Figure] | None = None) -> Picture:
    """Draw a figure for a page.

    Args:
        figure: what is drawn.
        prefix: keeps the names inside its drawings apart from those of others.
        by_seed: the same figure made of the records of one seed each, for readers who want to see one.
    """
    given = looks(curve.label for panel in figure.panels for curve in panel.curves)
    drawn = [plot(panel, given, f"{prefix}-{place}", describe(panel)) for place, panel in enumerate(figure.panels)]
    panels = [PanelPicture(panel.title, one.svg, one.notes) for panel, one in zip(figure.panels, drawn, strict=True)]
    styles: dict[str, str] = {}
    for curve in sorted((c for panel in figure.panels for c in panel.curves), key=lambda c: c.style == "bars"):
        styles.setdefault(curve.label, curve.style)  # bars have their names beside them, lines and points only these
    legend = [Swatch(label, _swatch(look, styles[label])) for label, look in given.items()]
    if drawn and all(one.data.get("names") == list(given) for one in drawn):
        legend = []  # every bar has its name beside it
    return Picture(tuple(panels), tuple(legend), _json(figure, drawn, list(given), by_seed or {}))


def describe(panel: Panel) -> str:
    """What a screen reader says of a drawing; the table under the figure has more of the values.

    >>> curve = Curve(label="KFAC", x=[0, 10], y=[1.0, 0.03])
    >>> describe(Panel(title="t", x_label="step", y_label="distance", curves=[curve], y_scale="log"))
    'distance (logarithmic) against step. KFAC: from 1 to 0.03.'
    """
    scales = {"linear": "", "log": " (logarithmic)"}
    against = f" against {panel.x_label}{scales[panel.x_scale]}" if panel.x_label else ""
    told = [f"{curve.label}: {ends}." for curve in panel.curves[:_TOLD] if (ends := _course(curve))]
    more = [f"And {len(panel.curves) - _TOLD} more."] if len(panel.curves) > _TOLD else []
    return " ".join([f"{panel.y_label}{scales[panel.y_scale]}{against}.", *told, *more])


def _course(curve: Curve) -> str:
    if not len(curve.y):
        return "no points"
    first, last = wording.number(_float(curve.y[0])), wording.number(_float(curve.y[-1]))
    return first if len(curve.y) == 1 else f"from {first} to {last}"


def _float(value: float | int | None) -> float:
    return math.nan if value is None else float(value)


# --- Numbers for the script -----------------------------------------------------------------------------------


def _json(figure: Figure, drawn: Sequence[Plot], labels: list[str], by_seed: Mapping[int, Figure]) -> str:
    """The numbers as the script reads them, or nothing where there are none; a list of x is written once a panel."""
    points = sum(len(curve["y"]) for one in drawn for curve in one.data["curves"])
    step = max(1, math.ceil(points / POINTS))
    panels, seeds = [], list(by_seed)[: max(2, min(MOST_SEEDS, OF_SEEDS // max(1, points // step)))]
    for place, one in enumerate(drawn):
        pool: list[Any] = []
        curves = []
        for curve in one.data["curves"]:
            singles = [_of_seed(by_seed[seed], place, labels[curve["key"]], figure.panels[place]) for seed in seeds]
            columns = {name: _thinned(curve[name], step) for name in ("x", "y", "low", "high") if name in curve}
            entry = curve | columns | {"x": _pooled(pool, columns["x"])}
            if len(seeds) > 1 and any(single is not None for single in singles):
                entry["seeds"] = [
                    None if single is None else [_pooled(pool, _thinned(single[0], step)), _thinned(single[1], step)]
                    for single in singles
                ]
            curves.append(entry)
        panels.append({**one.data, "xs": pool, "curves": curves})
    if not any(panel["curves"] for panel in panels):
        return ""
    chosen = seeds if any("seeds" in curve for panel in panels for curve in panel["curves"]) else []
    text = json.dumps({"labels": labels, "seeds": chosen, "panels": panels}, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c")  # a name cannot end the element that holds it


def _of_seed(figure: Figure, place: int, label: str, like: Panel) -> tuple[list[Any], list[Any]] | None:
    """The curve of a label in the same panel of another figure, if it is there and has an x for each y."""
    if place >= len(figure.panels) or figure.panels[place].title != like.title:
        return None
    curve = next((one for one in figure.panels[place].curves if one.label == label), None)
    if curve is None or not len(curve.x) or len(curve.x) != len(curve.y):
        return None
    return listed(shown(curve.x, like.x_scale), 6), listed(shown(curve.y, like.y_scale), DIGITS[like.y_scale])


def _thinned(values: list[Any], step: int) -> list[Any]:
    """Every so many values of a long list, the last one among them.

    >>> _thinned(list(range(15)), 3), _thinned([1, 2], 3)
    ([2, 5, 8, 11, 14], [1, 2])
    """
    return values if step == 1 or len(values) <= 12 else values[(len(values) - 1) % step :: step]


def _pooled(pool: list[Any], values: list[Any]) -> int:
    if values not in pool:
        pool.append(values)
    return pool.index(values)


# --- Files for papers -----------------------------------------------------------------------------------------


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


# --- Legend ---------------------------------------------------------------------------------------------------


def _swatch(look: Look, kind: str) -> str:
    """A short line with its marker, as a drawing of 34 by 14."""
    colour = "--ink" if look.hue == "ink" else css_name(look.hue)
    if kind == "bars":
        inside = f'<rect x="8" y="1" width="18" height="12" rx="1.5" opacity="{bar_shade(look):g}"/>'
    else:
        line = "" if kind == "points" else f'<path class="line" d="M1 7H33"{dashes(look, kind)}/>'
        mark = "" if kind == "dashed" else f'<use href="#m{MARKS[look.marker]}" x="17" y="7"/>'
        inside = line + mark
    opened = '<svg class="swatch" viewBox="0 0 34 14" width="34" height="14" aria-hidden="true"'
    return f'{opened} style="color:var({colour})">{inside}</svg>'
