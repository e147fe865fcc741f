"""Claims that means over trials agree with a theory: within a tolerance, and within their own standard errors."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Record
from layerwise.experiments.figures import Curve
from layerwise.experiments.intervals import mean_interval

TRIALS = 30
"""Trials for which tolerances are stated; fewer have wider ones, as their standard errors are."""
FEW_TRIALS = 12
"""Trials from which on something is said about standard errors."""


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """One point: the mean over trials less the theory, and the standard error of that mean."""

    difference: float
    error: float

    @property
    def score(self) -> float:
        """The difference in standard errors."""
        if self.error > 0:
            return abs(self.difference) / self.error
        return math.inf if self.difference else 0.0


def deviations(records: Sequence[Record], cell: str, names: Sequence[str]) -> list[Deviation]:
    """Of every point of the values or series `names`; the theory of "kfac" is called "kfac/theory".

    >>> series = [{"kfac": [1.0, 2.0], "kfac/theory": [2.0, 3.0]}, {"kfac": [3.0, 2.0], "kfac/theory": [2.0, 3.0]}]
    >>> records = [{"cell": "a", "seed": seed, "values": {}, "series": each} for seed, each in enumerate(series)]
    >>> [(d.difference, d.error) for d in deviations(records, "a", ["kfac"])]
    [(0.0, 1.0), (-1.0, 0.0)]
    """
    found = [record for record in records if record["cell"] == cell]
    points = []
    for name in names if len(found) > 1 else ():
        columns = zip(*(_column(record, name) for record in found), strict=True)
        for values, theory in zip(columns, _column(found[0], f"{name}/theory"), strict=True):
            error = statistics.stdev(values) / len(values) ** 0.5
            points.append(Deviation(difference=statistics.fmean(values) - theory, error=error))
    return points


def _column(record: Record, name: str) -> Sequence[float]:
    return [record["values"][name]] if name in record["values"] else record["series"][name]


def agreement(
    cell: str, names: Sequence[str], *, seeds: int, tolerance: float, source: str, note: str = ""
) -> list[Claim]:
    """Simulated means are near the theory, and as near as chance allows.

    The first claim, the paper's, has the tolerance of thirty trials, times √(30/seeds) for fewer. The others are ours:
    from thirty trials on at most a tenth of the points is beyond two standard errors (with `note`) and none beyond
    four; from twelve on none beyond six, as errors estimated from few trials are less certain themselves. Trials that
    are all the same have no error at all, and fail these.
    """
    wider = max(1.0, TRIALS / seeds) ** 0.5

    def of_all(function: Callable[[list[Deviation]], float]) -> Callable[[Sequence[Mapping]], dict[int, float | int]]:
        return over_trials(cell, lambda found: function(deviations(found, cell, names)))

    def none_beyond(name: str, errors: int) -> Claim:
        return Claim(
            name=f"{cell}/beyond-{name}-errors",
            statement=f"No point differs from the theory by {name} standard errors of its mean (largest difference).",
            quantity=of_all(lambda points: max(point.score for point in points)),
            relation="<=",
            target=errors,
            seeds=seeds,
            span=(0, math.inf),
        )

    found = [
        Claim(
            name=f"{cell}/near-theory",
            statement="The mean correlation is the predicted one at every point (largest difference).",
            quantity=of_all(lambda points: max(abs(point.difference) for point in points)),
            relation="<=",
            target=tolerance * wider,
            seeds=seeds,
            origin="paper",
            source=source,
            span=(0, 1),
        )
    ]
    if seeds >= TRIALS:
        found += [
            Claim(
                name=f"{cell}/beyond-two-errors",
                statement="At most a tenth of the points differ from the theory by two standard errors of their mean.",
                quantity=of_all(lambda points: sum(point.score > 2 for point in points) / len(points)),
                relation="<=",
                target=0.1,
                note=note,
                seeds=seeds,
                span=(0, 1),
            ),
            none_beyond("four", 4),
        ]
    elif seeds >= FEW_TRIALS:
        found.append(none_beyond("six", 6))
    return found


def in_groups(cell: str, names: Sequence[str], *, seeds: int, why: str = "") -> list[Claim]:
    """Our two claims about standard errors once more, for every thirty trials on their own instead of all at once."""
    groups = seeds // TRIALS

    def scores(found: Sequence[Mapping]) -> list[float]:
        ordered = sorted(found, key=lambda record: record["seed"])
        parts = [ordered[i * TRIALS : (i + 1) * TRIALS] for i in range(len(ordered) // TRIALS)]
        return [point.score for part in parts for point in deviations(part, cell, names)]

    return [
        Claim(
            name=f"{cell}/groups-beyond-two-errors",
            statement=f"In {groups} groups of {TRIALS} trials at most a tenth of the points are two errors off.",
            quantity=over_trials(cell, lambda found: _share_beyond(scores(found), 2)),
            relation="<=",
            target=0.1,
            expected="fails" if why else "held",
            why=why,
            seeds=seeds,
        ),
        Claim(
            name=f"{cell}/groups-beyond-four-errors",
            statement=f"In {groups} groups of {TRIALS} trials no point is four errors off (largest difference).",
            quantity=over_trials(cell, lambda found: max(scores(found), default=math.nan)),
            relation="<=",
            target=4.0,
            seeds=seeds,
        ),
    ]


def _share_beyond(scores: Sequence[float], errors: float | int) -> float:
    return sum(score > errors for score in scores) / len(scores) if scores else math.nan


def over_trials(
    cell: str, function: Callable[[Sequence[Mapping]], float | int]
) -> Callable[[Sequence[Mapping]], dict[int, float | int]]:
    """A claim's quantity: one number of all trials of a cell together, said of each; none below two trials.

    >>> records = [{"cell": "a", "seed": seed, "series": {}} for seed in (3, 4)]
    >>> over_trials("a", len)(records), over_trials("a", len)(records[:1])
    ({3: 2, 4: 2}, {})
    """

    def quantity(records: Sequence[Mapping]) -> dict[int, float | int]:
        found = [record for record in records if record["cell"] == cell]
        return dict.fromkeys([record["seed"] for record in found], function(found)) if len(found) > 1 else {}

    return quantity


def means(records: Sequence[Record], cell: str, x: str, y: str, label: str) -> Curve:
    """The mean over trials of a series as points, with its 95 % interval as a band.

    >>> records = [{"cell": "a", "seed": s, "values": {}, "series": {"t": [0], "d": [s]}} for s in (1, 2, 3)]
    >>> curve = means(records, "a", "t", "d", "SGD")
    >>> curve.y, [round(edge, 2) for edge in curve.low]
    ([2], [-0.48])
    """
    found = [record["series"] for record in records if record["cell"] == cell and y in record["series"]]
    if not found:
        return Curve(label=label, x=[], y=[], style="points")
    columns = list(zip(*(series[y] for series in found), strict=True))
    averages = [statistics.mean(values) for values in columns]
    intervals = [mean_interval(values) or (mean, mean) for values, mean in zip(columns, averages, strict=True)]
    return Curve(
        label=label,
        x=list(found[0][x]),
        y=averages,
        low=[low for low, _ in intervals],
        high=[high for _, high in intervals],
        style="points",
    )
