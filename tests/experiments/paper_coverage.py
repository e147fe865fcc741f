"""The table of `docs/paper-coverage.md`: every statement of a paper, and what checks it here.

Statements are listed in ``paper_coverage.toml``, with the tests that check them; claims are found by their `source`.
Run this file to write the page anew: ``python tests/experiments/paper_coverage.py``.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from layerwise.experiments import catalog
from layerwise.experiments.claims import Claim
from layerwise.experiments.zhang2025 import PAPER

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "paper-coverage.md"
LIST = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True, kw_only=True)
class Statement:
    """Something that a paper says."""

    place: str
    """Where, as the `source` of claims has it: "Lemma 3.7"."""
    says: str
    tests: tuple[str, ...] = ()
    """Tests that check it: "tests/theory/test_x.py::test_y"."""
    why_not: str = ""
    """Why nothing checks it, if nothing does."""
    note: str = ""


def statements() -> list[Statement]:
    """All that are listed, in the paper's order."""
    entries = tomllib.loads(LIST.read_text())["statement"]
    return [Statement(**entry | {"tests": tuple(entry.get("tests", ()))}) for entry in entries]


def places(source: str) -> set[str]:
    """The single places that a claim's `source` names.

    >>> sorted(places("Lemmas 3.10 and 3.12, eq. (16), Figures 4, 6–9"))
    ['Figure 4', 'Figure 6', 'Figure 7', 'Figure 8', 'Figure 9', 'Lemma 3.10', 'Lemma 3.12', 'eq. (16)']
    """
    found: set[str] = set()
    kinds = "Lemma|Theorem|Proposition|Corollary|Remark|Figure|Appendix|Section|Assumption|Definition|[Ee]q"
    number = r"(?:\(\d+\)|[A-Z](?:\.\d+)+|\d+(?:\.\d+)*|[A-Z]\b)"
    for kind, rest in re.findall(rf"({kinds})(?:s|\.|)\.? ((?:{number}(?:–{number})?(?:, | and |))+)", source):
        for word in re.findall(rf"{number}(?:–{number})?", rest):
            for name in _spread(word):
                found.add(f"{'eq.' if kind in ('eq', 'Eq') else kind} {name}")
    return found


def _spread(word: str) -> Iterator[str]:
    """The numbers of a range such as 6–9, or the word itself."""
    first, dash, last = word.partition("–")
    if dash and first.isdigit() and last.isdigit():
        yield from map(str, range(int(first), int(last) + 1))
    elif dash:
        yield from (first, last)
    elif word:
        yield word


@cache
def claims() -> list[tuple[str, Claim]]:
    """All claims of experiments on the paper, those of all presets, each name once."""
    found: dict[tuple[str, str], Claim] = {}
    for name, experiment in catalog.experiments().items():
        if experiment.paper != PAPER:
            continue
        for config in experiment.presets.values():
            for claim in experiment.claims(config):
                found.setdefault((name, claim.name), claim)
    return [(name, claim) for (name, _), claim in found.items()]


def about(statement: Statement) -> dict[str, list[Claim]]:
    """The claims whose source is the statement's place, by experiment."""
    found: dict[str, list[Claim]] = {}
    for name, claim in claims():
        if statement.place in places(claim.source):
            found.setdefault(name, []).append(claim)
    return found


def render() -> str:
    """The page."""
    lines = [
        "# What is checked of the paper",
        "",
        "Every statement of Zhang et al. (2025), arXiv 2502.01763, with what checks it: claims of experiments (found",
        "by their source; `layerwise run NAME`, `layerwise check NAME`) and tests. Written by",
        "`python tests/experiments/paper_coverage.py`; a test compares it with what is declared.",
        "",
        "| place | what it says | claims | tests, and what is not checked |",
        "|---|---|---|---|",
    ]
    for statement in statements():
        counted = [_counted(name, some) for name, some in about(statement).items()]
        rest = [f"`{test.rpartition('/')[2]}`" for test in statement.tests]
        rest += [f"Not checked: {statement.why_not}"] if statement.why_not else []
        rest += [statement.note] if statement.note else []
        lines.append(f"| {statement.place} | {statement.says} | {'<br>'.join(counted)} | {'<br>'.join(rest)} |")
    return "\n".join(lines) + "\n"


def _counted(experiment: str, some: list[Claim]) -> str:
    """How many claims an experiment makes, of which kind."""
    kinds = [
        (sum(c.origin == "paper" and c.expected == "held" for c in some), "of the paper"),
        (sum(c.origin == "paper" and c.expected == "fails" for c in some), "of the paper that fail"),
        (sum(c.origin == "misprint" for c in some), "printed wrongly"),
        (sum(c.origin == "ours" for c in some), "of ours"),
    ]
    return f"`{experiment}`: " + ", ".join(f"{count} {words}" for count, words in kinds if count)


if __name__ == "__main__":
    PAGE.write_text(render())
