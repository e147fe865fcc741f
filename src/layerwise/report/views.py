"""What the templates print, ready as text: rows of tables, badges, links."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from layerwise.experiments.claims import ORIGINS, Claim
from layerwise.experiments.experiment import plain
from layerwise.experiments.figures import Curve, Figure
from layerwise.report import wording
from layerwise.report.commands import run_command
from layerwise.report.gather import Judged, Run
from layerwise.report.pictures import Picture
from layerwise.report.strips import strip


@dataclass(frozen=True, kw_only=True)
class ClaimRow:
    """A row of the table of claims."""

    name: str
    statement: str
    source: str
    target: str
    whom: str
    mean: str = wording.NONE
    spread: str = ""
    interval: str = wording.NONE
    n: int = 0
    counted: str = ""
    needed: int
    outcome: str
    detail: str = ""
    origin: str
    why: str = ""
    note: str = ""
    strip: str = ""

    @property
    def verdict(self) -> str:
        """The outcome in words."""
        return wording.OUTCOMES[self.outcome]


def claim_row(judged: Judged) -> ClaimRow:
    """A claim of a run."""
    claim, verdict = judged.claim, judged.verdict
    if verdict is None:
        return ClaimRow(**_declared(claim), outcome="error", detail=judged.trouble)
    several = verdict.n > 1 and verdict.low is not None
    return ClaimRow(
        **_declared(claim),
        mean=wording.number(verdict.mean),
        spread=f"{wording.number(verdict.low)} to {wording.number(verdict.high)}" if several else "",
        interval=wording.interval(verdict.interval),
        n=verdict.n,
        counted=wording.counted(verdict),
        outcome=wording.outcome(claim, verdict),
        detail=verdict.detail,
        strip=strip(claim, list(verdict.values.values())),
    )


def unrun_claim(claim: Claim) -> ClaimRow:
    """A claim of an experiment that nobody has run."""
    return ClaimRow(**_declared(claim), outcome="not-run")


def _declared(claim: Claim) -> dict[str, Any]:
    return {
        "name": claim.name,
        "statement": claim.statement,
        "source": claim.source,
        "target": wording.target(claim),
        "whom": wording.whom(claim),
        "needed": claim.seeds,
        "origin": ORIGINS[claim.origin],
        "why": f"{wording.WHY[claim.origin]} {claim.why}" if claim.why else "",
        "note": claim.note,
    }


def tally(rows: Iterable[ClaimRow]) -> list[tuple[str, int, str]]:
    """Outcomes that occur: their class, how many, and in words; in the order of `wording.OUTCOMES`.

    >>> tally([])
    []
    """
    counts = Counter(row.outcome for row in rows)
    return [(kind, counts[kind], words) for kind, words in wording.OUTCOMES.items() if counts[kind]]


def run_heading(run: Run) -> dict[str, Any]:
    """What a run is called and how far it is."""
    seeds = len({record["seed"] for record in run.recorded.records})
    spent = sum(record.get("seconds") or 0.0 for record in run.recorded.records)
    facts = [
        f"{seeds} {'seed' if seeds == 1 else 'seeds'}",
        f"last run {wording.moment(run.manifest.get('time', 'at an unknown time'))}",
    ]
    if spent >= 0.05:
        facts.append(f"{wording.duration(spent)} of computing")
    return {
        "preset": run.preset,
        "name": run.name,
        "facts": facts,
        "when": wording.moment(run.manifest.get("time", wording.NONE)),
        "complete": run.done >= run.expected,
        "progress": f"{run.done} of {run.expected} results recorded",
        "command": command(run),
        "version": version(run),
    }


def command(run: Run) -> str:
    """What to type to make the run again (or to go on with it)."""
    source = run.manifest.get("source")
    outside = source if isinstance(source, str) and not source.startswith("layerwise.experiments.") else None
    engine = (run.manifest.get("engine") or {}).get("name") or "batched"
    first = min(run.manifest.get("seeds") or [0])
    return run_command(run.experiment, run.preset, run.config, source=outside, engine=engine, first=first)


def version(run: Run) -> str:
    """The code that the run was made with, in words."""
    code = run.manifest.get("code") or {}
    words = f"layerwise {code.get('version', 'of an unknown version')}"
    if code.get("commit"):
        words += f" at commit {str(code['commit'])[:12]}" + (", with changes" if code.get("changed") else "")
    return words


def settings(run: Run) -> list[tuple[str, list[tuple[str, str]]]]:
    """Groups of settings: the configuration, the code, the machine."""
    last = run.manifest
    standard = plain(run.experiment.preset(run.preset))
    configured = [
        (name, _text(value) + ("" if standard.get(name) == value else f" (preset: {_text(standard.get(name))})"))
        for name, value in plain(run.config).items()
    ]
    sessions = [wording.moment(manifest.get("time", "")) for manifest in run.recorded.manifests]
    seeds = sorted({record["seed"] for record in run.recorded.records})
    recording = [
        ("records", f"{run.experiment.name}/{run.recorded.path.name}"),
        ("seeds", ", ".join(map(str, seeds[:40])) + (", …" if len(seeds) > 40 else "") or wording.NONE),
        ("sessions", ", ".join(sessions[-4:]) + (f" (last 4 of {len(sessions)})" if len(sessions) > 4 else "")),
    ]
    groups = [("Configuration", configured), ("Records", recording)]
    for title, name in (("Code", "code"), ("Libraries", "libraries"), ("Hardware", "hardware"), ("Engine", "engine")):
        if isinstance(last.get(name), Mapping):
            groups.append((title, [(str(key).replace("_", " "), _text(value)) for key, value in last[name].items()]))
    return groups


def _text(value: Any) -> str:
    if value is None or value == [] or value == "":
        return wording.NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def last_points(figure: Figure) -> list[tuple[str, str, str, str, str]]:
    """The end of each curve: panel, curve, x, y and band, as the table under a figure shows it."""
    return [
        (panel.title, curve.label, *_last(curve)) for panel in figure.panels for curve in panel.curves if len(curve.x)
    ]


def _last(curve: Curve) -> tuple[str, str, str]:
    band = wording.NONE
    if curve.low is not None and curve.high is not None and len(curve.low) and len(curve.high):
        band = f"{wording.number(float(curve.low[-1]))} to {wording.number(float(curve.high[-1]))}"
    return wording.number(float(curve.x[-1])), wording.number(float(curve.y[-1])), band


def left_out(drawn: Picture) -> list[tuple[str, str]]:
    """What panels could not show, each sentence once: the panels it is true of, and the sentence."""
    panels: dict[str, list[str]] = {}
    for panel in drawn.panels:
        for note in panel.notes:
            panels.setdefault(note, []).append(panel.title)
    return [(", ".join(titles), note) for note, titles in panels.items()]


def slug(text: str) -> str:
    """A name for a file or an anchor: letters, digits and dashes.

    >>> slug("Figure 1: loss & dist/../x")
    'Figure-1-loss-dist-x'
    """
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[:80] or "figure"


def paragraphs(text: str) -> list[str]:
    """Blocks of text between empty lines.

    >>> paragraphs("one\\n two\\n\\nthree")
    ['one two', 'three']
    """
    return [" ".join(block.split()) for block in re.split(r"\n\s*\n", text) if block.strip()]
