"""Claims: a statement of a paper, the quantity that decides it, and a verdict that never hides how much was run."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from layerwise.experiments.intervals import mean_interval
from layerwise.foundations.errors import InputError, describe, nearest

RELATIONS = ("<=", ">=", "<", ">", "within")
TESTS = ("every seed", "mean", "share")
HELD, NOT_HELD, NOT_ENOUGH = "held", "not held", "not enough runs"
EXPECTED = ("held", "refuted")


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement that records can confirm or refute.

    `quantity` gives one number a seed (a mapping from seed to number); the claim holds if every seed (or, with
    ``test="mean"``, the whole 95 % interval of the mean; ``test="share"``, at least the share `share` of the seeds)
    stands in `relation` to `target`. NaN stands in no relation to anything; ±∞ compares as usual.
    """

    name: str
    statement: str
    quantity: Callable[[Sequence["Mapping"]], Mapping[int, float | int]]
    """From the records of the experiment to one number a seed; seeds that lack a run are left out."""
    relation: str
    target: float | int | tuple[float | int, float | int]
    seeds: int = 1
    """Seeds that must have run before anything is said."""
    test: str = "every seed"
    expected: str = "held"
    """"held", or "refuted" for a known error of the paper (then say so in `erratum`)."""
    erratum: str = ""
    source: str = ""
    """Where the paper says so, such as "Figure 1" or "Lemma 3.7"."""
    share: float | int = 1.0
    """For ``test="share"``: the part of the seeds that must hold, in (0, 1]."""

    def __post_init__(self) -> None:
        def refuse(given: str, expected: str, do: str) -> None:
            raise InputError(describe(f"claim {self.name!r} with {given}", expected, do))

        if not self.name or not self.statement:
            refuse(f"statement={self.statement!r}", "a name and a statement", "say what the paper says")
        for field, known in (("relation", RELATIONS), ("test", TESTS), ("expected", EXPECTED)):
            if (given := getattr(self, field)) not in known:
                refuse(f"{field}={given!r}", f"one of {', '.join(map(repr, known))}", nearest(given, known))
        if (self.relation == "within") != isinstance(self.target, tuple):
            refuse(
                f"relation={self.relation!r} and target={self.target!r}",
                'a pair (low, high) for "within", a number for the others',
                "change one of them",
            )
        if any(math.isnan(bound) for bound in self._bounds()) or list(self._bounds()) != sorted(self._bounds()):
            refuse(f"target={self.target!r}", "numbers, the lower one first", "give the target again")
        least = 2 if self.test == "mean" else 1
        if self.seeds < least:
            refuse(f"seeds={self.seeds}", f"at least {least} for test={self.test!r}", f"pass seeds={least} or more")
        if not 0 < self.share <= 1:
            refuse(f"share={self.share}", "a number in (0, 1]", "pass e.g. share=0.8")
        if self.expected == "refuted" and not self.erratum:
            refuse('expected="refuted" and no erratum', "what is wrong in the paper", "explain it in erratum=")

    def _bounds(self) -> tuple[float | int, ...]:
        return self.target if isinstance(self.target, tuple) else (self.target,)

    def holds_for(self, value: float | int) -> bool:
        """Whether one number stands in the claim's relation to its target."""
        t = self._bounds()
        return {
            "<=": value <= t[0],
            ">=": value >= t[0],
            "<": value < t[0],
            ">": value > t[0],
            "within": t[0] <= value <= t[-1],
        }[self.relation]

    def condition(self) -> str:
        """The relation and target in words, such as ``≤ 0.1 for every seed``."""
        sign = {"<=": "≤", ">=": "≥", "within": "in"}.get(self.relation, self.relation)
        target = f"[{self.target[0]:g}, {self.target[1]:g}]" if isinstance(self.target, tuple) else f"{self.target:g}"
        whom = {
            "every seed": "for every seed",
            "mean": "for the 95 % interval of the mean",
            "share": f"for {100 * self.share:g} % of the seeds",
        }[self.test]
        return f"{sign} {target} {whom}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the records say of a claim, and on how many seeds."""

    claim: str
    status: str
    """"held", "not held" or "not enough runs"."""
    as_expected: bool | None
    """Whether the status is the one declared; None while there are not enough runs."""
    n: int
    """Seeds that gave a number."""
    needed: int
    low: float | None
    """The smallest over the seeds, NaN left out; with `mean` and `high`, None if there is none."""
    mean: float | None
    high: float | None
    interval: tuple[float, float] | None
    """The 95 % interval of the mean (Student's t), from two finite seeds on."""
    values: Mapping[int, float]
    """The quantity of each seed."""
    detail: str
    """One sentence: what was found, and what is odd about it."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        plain = asdict(self)
        return plain | {"values": {str(seed): value for seed, value in self.values.items()}}


def judge(claim: Claim, records: Sequence[Mapping]) -> Verdict:
    """Decide a claim from the records of one run of its experiment.

    >>> few = Claim(name="small", statement="The error is small.", relation="<=", target=0.1, seeds=2,
    ...             quantity=lambda records: {r["seed"]: r["values"]["error"] for r in records})
    >>> records = [{"seed": 0, "values": {"error": 0.05}}, {"seed": 1, "values": {"error": 0.07}}]
    >>> judge(few, records[:1]).status, judge(few, records).status
    ('not enough runs', 'held')
    """
    values = _quantity(claim, records) if records else {}
    ordered = list(values.values())
    numbers = [x for x in ordered if not math.isnan(x)]
    interval = mean_interval(ordered)
    decided = HELD if _holds(claim, ordered, interval) else NOT_HELD
    status = decided if len(values) >= claim.seeds else NOT_ENOUGH
    undefined = len(ordered) - len(numbers)
    return Verdict(
        claim=claim.name,
        status=status,
        as_expected=_as_expected(claim, status, undefined),
        n=len(values),
        needed=claim.seeds,
        low=min(numbers, default=None),
        mean=_mean(numbers),
        high=max(numbers, default=None),
        interval=interval,
        values=values,
        detail=_detail(claim, status, values),
    )


def _quantity(claim: Claim, records: Sequence[Mapping]) -> dict[int, float]:
    try:
        values = {int(seed): float(value) for seed, value in claim.quantity(records).items()}
    except Exception as error:
        raise InputError(
            describe(
                f"claim {claim.name!r}, whose quantity failed on {len(records)} records "
                f"({type(error).__name__}: {error})",
                "one number a seed; seeds that lack a run left out",
                "correct the quantity of the claim",
            )
        ) from error
    return dict(sorted(values.items()))


def by_seed(records: Sequence[Mapping], cell: str, value: str) -> dict[int, Any]:
    """One value of one cell, from seed to value, for use in a claim's quantity; seeds that lack a run are left out.

    >>> by_seed([{"cell": "kfac", "seed": 3, "values": {"dist": 0.1}}], "kfac", "dist")
    {3: 0.1}
    """
    return {r["seed"]: r["values"][value] for r in records if r["cell"] == cell and value in r["values"]}


def _mean(values: Sequence[float]) -> float | None:
    try:
        return statistics.fmean(values) if values else None
    except (OverflowError, ValueError):  # larger than a float, or ∞ − ∞
        return math.nan


def _holds(claim: Claim, values: Sequence[float], interval: tuple[float, float] | None) -> bool:
    if claim.test == "mean":
        return interval is not None and all(claim.holds_for(edge) for edge in interval)
    held = sum(claim.holds_for(value) for value in values)
    return held == len(values) if claim.test == "every seed" else held >= claim.share * len(values) - 1e-9


def _as_expected(claim: Claim, status: str, undefined: int) -> bool | None:
    if status == NOT_ENOUGH:
        return None
    # A number that is not one refutes nothing.
    return status == HELD if claim.expected == "held" else status == NOT_HELD and not undefined


def _detail(claim: Claim, status: str, values: Mapping[int, float]) -> str:
    if status == NOT_ENOUGH:
        return f"{len(values)} of {claim.seeds} seeds have run"
    failed = [seed for seed, value in values.items() if not claim.holds_for(value)]
    parts = [f"{len(values) - len(failed)} of {len(values)} seeds {claim.condition().split(' for ')[0]}"]
    if failed:
        parts.append("not seed " + ", ".join(map(str, failed[:10])) + (", …" if len(failed) > 10 else ""))
    for seed, value in values.items():
        if not math.isfinite(value):
            parts.append(f"seed {seed} gave {value}, which counts as {'not ' * (seed in failed)}held")
    if claim.test == "mean" and mean_interval(list(values.values())) is None:
        parts.append("no interval, because a value is not finite")
    if claim.expected == "refuted":
        parts.append("expected to be refuted" + (", but NaN refutes nothing" if _has_nan(values) else ""))
    return "; ".join(parts)


def _has_nan(values: Mapping[int, float]) -> bool:
    return any(math.isnan(value) for value in values.values())
