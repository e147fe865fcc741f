"""Numbers, targets and times as a page says them."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from layerwise.experiments.claims import Claim, Verdict
from layerwise.report.ticks import power_of_ten

NONE = "–"


def number(value: float | int | None) -> str:
    """Three digits, with a power of ten where zeros would have to be counted.

    >>> number(0.03127), number(2.5e-7), number(190000.0), number(15), number(float("nan")), number(None)
    ('0.0313', '2.5 × 10⁻⁷', '1.9 × 10⁵', '15', 'not a number', '–')
    """
    if value is None:
        return NONE
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0 or 1e-4 <= abs(value) < 1e5:
        return f"{value:.4g}".replace("-", "−") if abs(value) >= 1000 else f"{value:.3g}".replace("-", "−")
    digits, exponent = f"{value:.2e}".split("e")
    lead = f"{float(digits):g}".replace("-", "−")
    return f"{lead} × {power_of_ten(int(exponent))}"


def interval(edges: Sequence[float | int] | None) -> str:
    """Both ends of an interval.

    >>> interval((0.02, 0.041)), interval(None)
    ('[0.02, 0.041]', '–')
    """
    return NONE if edges is None else f"[{number(edges[0])}, {number(edges[1])}]"


def target(claim: Claim) -> str:
    """The relation and the number, without the test: ``≤ 0.12``."""
    sign = {"<=": "≤", ">=": "≥", "within": "in"}.get(claim.relation, claim.relation)
    shown = interval(claim.target) if isinstance(claim.target, tuple) else number(claim.target)
    return f"{sign} {shown}"


def whom(claim: Claim) -> str:
    """For whom the target must be met."""
    if claim.test == "share":
        return f"{100 * claim.share:g} % of the seeds"
    return {"every seed": "every seed", "mean": "the 95 % interval of the mean"}[claim.test]


PRESETS = {
    "smoke": "the smallest size, which shows in seconds that it works",
    "laptop": "a size for a laptop",
    "paper": "as near to the paper as this experiment gets",
}
"""What a preset is, for a reader who meets the word for the first time."""

OUTCOMES = {
    "held": "held",
    "known": "refuted",
    "misprint": "misprint",
    "failed": "failed",
    "surprise": "held, but known to fail",
    "few": "not enough runs",
    "error": "could not be judged",
    "not-run": "not run",
}
"""What a page says of a claim, by the class that colours it."""

MEANINGS = {
    "held": "the numbers agree with the statement",
    "known": "the numbers contradict the statement, and the page says why",
    "misprint": "the text prints it wrong: it fails as printed, and the correction is a claim of its own beside it",
    "failed": "expected to hold, and it does not: not explained yet",
    "surprise": "declared to fail, and it holds",
    "few": "fewer seeds have run than the claim asks for",
    "error": "its quantity could not be computed from the records",
    "not-run": "there are no records",
}
"""The same for a reader who meets the words for the first time."""


def outcome(claim: Claim, verdict: Verdict) -> str:
    """Which of `OUTCOMES` a verdict is."""
    if verdict.as_expected is None:
        return "few"
    if claim.expected == "fails":
        known = "misprint" if claim.origin == "misprint" else "known"
        return known if verdict.as_expected else "surprise" if verdict.status == "held" else "failed"
    return "held" if verdict.as_expected else "failed"


_PHRASES = {
    "held": ("held", "held"),
    "known": ("is refuted", "are refuted"),
    "misprint": ("is a misprint", "are misprints"),
    "failed": ("failed", "failed"),
    "surprise": ("held though known to fail", "held though known to fail"),
    "few": ("lacks runs", "lack runs"),
    "error": ("could not be judged", "could not be judged"),
    "not-run": ("was not run", "were not run"),
}


def summed_up(tally: Sequence[tuple[str, int, str]]) -> str:
    """A tally as a sentence.

    >>> summed_up([("held", 21, "held"), ("known", 1, "refuted"), ("few", 2, "not enough runs")])
    'Of 24 claims, 21 held, 1 is refuted and 2 lack runs.'
    >>> summed_up([("held", 3, "held")]), summed_up([])
    ('All 3 claims held.', 'No claims are made.')
    """
    total = sum(count for _, count, _ in tally)
    if not total:
        return "No claims are made."
    parts = [f"{count} {_PHRASES[kind][count > 1]}" for kind, count, _ in tally]
    if len(parts) == 1:
        words = _PHRASES[tally[0][0]]
        return f"The one claim {words[0]}." if total == 1 else f"All {total} claims {words[1]}."
    return f"Of {total} claims, {', '.join(parts[:-1])} and {parts[-1]}."


WHY = {"paper": "Why it fails:", "misprint": "What is right:", "ours": "Why it fails:"}
"""What precedes the reason for which a claim is known to fail, by its origin."""


def counted(verdict: Verdict) -> str:
    """How many seeds decide, how many of them hold where a share is claimed, and how many diverged."""
    parts = [f"{verdict.n}"]
    if verdict.share is not None:
        low, high = verdict.share
        parts = [f"{verdict.held} of {verdict.n} ({100 * low:.0f} to {100 * high:.0f} %)"]
    if verdict.diverged:
        parts.append(f"{len(verdict.diverged)} diverged")
    return ", ".join(parts)


def moment(value: Any) -> str:
    """A time of a manifest (seconds since 1970, or ISO 8601) to the minute, in UTC; what is neither, as it is.

    >>> moment("2026-11-15T08:41:33+00:00"), moment(0), moment("long ago")
    ('2026-11-15 08:41 UTC', '1970-01-01 00:00 UTC', 'long ago')
    """
    try:
        if isinstance(value, int | float):
            when = datetime.fromtimestamp(value, UTC)
        else:
            when = datetime.fromisoformat(str(value))
            when = when.astimezone(UTC) if when.tzinfo else when.replace(tzinfo=UTC)
    except (ValueError, OverflowError, OSError):
        return str(value)
    return when.strftime("%Y-%m-%d %H:%M UTC")


def duration(seconds: float | int) -> str:
    """How long something took, as one would say it.

    >>> duration(0.42), duration(75), duration(7300)
    ('0.4 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
