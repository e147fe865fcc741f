"""Declarations: what is wrong with one is said when it is made."""

import math
from dataclasses import dataclass, replace

import pytest
import toy_descent

from layerwise.experiments.experiment import Cell, Row, digest, plain, restore, seeds_of
from layerwise.foundations.errors import InputError, NameLookupError


@dataclass(frozen=True)
class Inner:
    rank: int = 3


@dataclass(frozen=True)
class Nested:
    seeds: int = 1
    inner: Inner = Inner()
    pairs: tuple[tuple[int, int], ...] = ((1, 2),)


@dataclass
class Loose:
    seeds: int = 1


@dataclass(frozen=True)
class Seedless:
    steps: int = 1


@dataclass(frozen=True)
class Odd:
    seeds: int = 1
    function: object = math.sin


def test_plain_and_back():
    config = Nested(seeds=4, inner=Inner(rank=5), pairs=((3, 4), (5, 6)))
    assert plain(config) == {"seeds": 4, "inner": {"rank": 5}, "pairs": [[3, 4], [5, 6]]}
    assert restore(Nested(), plain(config)) == config


def test_a_configuration_of_another_version_is_refused():
    with pytest.raises(InputError, match=r"other fields \(steps\)"):
        restore(Nested(), plain(Nested()) | {"steps": 3})


def test_digest_ignores_seeds_alone():
    config = toy_descent.Config()
    assert digest("a", config) == digest("a", replace(config, seeds=9))
    others = [digest("a", replace(config, steps=9)), digest("b", config), digest("a", replace(config, rates=(0.1,)))]
    assert len({digest("a", config), *others}) == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "Head to Head"}, "lower-case words"),
        ({"presets": {"smoke": Nested()}}, "Declare all three"),
        ({"presets": dict.fromkeys(("smoke", "laptop", "paper"), 3)}, "a dataclass instance"),
        ({"presets": dict.fromkeys(("smoke", "laptop", "paper"), Loose())}, "frozen"),
        ({"presets": {"smoke": Nested(), "laptop": Nested(), "paper": toy_descent.Config()}}, "one class"),
        ({"presets": dict.fromkeys(("smoke", "laptop", "paper"), Seedless())}, "seeds ≥ 1"),
        ({"presets": dict.fromkeys(("smoke", "laptop", "paper"), Odd())}, "field 'function'"),
    ],
)
def test_bad_experiments(toy, changes, words):
    with pytest.raises(InputError) as caught:
        replace(toy, **changes)
    assert words in str(caught.value)


def test_cells_need_keys_of_their_own(toy):
    twice = replace(toy, cells=lambda config: [Cell(key="a"), Cell(key="a")])
    with pytest.raises(InputError, match="'a' twice"):
        twice.cells_of(toy.presets["smoke"])
    with pytest.raises(InputError, match="none"):
        replace(toy, cells=lambda config: []).cells_of(toy.presets["smoke"])
    with pytest.raises(InputError, match="printable"):
        Cell(key="a\nb")


def test_rows_have_series_of_one_length():
    with pytest.raises(InputError, match="'loss': 1"):
        Row(seed=0, values={}, series={"iteration": [0, 1], "loss": [0.5]})


def test_unknown_preset(toy):
    with pytest.raises(NameLookupError, match="Did you mean 'paper'"):
        toy.preset("papr")


def test_seeds(toy):
    assert seeds_of(toy.presets["laptop"]) == [0, 1, 2]
    with pytest.raises(InputError, match="--seeds"):
        seeds_of(replace(toy.presets["smoke"], seeds=-1))
