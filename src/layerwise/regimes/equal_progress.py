"""Two trainings compared where they have come equally far, never at equal numbers of steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from layerwise.foundations.errors import InputError, NameLookupError, describe, unknown

Log = Mapping[str, Sequence[float | int]]
"""Columns of equal lengths, one entry a logged point."""


@dataclass(frozen=True)
class EqualProgress:
    """Metrics of two trainings at common values of their progress."""

    progress: str
    thresholds: tuple[float, ...]
    """Those that both reached, in the order given."""
    a: Mapping[str, tuple[float, ...]]
    """From a metric to its value in the first training at each threshold."""
    b: Mapping[str, tuple[float, ...]]
    dropped: Mapping[float, str] = field(default_factory=dict)
    """Thresholds that were left out, and why."""

    def difference(self, metric: str) -> tuple[float, ...]:
        """The first minus the second, at each threshold."""
        if metric not in self.a:
            raise NameLookupError(unknown("metric", metric, self.a))
        return tuple(x - y for x, y in zip(self.a[metric], self.b[metric], strict=True))

    def __str__(self) -> str:
        head = [self.progress, *(f"{metric}, {run}" for metric in self.a for run in "ab")]
        lines = ["  ".join(f"{name:>12s}" for name in head)]
        for k, threshold in enumerate(self.thresholds):
            row = [threshold, *(run[metric][k] for metric in self.a for run in (self.a, self.b))]
            lines.append("  ".join(f"{x:12.4g}" for x in row))
        return "\n".join([*lines, *(f"{threshold:g} left out: {why}" for threshold, why in self.dropped.items())])


def at_equal_progress(
    log_a: Log,
    log_b: Log,
    progress: str,
    thresholds: Sequence[float | int],
    metrics: Sequence[str],
    interpolate: bool = True,
    rising: bool = False,
) -> EqualProgress:
    """Metrics of two trainings at the first point where each has come as far as a threshold.

    >>> fast = {"loss": [2.0, 1.0, 0.4], "noisy": [2.0, 2.5, 3.0]}
    >>> slow = {"loss": [2.0, 1.5, 1.0], "noisy": [2.0, 2.1, 2.2]}
    >>> found = at_equal_progress(fast, slow, progress="loss", thresholds=[1.0, 0.5], metrics=["noisy"])
    >>> found.thresholds, [round(d, 3) for d in found.difference("noisy")]
    ((1.0,), [0.3])
    >>> found.dropped
    {0.5: 'b came to 1 only'}

    Args:
        log_a: columns of the first training: its progress, and all metrics, one entry a logged point.
        log_b: those of the second; its points may be others.
        progress: the column that says how far a training is, such as the loss; made monotone by its running minimum.
        thresholds: values of it.
        metrics: columns to compare.
        interpolate: between the point and the one before, linearly in the progress; False takes the first point that
            is as far, whose progress may be well beyond the threshold.
        rising: the progress rises, as an accuracy does: its running maximum counts.
    """
    for log, name in ((log_a, "log_a"), (log_b, "log_b")):
        _check(log, name, [progress, *metrics])
    sign = -1.0 if rising else 1.0
    runs = [_monotone([sign * float(x) for x in log[progress]]) for log in (log_a, log_b)]
    kept, dropped = [], {}
    for threshold in thresholds:
        missed = [
            f"{name} came to {sign * run[-1]:.4g} only"
            for name, run in zip("ab", runs, strict=True)
            if not run[-1] <= sign * threshold
        ]
        if not missed:
            hint = "" if rising else "; of a progress that rises, say rising=True"
            missed = [f"{n} begins beyond it{hint}" for n, r in zip("ab", runs, strict=True) if r[0] < sign * threshold]
        if missed:
            dropped[threshold] = ", ".join(missed)
        else:
            kept.append(threshold)
    places = [[_place(run, sign * threshold, interpolate) for threshold in kept] for run in runs]
    a, b = (
        {metric: tuple(_read(log[metric], place) for place in at) for metric in metrics}
        for log, at in zip((log_a, log_b), places, strict=True)
    )
    return EqualProgress(progress, tuple(kept), a, b, dropped)


def _monotone(values: Sequence[float]) -> list[float]:
    """The running minimum; NaN is no progress."""
    found, least = [], math.inf
    for value in values:
        least = value if value < least else least
        found.append(least)
    return found


def _place(run: Sequence[float], threshold: float, interpolate: bool) -> tuple[int, int, float]:
    """The point before, the first one at or below the threshold, and how far the threshold is on the way.

    The point before is where the running minimum was attained, for the progress may have been worse in between.
    """
    k = next(k for k, value in enumerate(run) if value <= threshold)
    if k == 0 or not interpolate or math.isinf(run[k - 1]):
        return k, k, 1.0
    return run.index(run[k - 1]), k, (run[k - 1] - threshold) / (run[k - 1] - run[k])


def _read(column: Sequence[float | int], place: tuple[int, int, float]) -> float:
    before, k, part = place
    after = float(column[k])
    return after if part == 1.0 else float(column[before]) + part * (after - float(column[before]))


def _check(log: Log, name: str, columns: Sequence[str]) -> None:
    for column in columns:
        if column not in log:
            raise NameLookupError(unknown("column", column, log, where=f"of {name}"))
    lengths = {column: len(log[column]) for column in columns}
    if len(set(lengths.values())) > 1 or not all(lengths.values()):
        given = f"{name} with columns of lengths {lengths}"
        raise InputError(describe(given, "one length, of a point at least", "log every metric at every point"))
