"""From records to curves with a band over seeds, and to claims that bound a value."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from layerwise.experiments.claims import EVERYTHING, Claim, by_seed
from layerwise.experiments.experiment import Record
from layerwise.experiments.figures import Curve


def band(records: Sequence[Record], cell: str, x: str, y: str, label: str, style: str = "line") -> Curve:
    """The median over seeds of a series, with least and largest; points where a seed is not finite are left out.

    >>> records = [{"cell": "a", "seed": s, "values": {}, "series": {"t": [0, 1], "d": [s, 2 * s]}} for s in (1, 2, 3)]
    >>> curve = band(records, "a", "t", "d", "SGD")
    >>> curve.y, curve.low, curve.high
    ([2, 4], [1, 2], [3, 6])
    """
    found = [record["series"] for record in records if record["cell"] == cell and y in record["series"]]
    if not found:
        return Curve(label=label, x=[], y=[], style=style)
    columns = list(zip(*(series[y] for series in found), strict=True))
    kept = [(at, ys) for at, ys in zip(found[0][x], columns, strict=True) if all(math.isfinite(v) for v in ys)]
    return Curve(
        label=label,
        x=[at for at, _ in kept],
        y=[statistics.median(ys) for _, ys in kept],
        low=[min(ys) for _, ys in kept],
        high=[max(ys) for _, ys in kept],
        style=style,
    )


def bars(records: Sequence[Record], cell: str, names: Mapping[str, str]) -> list[Curve]:
    """A bar for each value of a cell, from its name to its label: the median over seeds, with least and largest.

    A value that was not recorded, or not finite, keeps its place and has no bar.

    >>> records = [{"cell": "a", "seed": s, "values": {"kfac/loss": s}, "series": {}} for s in (1, 2, 3)]
    >>> (bar,) = bars(records, "a", {"kfac/loss": "KFAC"})
    >>> bar.label, bar.x, bar.y, bar.low, bar.high
    ('KFAC', [0], [2], [1], [3])
    """
    found = []
    for place, (name, label) in enumerate(names.items()):
        values = [r["values"][name] for r in records if r["cell"] == cell and name in r["values"]]
        finite = [v for v in values if math.isfinite(v)] or [math.nan]
        middle = statistics.median(values) if values else math.nan  # not finite if half of the seeds are not
        found.append(Curve(label=label, x=[place], y=[middle], low=[min(finite)], high=[max(finite)], style="bars"))
    return found


def unless_diverged(
    cell: str, at: str, quantity: Callable[[Sequence[Mapping]], Mapping[int, float | int | None]]
) -> Callable[[Sequence[Mapping]], dict[int, float | int | None]]:
    """A claim's quantity over the seeds that did not diverge: the others are None, and are counted apart.

    Args:
        cell: the cell of both.
        at: the value that holds the iteration at which the seed diverged, negative for one that did not.
        quantity: what is claimed of the others.

    >>> rows = [{"cell": "a", "seed": s, "values": {"sgd/diverged_at": d, "x": 1.0}} for s, d in ((0, -1), (1, 7))]
    >>> unless_diverged("a", "sgd/diverged_at", value("a", "x"))(rows)
    {0: 1.0, 1: None}
    """

    def found(records: Sequence[Mapping]) -> dict[int, float | int | None]:
        diverged = {seed for seed, iteration in by_seed(records, cell, at).items() if iteration >= 0}
        return {seed: None if seed in diverged else x for seed, x in quantity(records).items()}

    return found


SPANS = {
    "dist": (0, 1),
    "limit_dist": (0, 1),
    "loss": (0, math.inf),
    "population_loss": (0, math.inf),
    "transfer": (0, math.inf),
    "correlation": (0, 1),
    "alignment": (-1, 1),
}
"""The values that a quantity can take, by the last part of its name."""
POSITIVE = (0, math.inf)
"""The values of a ratio of positive numbers."""


def value(cell: str, name: str) -> Callable[[Sequence[Mapping]], dict[int, Any]]:
    """A claim's quantity: one value of one cell."""
    return lambda records: by_seed(records, cell, name)


def combined(
    cell: str, names: Sequence[str], function: Callable[..., float | int]
) -> Callable[[Sequence[Mapping]], dict[int, float | int]]:
    """A claim's quantity: a function of several values of one cell, such as their ratio.

    >>> records = [{"cell": "a", "seed": 0, "values": {"p": 1.0, "q": 4.0}}]
    >>> combined("a", ["p", "q"], lambda p, q: p / q)(records)
    {0: 0.25}
    """

    def quantity(records: Sequence[Mapping]) -> dict[int, float | int]:
        columns = [by_seed(records, cell, name) for name in names]
        seeds = set(columns[0]).intersection(*columns[1:])
        return {seed: function(*(column[seed] for column in columns)) for seed in sorted(seeds)}

    return quantity


def ratio(cell: str, above: str, below: str) -> Callable[[Sequence[Mapping]], dict[int, float | int]]:
    """A claim's quantity: one value of a cell over another; its span is `POSITIVE`. Over zero it is ∞.

    >>> ratio("a", "p", "q")([{"cell": "a", "seed": 0, "values": {"p": 1.0, "q": 4.0}}])
    {0: 0.25}
    """
    return combined(cell, [above, below], lambda p, q: p / q if q else math.inf)


def own_draws(cell: str, names: Sequence[str], **others: Any) -> Claim:
    """The claim that no two seeds of a cell share one of these values, such as "draws/problem" and "draws/start".

    >>> rows = [{"cell": "a", "seed": s, "values": {"x": x}} for s, x in ((0, 1.0), (1, 3.0))]
    >>> own_draws("a", ["x"]).quantity(rows)
    {0: 2.0, 1: 2.0}
    """

    def quantity(records: Sequence[Mapping]) -> dict[int, float]:
        columns = [by_seed(records, cell, name) for name in names]
        seeds = set(columns[0]).intersection(*columns[1:])
        return {
            seed: min(abs(column[seed] - column[other]) for column in columns for other in seeds - {seed})
            for seed in sorted(seeds)
            if len(seeds) > 1
        }

    return Claim(
        name=f"{cell}/own-draws",
        statement="Every seed has its own problem, start and batches: the least difference to another seed.",
        quantity=quantity,
        relation=">",
        target=1e-9,
        **{"span": POSITIVE, "seeds": 2} | others,
    )


def bound(
    cell: str,
    name: str,
    relation: str,
    target: float | int | tuple[float | int, float | int],
    statement: str,
    **others: Any,
) -> Claim:
    """The claim that a value of a cell stands in a relation to a number, on every seed."""
    return Claim(
        name=f"{cell}/{name}",
        statement=statement,
        quantity=value(cell, name),
        relation=relation,
        target=target,
        **{"span": SPANS.get(name.rpartition("/")[2].partition("@")[0], EVERYTHING)} | others,
    )


def distinct(cell: str, name: str, statement: str, **others: Any) -> Claim:
    """The claim that a value that depends on nothing but a seed's draws differs from seed to seed.

    What decides it is, for each seed, the least difference from another one: zero if the seed was ignored.

    >>> records = [{"cell": "a", "seed": s, "values": {"x": x}} for s, x in ((0, 1.0), (1, 4.0), (2, 5.0))]
    >>> distinct("a", "x", "Seeds differ.").quantity(records)
    {0: 3.0, 1: 1.0, 2: 1.0}
    """

    def quantity(records: Sequence[Mapping]) -> dict[int, float]:
        found = by_seed(records, cell, name)
        return {
            seed: min((abs(x - other) for s, other in found.items() if s != seed), default=math.inf)
            for seed, x in found.items()
        }

    options: dict[str, Any] = {"span": (0, math.inf)} | others
    return Claim(
        name=f"{cell}/seeds-differ",
        statement=statement,
        quantity=quantity,
        relation=">",
        target=0,
        **options,
    )
