"""What experiments on masked sparse coding share: one cell a setting, both objectives in it, claims over cells."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from layerwise.experiments.claims import Claim, by_seed
from layerwise.experiments.experiment import Cell, Record, Row
from layerwise.experiments.figures import Curve, Panel
from layerwise.experiments.over_seeds import band, combined
from layerwise.experiments.progress import within_cell

if TYPE_CHECKING:
    from layerwise.studies.masked_sparse_coding.comparison import Setting

OBJECTIVES = ("standard", "masked")
LABELS = {"standard": "standard loss", "masked": "masked loss", "start": "start"}
"""In figures."""
STARTS = {"sample": "from samples", "local": "from the truth"}
Quantity = Callable[[Sequence[Mapping]], dict[int, float | int]]


def compared(setting: Setting, seeds: Sequence[int], every: int) -> Iterator[Row]:
    """A row a seed: recovery errors at the start and at the end, the least along the way, and their course."""
    from layerwise.studies.masked_sparse_coding.comparison import compare

    found = compare(setting, seeds, every=every, progress=within_cell())
    for place, seed in enumerate(seeds):
        curves = {name: found[name][place] for name in OBJECTIVES}
        values: dict[str, float | int] = {"start": curves["masked"].error[0]}
        for name, curve in curves.items():
            least = min(curve.error)
            values |= {name: curve.error[-1], f"least/{name}": least}
            values[f"least/{name}/epoch"] = curve.epoch[curve.error.index(least)]
        series = {"epoch": curves["masked"].epoch, **{name: curve.error for name, curve in curves.items()}}
        yield Row(seed=seed, values=values, series=series)


def gap(cell: str) -> Quantity:
    """By how much the standard objective's error is larger."""
    return combined(cell, OBJECTIVES, lambda standard, masked: standard - masked)


def across(places: Sequence[tuple[str, str]], function: Callable[..., float | int]) -> Quantity:
    """A claim's quantity: a function of values of several cells.

    >>> rows = [{"cell": c, "seed": 0, "values": {"x": x}} for c, x in (("a", 1.0), ("b", 3.0))]
    >>> across([("a", "x"), ("b", "x")], lambda a, b: b - a)(rows)
    {0: 2.0}
    """

    def quantity(records: Sequence[Mapping]) -> dict[int, float | int]:
        columns = [by_seed(records, cell, name) for cell, name in places]
        seeds = set(columns[0]).intersection(*columns[1:])
        return {seed: function(*(column[seed] for column in columns)) for seed in sorted(seeds)}

    return quantity


def from_printed(cell: str, name: str, printed: float) -> Quantity:
    """How far the mean over seeds is from a printed one; the same number for every seed.

    >>> rows = [{"cell": "a", "seed": s, "values": {"x": x}} for s, x in ((0, 1.0), (1, 3.0))]
    >>> from_printed("a", "x", 2.5)(rows)
    {0: 0.5, 1: 0.5}
    """

    def quantity(records: Sequence[Mapping]) -> dict[int, float | int]:
        found = by_seed(records, cell, name)
        return {seed: abs(statistics.fmean(found.values()) - printed) for seed in found}

    return quantity


def printed_claims(
    table: Mapping[str, Mapping[str, float]], tolerance: float, source: str, seeds: int, known: Mapping[str, str]
) -> list[Claim]:
    """That means over seeds are those of a figure of the thesis; `known` has a note for entries that are worth one."""
    found = []
    for cell, pair in table.items():
        for name, printed in pair.items():
            where = f"{cell}/{name}"
            found.append(
                Claim(
                    name=f"{where}/printed",
                    statement=f"{cell}, {name}: the mean recovery error is {printed:g}, as in the figure (difference).",
                    quantity=from_printed(cell, name, printed),
                    relation="<=",
                    target=tolerance,
                    origin="paper",
                    source=source,
                    seeds=seeds,
                    span=(0, 1),
                    note=FIGURE + known.get(where, ""),
                )
            )
    return found


FIGURE = (
    "Read by eye, to about ±.004, from plots that the authors publish; the same configuration in two of their figures "
    "differs by up to .010. "
)


def course(records: Sequence[Record], cell: str, title: str) -> Panel:
    """Errors along a training."""
    curves = [band(records, cell, "epoch", name, LABELS[name]) for name in OBJECTIVES]
    return Panel(title=title, x_label="epoch", y_label="recovery error", curves=curves)


def swept(
    records: Sequence[Record],
    places: Mapping[float | int, str],
    title: str,
    x_label: str,
    printed: Mapping[str, Mapping[str, float]] | None = None,
) -> Panel:
    """Errors at the end over what was swept, from x to the cell; medians and least and largest over seeds."""

    def over(name: str, style: str) -> Curve:
        columns = {x: list(by_seed(records, cell, name).values()) for x, cell in places.items()}
        kept = {x: column for x, column in columns.items() if column}
        return Curve(
            label=LABELS[name],
            x=list(kept),
            y=[statistics.median(column) for column in kept.values()],
            low=[min(column) for column in kept.values()],
            high=[max(column) for column in kept.values()],
            style=style,
        )

    curves = [over("start", "dashed"), *(over(name, "line") for name in OBJECTIVES)]
    for name in OBJECTIVES if printed else ():
        known = {x: (printed or {})[cell][name] for x, cell in places.items() if cell in (printed or {})}
        curves.append(Curve(label=f"thesis, {name}", x=list(known), y=list(known.values()), style="points"))
    return Panel(title=title, x_label=x_label, y_label="recovery error", curves=curves)


def cell_of(start: str, value: float | int) -> str:
    """The key of a setting.

    >>> cell_of("sample", 500)
    'sample/500'
    """
    return f"{start}/{value:g}"


def cells_of(starts: Sequence[str], name: str, values: Sequence[float | int]) -> list[Cell]:
    """One a start and a value of what is swept."""
    return [Cell(key=cell_of(start, x), options={"start": start, name: x}) for start in starts for x in values]


def common(seeds: int, source: str, note: str = "") -> dict[str, Any]:
    """Of claims that the thesis makes in words or by a figure."""
    return {"seeds": seeds, "origin": "paper", "source": source, "note": note}
