"""What the templates print, ready as text: rows of tables, badges, links."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from layerwise.experiments.claims import ORIGINS, Claim
from layerwise.experiments.experiment import plain
from layerwise.experiments.figures import Curve, Figure, Panel
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
    anchor: str = ""
    """The name of its row on the page, where it has one."""
    pair: str = ""
    """"printed" and "corrected" for a misprint and the claim after it that puts it right."""

    @property
    def verdict(self) -> str:
        """The outcome in words."""
        return wording.OUTCOMES[self.outcome]


def claim_rows(run: Run) -> list[ClaimRow]:
    """The claims of a run."""
    rows = [claim_row(judged, f"{run.name}-{place}") for place, judged in enumerate(run.claims)]
    return paired(rows, [judged.claim for judged in run.claims])


def paired(rows: Sequence[ClaimRow], claims: Sequence[Claim]) -> list[ClaimRow]:
    """The same rows, where a misprint is followed by what is right instead: that is then said once."""
    found = list(rows)
    for place, (claim, after) in enumerate(itertools.pairwise(claims)):
        if claim.origin == "misprint" and claim.why == after.statement:
            found[place] = replace(found[place], pair="printed", why="")
            found[place + 1] = replace(found[place + 1], pair="corrected")
    return found


def claim_row(judged: Judged, anchor: str = "") -> ClaimRow:
    """A claim of a run."""
    claim, verdict = judged.claim, judged.verdict
    if verdict is None:
        return ClaimRow(**_declared(claim), outcome="error", detail=judged.trouble, anchor=anchor)
    several = verdict.n > 1 and verdict.low is not None
    outcome = wording.outcome(claim, verdict)
    decided = outcome in ("held", "known", "misprint") and all(map(math.isfinite, verdict.values.values()))
    return ClaimRow(
        **_declared(claim),
        mean=wording.number(verdict.mean),
        spread=f"{wording.number(verdict.low)} to {wording.number(verdict.high)}" if several else "",
        interval=wording.interval(verdict.interval),
        n=verdict.n,
        counted=wording.counted(verdict),
        outcome=outcome,
        detail="" if decided and not verdict.diverged else verdict.detail,  # columns beside it say as much
        strip=strip(claim, list(verdict.values.values())),
        anchor=anchor,
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
    spent = seconds(run)
    facts = [
        f"{seeds} {'seed' if seeds == 1 else 'seeds'}",
        f"last run {wording.moment(run.manifest.get('time', 'at an unknown time'))}",
    ]
    if spent >= 0.05:
        facts.append(f"{wording.duration(spent)} of computing")
    return {
        "preset": run.preset,
        "size": wording.PRESETS.get(run.preset, ""),
        "name": run.name,
        "facts": facts,
        "when": wording.moment(run.manifest.get("time", wording.NONE)),
        "complete": run.done >= run.expected,
        "progress": f"{run.done} of {run.expected} results recorded",
        "command": command(run),
        "version": version(run),
    }


def headline(runs: Sequence[Run]) -> Run | None:
    """The run that speaks for an experiment: of those that are complete the most demanding, else the first."""
    return next((run for run in runs if run.done >= run.expected), runs[0] if runs else None)


def seconds(run: Run) -> float:
    """Computing time of all its records."""
    return float(sum(record.get("seconds") or 0.0 for record in run.recorded.records))


MOST_FIELDS = 14


def setting(run: Run) -> list[tuple[str, str]]:
    """The configuration in a line or two: its first fields, as name and value."""
    fields = [(name, _text(value)) for name, value in plain(run.config).items()]
    return [(name.replace("_", " "), value) for name, value in fields if len(value) <= 48][:MOST_FIELDS]


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


@dataclass(frozen=True)
class Table:
    """Values of a panel for those who read them: a row a curve."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


COLUMNS = 6
"""Places along x that a table of values has at most."""


def tables(figure: Figure) -> list[Table]:
    """A table a panel: each curve at some places along x, the first and the last among them."""
    return [_table(panel) for panel in figure.panels if any(len(curve.x) for curve in panel.curves)]


def _table(panel: Panel) -> Table:
    curves = [curve for curve in panel.curves if len(curve.x)]
    if not panel.places and all(len(curve.x) == 1 for curve in curves):
        rows = tuple((curve.label, _value(curve, 0), _range(curve, 0)) for curve in curves)
        return Table(panel.title, ("", panel.y_label or "value", "range"), rows)
    xs = sorted({float(x) for curve in curves for x in curve.x if x is not None and not math.isnan(x)})
    longest = max(curves, key=lambda curve: len(curve.x))
    if len(xs) > COLUMNS and not panel.places:
        own = [float(x) for x in longest.x]
        xs = sorted({own[round(k * (len(own) - 1) / (COLUMNS - 1))] for k in range(COLUMNS)})
    named = [panel.places[int(x)] if 0 <= int(x) < len(panel.places) else wording.number(x) for x in xs]
    shown = named if panel.places else [wording.number(x) for x in xs]
    first = f"{panel.y_label} at {panel.x_label}" if panel.x_label and panel.y_label else panel.y_label
    if panel.places:  # names read better down the side
        rows = tuple((name, *(_at(curve, x) for curve in curves)) for name, x in zip(shown, xs, strict=True))
        return Table(panel.title, (first, *(curve.label for curve in curves)), rows)
    rows = tuple((curve.label, *(_at(curve, x) for x in xs)) for curve in curves)
    return Table(panel.title, (first, *shown), rows)


def _at(curve: Curve, x: float) -> str:
    return next((_value(curve, k) for k, own in enumerate(curve.x) if own == x), wording.NONE)


def _value(curve: Curve, place: int) -> str:
    value = curve.y[place] if place < len(curve.y) else None
    return wording.number(None if value is None else float(value))


def _range(curve: Curve, place: int) -> str:
    if curve.low is None or curve.high is None or curve.low[place] == curve.high[place]:
        return wording.NONE
    return f"{wording.number(float(curve.low[place]))} to {wording.number(float(curve.high[place]))}"


# --- What is weaker than the paper ----------------------------------------------------------------------------


def weaker(run: Run, rows: Sequence[ClaimRow]) -> tuple[list[str], list[tuple[str, str, str]]]:
    """Sentences, and the settings that differ from preset "paper": name, here, there."""
    said = []
    here, there = plain(run.config), plain(run.experiment.preset("paper"))
    differs = [(name, _text(value), _text(there[name])) for name, value in here.items() if there[name] != value]
    if differs:
        said.append(
            "Settings that are smaller, or other, than in the preset paper, which is as near to the paper as this "
            "experiment gets:"
        )
    else:
        said.append(
            "The settings are those of the preset paper, which is as near to the paper as this experiment gets."
        )
    if run.done < run.expected:
        said.append(f"Only {run.done} of {run.expected} results are recorded.")
    few = [row for row in rows if row.outcome == "few"]
    if few:
        said.append(f"{_claims(len(few))} not decided: more seeds are needed than have run.")
    diverged = {seed for judged in run.claims if judged.verdict for seed in judged.verdict.diverged}
    if diverged:
        listed = ", ".join(map(str, sorted(diverged)[:12])) + (", …" if len(diverged) > 12 else "")
        said.append(
            f"{len(diverged)} {'seed' if len(diverged) == 1 else 'seeds'} diverged in some runs (seed {listed}); where "
            "a claim is only about runs that did not, the others decide."
        )
    bounds = sum(judged.claim.origin == "ours" for judged in run.claims)
    if bounds:
        said.append(f"{_claims(bounds)} our own expectation rather than a sentence of the paper.")
    return said, differs


def _claims(count: int) -> str:
    return "1 claim is" if count == 1 else f"{count} claims are"


def left_out(drawn: Picture) -> list[tuple[str, str]]:
    """What panels could not show, each sentence once: the panels it is true of, and the sentence."""
    panels: dict[str, list[str]] = {}
    for panel in drawn.panels:
        for note in panel.notes:
            panels.setdefault(note, []).append(panel.title)
    return [(", ".join(titles), note) for note, titles in panels.items()]


def short_paper(paper: str) -> str:
    """Authors and year of a citation, for links.

    >>> short_paper("George (2023), Deep networks")
    'George (2023)'
    >>> short_paper("Zhang, Moniri: On The Concurrence, ICML 2025, arXiv 2502.1")
    'Zhang et al. (2025)'
    >>> short_paper("Notes")
    'Notes'
    """
    if found := re.match(r"[^(]*\(\d{4}\)", paper):
        return found[0]
    authors, year = paper.partition(":")[0].split(","), re.search(r"\b(?:19|20)\d{2}\b(?!\.)", paper)
    if not year:
        return paper if len(paper) <= 40 else f"{paper[:39]}…"
    return f"{authors[0]}{' et al.' if len(authors) > 1 else ''} ({year[0]})"


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
