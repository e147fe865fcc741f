"""A claim at a glance: one dot a seed on a short line, the part where the claim holds shaded."""

import math
from collections.abc import Sequence

from layerwise.experiments.claims import Claim

WIDTH, HEIGHT, EDGE = 128, 20, 6


def strip(claim: Claim, values: Sequence[float | int]) -> str:
    """The drawing, or nothing where no value is finite; the axis is logarithmic if values span more than a decade.

    >>> from layerwise.experiments.claims import Claim
    >>> small = Claim(name="c", statement="s", relation="<=", target=0.1, quantity=lambda records: {})
    >>> strip(small, [0.05, 0.2]).count("h0"), strip(small, [float("nan")])
    (2, '')
    """
    finite = [value for value in values if math.isfinite(value)]
    bounds = [bound for bound in _bounds(claim) if math.isfinite(bound)]
    if not finite or not bounds:
        return ""
    shown = [*finite, *bounds]
    logarithmic = min(shown) > 0 and max(shown) > 10 * min(shown)
    scale = math.log if logarithmic else float
    low, high = min(map(scale, shown)), max(map(scale, shown))
    room = 0.12 * (high - low) or abs(high) or 1.0
    low, high = low - room, high + room

    def place(value: float | int) -> float:
        share = (scale(value) - low) / (high - low)
        return EDGE + share * (WIDTH - 2 * EDGE)

    start, end = _holds(claim, [place(bound) for bound in bounds])
    marks = "".join(f"M{place(bound):.0f} 2V{HEIGHT - 2}" for bound in bounds)
    # Dots on the same tenth of a pixel are one dot: of 20,000 seeds some hundred remain. A line of no length with round
    # ends is a dot, in a fourth of the letters of a circle.
    dots = "".join(f"M{x} {HEIGHT / 2:g}h0" for x in dict.fromkeys(f"{place(value):.1f}" for value in finite))
    return (
        f'<svg class="strip" viewBox="0 0 {WIDTH} {HEIGHT}" aria-hidden="true">'
        f'<rect x="{start:.0f}" y="2" width="{end - start:.0f}" height="{HEIGHT - 4}"/>'
        f'<path class="goal" d="{marks}"/><path class="dots" d="{dots}"/></svg>'
    )


def _bounds(claim: Claim) -> tuple[float | int, ...]:
    return claim.target if isinstance(claim.target, tuple) else (claim.target,)


def _holds(claim: Claim, places: Sequence[float]) -> tuple[float, float]:
    if claim.relation == "within":
        return places[0], places[-1]
    return (0.0, places[0]) if claim.relation.startswith("<") else (places[0], float(WIDTH))
