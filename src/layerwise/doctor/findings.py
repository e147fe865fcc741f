"""`Finding`: one sentence on what is wrong, the evidence for it, and what would help."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["severe", "moderate", "note"]
ORDER: Mapping[str, int] = {"severe": 0, "moderate": 1, "note": 2}


@dataclass(frozen=True)
class Finding:
    """What was found in one or several layers.

    >>> found = Finding("frozen", "moderate", 0.1, "`0` is frozen.", "requires_grad is False.", "Unfreeze it.", ("0",))
    >>> print(found)
    [moderate] `0` is frozen. requires_grad is False. Unfreeze it. Predicted gain: 0.1.
    """

    kind: str
    """A short name: "dead-units", "input-scale", …; `KINDS` lists them."""
    severity: Severity
    gain: float
    """Decrease of the loss, in its own unit, that is predicted to come within reach once this is mended."""
    statement: str
    evidence: str
    remedy: str
    layers: tuple[str, ...] = ()
    follows_from: tuple[str, ...] = field(default=())
    """Kinds of findings that explain this one."""

    def __str__(self) -> str:
        return (
            f"[{self.severity}] {self.statement} {self.evidence} {self.remedy} Predicted gain: {number(self.gain, 2)}."
        )


def ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Severe ones first, causes before what follows from them, and then by predicted gain.

    A finding that follows from another that was made is at most a note: mending the cause mends it, too. A cause is
    at least as severe as what it explains: some units that happen to be dead do not explain signals that vanish.

    >>> cause = Finding("dead-units", "moderate", 0.1, "Some units are dead.", "", "")
    >>> effect = Finding("vanishing-activations", "severe", 0.1, "Signals vanish.", "", "", (), ("dead-units",))
    >>> [finding.kind for finding in ordered([cause, effect])]
    ['vanishing-activations', 'dead-units']
    """
    found = list(findings)
    worst = {kind: min(ORDER[one.severity] for one in found if one.kind == kind) for kind in {f.kind for f in found}}
    explained = [
        any(worst.get(kind, 3) <= ORDER[finding.severity] for kind in finding.follows_from) for finding in found
    ]
    keys = {
        id(finding): (ORDER[finding.severity] + (3 if why else 0), -finding.gain)
        for finding, why in zip(found, explained, strict=True)
    }
    shown = [
        Finding(**{**vars(finding), "severity": "note"}) if why else finding
        for finding, why in zip(found, explained, strict=True)
    ]
    places = sorted(range(len(found)), key=lambda place: keys[id(found[place])])
    return tuple(shown[place] for place in places)


def number(value: float | None, digits: int = 3) -> str:
    """A number in few characters.

    >>> number(412345.0, 1), number(None), number(0.25), number(float("inf"))
    ('4e5', '–', '0.25', '∞')
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:.{digits}g}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")
