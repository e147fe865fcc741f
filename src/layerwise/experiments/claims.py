"""Claims: a statement, who makes it, the quantity that decides it, and a verdict that says how much was run."""

import math
import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from layerwise.experiments.intervals import at_most, mean_interval, share_interval
from layerwise.foundations.errors import InputError, describe, not_one_of

COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
RELATIONS = (*COMPARE, "within")
TESTS = ("every seed", "mean", "share")
HELD, NOT_HELD, NOT_ENOUGH = "held", "not held", "not enough runs"
EXPECTED = ("held", "fails")
ORIGINS = {
    "paper": "the paper's statement",
    "misprint": "the paper prints an error",
    "ours": "we expected",
}
"""Who makes a claim, in words."""
EVERYTHING = (-math.inf, math.inf)
SO_FEW = 0.3
"""Stated shares leave a margin below what was measured, so that a large level seldom errs; with a small one no claim
about a share could fail on the two seeds that a small preset has."""
FEW = 5
"""Below this many seeds the values themselves are shown: an interval of so few says more than they do."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement that records can confirm or refute.

    `quantity` gives one number a seed (a mapping from seed to number); the claim holds if every seed (or, with
    ``test="mean"``, the whole 95 % interval of the mean; ``test="share"``, so many seeds as go with the share `share`)
    stands in `relation` to `target`. A claim about a share fails if so few seeds, were the share as stated, would be
    seen with a probability below `SO_FEW`: one seed of two does not contradict three quarters, none of two does. NaN
    stands in no relation to anything; ±∞ compares as usual. A seed whose quantity is None has diverged: it is counted
    apart, and the others decide.
    """

    name: str
    statement: str
    quantity: Callable[[Sequence["Mapping"]], Mapping[int, float | int | None]]
    """From the records of the experiment to one number a seed, None where the seed diverged and the claim is only
    about runs that did not; seeds that lack a run are left out."""
    relation: str
    target: float | int | tuple[float | int, float | int]
    seeds: int = 1
    """Seeds that must have run before anything is said."""
    test: str = "every seed"
    origin: str = "ours"
    """Who says it: "paper" (its authors do, in `source`; the number that decides it may be ours), "misprint" (what the
    paper prints there is wrong), "ours" (we expected it; the paper says no such thing)."""
    expected: str = "held"
    """"held", or "fails" for a statement that is known to fail: then `why` says why."""
    why: str = ""
    """For ``expected="fails"``: why it fails; for a misprint, what is right."""
    note: str = ""
    """How the statement became numbers: which reading, and if a threshold was changed, from what and why."""
    source: str = ""
    """Where the paper says so, such as "Figure 1" or "Lemma 3.7"."""
    share: float | int = 1.0
    """For ``test="share"``: the part of all seeds, in (0, 1], that the statement is about."""
    span: tuple[float | int, float | int] = EVERYTHING
    """The least and largest value that the quantity can take; an interval of its mean is cut to it."""

    def __post_init__(self) -> None:
        def refuse(given: str, expected: str, do: str) -> None:
            raise InputError(describe(f"claim {self.name!r} with {given}", expected, do))

        if not self.name or not self.statement:
            refuse(f"statement={self.statement!r}", "a name and a statement", "say what is claimed")
        known = {"relation": RELATIONS, "test": TESTS, "expected": EXPECTED, "origin": tuple(ORIGINS)}
        for field, allowed in known.items():
            if (given := getattr(self, field)) not in allowed:
                raise InputError(not_one_of(field, given, allowed, where=f"in claim {self.name!r}"))
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
        if not self.span[0] < self.span[1]:
            refuse(f"span={self.span}", "the least and the largest possible value", "pass e.g. span=(0, 1)")
        if (self.expected == "fails") != bool(self.why):
            refuse(
                f"expected={self.expected!r} and why={self.why!r}",
                'a reason for expected="fails", and none otherwise',
                "say in why= what is wrong with the statement, or move a remark to note=",
            )
        if self.origin == "misprint" and self.expected != "fails":
            refuse('origin="misprint" and expected="held"', 'expected="fails"', 'say origin="paper" if it holds')
        if self.origin != "ours" and not self.source:
            refuse(f"origin={self.origin!r} and no source", "where the paper says so", 'pass e.g. source="Figure 1"')

    def _bounds(self) -> tuple[float | int, ...]:
        return self.target if isinstance(self.target, tuple) else (self.target,)

    def holds_for(self, value: float | int) -> bool:
        """Whether one number stands in the claim's relation to its target."""
        if isinstance(self.target, tuple):
            return self.target[0] <= value <= self.target[1]
        return COMPARE[self.relation](value, self.target)

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
    held: int
    """Those of them that stand in the claim's relation to its target."""
    diverged: tuple[int, ...]
    """Seeds that diverged; they are counted apart and decide nothing."""
    needed: int
    low: float | None
    """The smallest over the seeds, NaN left out; with `mean` and `high`, None if there is none."""
    mean: float | None
    high: float | None
    interval: tuple[float, float] | None
    """The 95 % interval of the mean (Student's t, cut to the values that are possible); None below `FEW` seeds, where
    the values are shown instead, unless the claim is about the mean."""
    share: tuple[float, float] | None
    """For a claim about a share of seeds: the 95 % interval of that share (Clopper and Pearson)."""
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
    found = _quantity(claim, records) if records else {}
    values = {seed: value for seed, value in found.items() if value is not None}
    diverged = tuple(seed for seed, value in found.items() if value is None)
    ordered = list(values.values())
    numbers = [x for x in ordered if not math.isnan(x)]
    interval = mean_interval(ordered, span=claim.span)
    held = sum(claim.holds_for(value) for value in ordered)
    decided = HELD if _holds(claim, held, len(ordered), interval) else NOT_HELD
    status = decided if len(found) >= claim.seeds and ordered else NOT_ENOUGH
    undefined = len(ordered) - len(numbers)
    return Verdict(
        claim=claim.name,
        status=status,
        as_expected=_as_expected(claim, status, undefined),
        n=len(values),
        held=held,
        diverged=diverged,
        needed=claim.seeds,
        low=min(numbers, default=None),
        mean=_mean(numbers),
        high=max(numbers, default=None),
        interval=interval if claim.test == "mean" or len(ordered) >= FEW else None,
        share=share_interval(held, len(ordered)) if claim.test == "share" and ordered else None,
        values=values,
        detail=_detail(claim, status, values, diverged),
    )


def _quantity(claim: Claim, records: Sequence[Mapping]) -> dict[int, float | None]:
    try:
        found = claim.quantity(records).items()
        values = {int(seed): None if value is None else float(value) for seed, value in found}
    except Exception as error:
        raise InputError(
            describe(
                f"claim {claim.name!r}, whose quantity failed on {len(records)} records "
                f"({type(error).__name__}: {error})",
                "one number a seed, or None for one that diverged; seeds that lack a run left out",
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


def _holds(claim: Claim, held: int, n: int, interval: tuple[float, float] | None) -> bool:
    if claim.test == "mean":
        return interval is not None and all(claim.holds_for(edge) for edge in interval)
    return held == n if claim.test == "every seed" else at_most(held, n, claim.share) >= SO_FEW


def _as_expected(claim: Claim, status: str, undefined: int) -> bool | None:
    if status == NOT_ENOUGH:
        return None
    # A number that is not one refutes nothing.
    return status == HELD if claim.expected == "held" else status == NOT_HELD and not undefined


def _detail(claim: Claim, status: str, values: Mapping[int, float], diverged: Sequence[int]) -> str:
    apart = f"seed {_seeds(diverged)} diverged and {'are' if len(diverged) > 1 else 'is'} counted apart"
    if status == NOT_ENOUGH:
        parts = [f"{len(values) + len(diverged)} of {claim.seeds} seeds have run"]
        return "; ".join([*parts, apart] if diverged else parts)
    failed = [seed for seed, value in values.items() if not claim.holds_for(value)]
    parts = [f"{len(values) - len(failed)} of {len(values)} seeds {claim.condition().split(' for ')[0]}"]
    if failed:
        parts.append(f"not seed {_seeds(failed)}")
    if diverged:
        parts.append(apart)
    for seed, value in values.items():
        if not math.isfinite(value):
            parts.append(f"seed {seed} gave {value}, which counts as {'not ' * (seed in failed)}held")
    if claim.test == "mean" and mean_interval(list(values.values())) is None:
        parts.append("no interval, because a value is not finite")
    if claim.expected == "fails":
        parts.append("known to fail" + (", but NaN refutes nothing" if _has_nan(values) else ""))
    return "; ".join(parts)


def _seeds(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds[:10])) + (", …" if len(seeds) > 10 else "")


def _has_nan(values: Mapping[int, float]) -> bool:
    return any(math.isnan(value) for value in values.values())
