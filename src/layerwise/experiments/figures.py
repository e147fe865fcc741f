"""Figures as data: what is drawn, not how. `layerwise.report` draws them."""

from collections.abc import Sequence
from dataclasses import dataclass

SCALES = ("linear", "log")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line (or set of points) of a panel, with a band where several seeds were run."""

    label: str
    """What the legend says; an algorithm's name gets the same colour on every page."""
    x: Sequence[float | int]
    y: Sequence[float | int]
    low: Sequence[float | int] | None = None
    """Lower edge of the band, such as the smallest over seeds."""
    high: Sequence[float | int] | None = None
    style: str = "line"
    """"line", "points" (simulation), "dashed" (theory, a limit or a bound) or "bars"."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    x_scale: str = "linear"
    y_scale: str = "linear"
    places: Sequence[str] = ()
    """What stands at x = 0, 1, 2, … where x is no number; bars with a place each are named by their labels anyway."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A row of panels that share a legend."""

    name: str
    """Part of the file's name: letters, digits and dashes."""
    title: str
    caption: str
    panels: Sequence[Panel]
