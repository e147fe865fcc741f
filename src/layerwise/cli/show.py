"""What the user sees: tables (rich on a terminal, aligned text otherwise) and JSON."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from layerwise.experiments.claims import HELD, NOT_ENOUGH, Verdict
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
        [claim.name, claim.condition(), _mean(verdict), _range(verdict), f"{verdict.n}", outcome(verdict)]
        for claim, verdict in zip(result.claims, result.verdicts, strict=True)
    ]
    name = f"{result.experiment.name}, preset {result.preset}"
    header = ["claim", "wanted", "mean [95 % interval]", "smallest, largest", "seeds", "verdict"]
    table(header, rows, f"Claims of {name}: {result.state()}")
    for claim, verdict in zip(result.claims, result.verdicts, strict=True):
        if verdict.as_expected is not True:
            print(f"  {claim.name}: {claim.statement} {verdict.detail}.")
        elif claim.expected == "refuted":
            print(f"  {claim.name}: {claim.statement} Known to be wrong: {claim.erratum}")


def outcome(verdict: Verdict) -> str:
    """The verdict in words, with whether it was expected."""
    if verdict.status == NOT_ENOUGH:
        return f"not enough runs ({verdict.n} of {verdict.needed})"
    held = "held" if verdict.status == HELD else "refuted"
    return f"{'as expected' if verdict.as_expected else 'NOT as expected'} ({held})"


def _mean(verdict: Verdict) -> str:
    if verdict.mean is None:
        return "NaN" if verdict.n else "-"
    interval = "" if verdict.interval is None else f" [{verdict.interval[0]:.3g}, {verdict.interval[1]:.3g}]"
    return f"{verdict.mean:.4g}{interval}"


def _range(verdict: Verdict) -> str:
    return "-" if verdict.low is None else f"{verdict.low:.3g}, {verdict.high:.3g}"


def claims_json(result: Result) -> dict[str, Any]:
    """A judged run as plain values."""
    return {
        "experiment": result.experiment.name,
        "preset": result.preset,
        "path": str(result.recorded.path),
        "records": len(result.records),
        "claims": [
            {"statement": claim.statement, "source": claim.source, "wanted": claim.condition()}
            | {"expected": claim.expected, "erratum": claim.erratum}
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
