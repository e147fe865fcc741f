"""`Finding`: one sentence on what is wrong, the evidence for it, and what would help."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["severe", "moderate", "note"]
ORDER: Mapping[str, int] = {"severe": 0, "moderate": 1, "note": 2}


@dataclass(frozen=True)
class Finding:
    """What was found in one or several layers.

    >>> found = Finding("frozen", "moderate", 0.1, "`0` is not trained.", "requires_grad is False.", "Unfreeze it.", ("0",))
    >>> print(found)
    [moderate] `0` is not trained. requires_grad is False. Unfreeze it. Predicted gain: 0.1.
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
        return f"[{self.severity}] {self.statement} {self.evidence} {self.remedy} Predicted gain: {self.gain:.2g}."


def ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Severe ones first, causes before what follows from them, and then by predicted gain.

    A finding that follows from another that was made is at most a note: mending the cause mends it, too.
    """
    found = list(findings)
    kinds = {finding.kind for finding in found}
    explained = [bool(kinds & set(finding.follows_from)) for finding in found]
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
