"""What the user sees: tables (rich on a terminal, aligned text otherwise) and JSON."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from layerwise.experiments.claims import FEW, HELD, NOT_ENOUGH, ORIGINS, Claim, Verdict
from layerwise.experiments.records import to_plain
from layerwise.experiments.results import Result


def table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print a table on standard output."""
    if sys.stdout.isatty() and _has_rich():
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        drawn = Table(title=title or None, box=box.SIMPLE_HEAD, title_justify="left")
        for name in header:
            drawn.add_column(name, overflow="fold")
        for row in rows:
            drawn.add_row(*(Text(cell, style=STYLES.get(cell.split(" (")[0], "")) for cell in row))
        Console().print(drawn)
        return
    if title:
        print(title)
    print(aligned(header, rows))


STYLES = {"as expected": "green", "NOT as expected": "bold red", "not enough runs": "yellow", "not run": "dim"}


def _has_rich() -> bool:
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width.

    >>> print(aligned(["name", "n"], [["kfac", "5"]]))
    name  n
    kfac  5
    """
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[k]) for line in lines) for k in range(len(header))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def claims_table(result: Result) -> None:
    """Every claim of a run: what is wanted, what was measured, on how many seeds, the verdict."""
    if not result.claims:
        print(f"No claims are made of {result.experiment.name}, preset {result.preset}; see the other presets.")
        return
    rows = [
        [claim.name, ORIGINS[claim.origin], claim.condition(), measured(claim, verdict), outcome(verdict)]
        for claim, verdict in zip(result.claims, result.verdicts, strict=True)
    ]
    name = f"{result.experiment.name}, preset {result.preset}"
    header = ["claim", "who says it", "wanted", "measured", "verdict"]
    table(header, rows, f"Claims of {name}: {result.state()}")
    for claim, verdict in zip(result.claims, result.verdicts, strict=True):
        if verdict.as_expected is not True:
            print(f"  {claim.name}: {claim.statement} {verdict.detail}.")
        elif claim.expected == "fails":
            print(f"  {claim.name}: {claim.statement} {KNOWN[claim.origin]}: {claim.why}")


KNOWN = {
    "paper": "The paper claims it, and it fails",
    "misprint": "A misprint of the paper",
    "ours": "We expected it, and it fails",
}


def outcome(verdict: Verdict) -> str:
    """The verdict in words, with whether it was expected."""
    if verdict.status == NOT_ENOUGH:
        return f"not enough runs ({verdict.n + len(verdict.diverged)} of {verdict.needed})"
    held = "held" if verdict.status == HELD else "failed"
    return f"{'as expected' if verdict.as_expected else 'NOT as expected'} ({held})"


def measured(claim: Claim, verdict: Verdict) -> str:
    """The values of a few seeds, or the mean of many with its interval; for a share, how many hold, with its own."""
    parts = []
    if verdict.n == 0:
        parts.append("-")
    elif verdict.share is not None:
        low, high = verdict.share
        parts.append(f"{verdict.held} of {verdict.n} seeds ({100 * low:.0f} to {100 * high:.0f} %): {_range(verdict)}")
    elif verdict.n < FEW and claim.test != "mean":
        parts.append(", ".join(f"{value:.4g}" for value in verdict.values.values()))
    elif verdict.mean is not None:
        edges = "" if verdict.interval is None else " [{:.3g}, {:.3g}]".format(*verdict.interval)
        parts.append(f"{verdict.n} seeds: mean {verdict.mean:.4g}{edges}, {_range(verdict)}")
    else:
        parts.append(f"{verdict.n} seeds: NaN")
    if verdict.diverged:
        parts.append(f"{len(verdict.diverged)} diverged")
    return "; ".join(parts)


def _range(verdict: Verdict) -> str:
    return "NaN" if verdict.low is None else f"{verdict.low:.3g} to {verdict.high:.3g}"


def claims_json(result: Result) -> dict[str, Any]:
    """A judged run as plain values."""
    return {
        "experiment": result.experiment.name,
        "preset": result.preset,
        "path": str(result.recorded.path),
        "records": len(result.records),
        "claims": [
            {"statement": claim.statement, "source": claim.source, "wanted": claim.condition()}
            | {"origin": claim.origin, "expected": claim.expected, "why": claim.why, "note": claim.note}
            | verdict.as_dict()
            for claim, verdict in zip(result.claims, result.verdicts, strict=True)
        ],
        "notes": list(result.recorded.notes),
    }


def print_json(document: Any) -> None:
    """One JSON document on standard output; numbers that are not finite as ``{"float": "nan"}``."""
    print(json.dumps(to_plain(document), indent=2, ensure_ascii=False, allow_nan=False))


def note(text: str) -> None:
    """A word to the user beside the result."""
    print(f"note: {text}", file=sys.stderr)
