"""Method cards: one for every member, with the code's own defaults, the race's own numbers, and code that runs."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch

import layerwise as lw

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "methods"
CARDS = {path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# "): path for path in FOLDER.glob("*.md")}
del CARDS["Method cards"]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
DEFAULT = re.compile(r"^\| `(\w+)` \| `(.*)` \|$", re.MULTILINE)
SECTIONS = ("What it does", "Cost", "Defaults", "Coming from AdamW", "When to use it", "When not to")
RACE = ROOT / "docs" / "decisions" / "0020-updates-of-adamws-size.md"
SHORT = {"MahalanobisSpectral": "Mahalanobis"}
"""What the race's table calls a member."""


def members() -> set[str]:
    kinds = {name: getattr(lw.optim, name) for name in lw.optim.__all__}
    found = {n for n, kind in kinds.items() if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)}
    return found - {"Layerwise"}


def numbers(text: str, head: str) -> list[list[list[str]]]:
    """Tables of a text whose first line has some words, as rows of cells without emphasis."""
    tables, inside = [], False
    for line in text.splitlines():
        cells = [cell.strip().strip("*") for cell in line.strip("|").split("|")]
        if head in line and line.startswith("|"):
            tables.append([cells])
            inside = True
        elif inside and line.startswith("|"):
            tables[-1] += [] if line.startswith("|---") else [cells]
        else:
            inside = False
    return tables


def test_every_member_has_a_card_and_a_line_in_the_table():
    assert CARDS.keys() == members()
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert all(f"({path.name})" in index for path in CARDS.values())


@pytest.mark.parametrize("name", sorted(CARDS))
def test_a_card_says_all_that_a_card_says(name):
    text = CARDS[name].read_text(encoding="utf-8")
    assert [title for title in re.findall(r"^## (.*)$", text, re.MULTILINE) if title in SECTIONS] == list(SECTIONS)
    assert "Reference: " in text
    assert "$$" in text


@pytest.mark.parametrize("name", sorted(CARDS))
def test_defaults_are_those_of_the_code(name):
    stated = DEFAULT.findall(CARDS[name].read_text(encoding="utf-8"))
    assert any(option == "lr" for option, _ in stated)
    member = getattr(lw.optim, name)
    model = torch.nn.Linear(3, 2)
    opt = member(model, torch.randn(5, 3)) if name == "SuperNat" else member(model)
    own = {key: parameter.default for key, parameter in inspect.signature(member).parameters.items()}
    for option, value in stated:
        actual = opt.param_groups[0].get(option, own.get(option, own))
        assert ast.literal_eval(value) == actual, option


@pytest.mark.parametrize("name", sorted(CARDS))
def test_code_of_cards_runs(name):
    (block,) = BLOCK.findall(CARDS[name].read_text(encoding="utf-8"))
    made: dict = {}
    exec(compile(block, str(CARDS[name]), "exec"), made)
    assert isinstance(made["opt"], getattr(lw.optim, name))


@pytest.mark.parametrize("name", sorted(CARDS))
def test_numbers_are_those_of_the_race(name):
    race = numbers(RACE.read_text(encoding="utf-8"), "| | rate | AdamW")
    assert len(race) == 2
    stated = numbers(CARDS[name].read_text(encoding="utf-8"), "| rate | AdamW |")
    if SHORT.get(name, name) not in race[0][0]:
        assert not stated
        return
    for measured, shown in zip(race, stated, strict=True):
        column = measured[0].index(SHORT.get(name, name))
        assert [[row[0], row[1], row[2], row[column]] for row in measured[1:]] == shown[1:]
