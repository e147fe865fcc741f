"""Experiments on learned step sizes and optimizers: smoke presets are as expected, claims can fail."""

import dataclasses

import pytest
from experiment_records import smoke

from layerwise.experiments import catalog
from layerwise.experiments.claims import judge

QUICK = ("sample-sweep", "noise-sweep")
SLOWER = (
    "explosion",
    "learned-optimizer",
    "stable-meta-gradient",
    "autograd-wall",
    "step-scaling",
    "tuned-step",
    "learned-damping",
)
NAMES = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOWER)]


@pytest.mark.parametrize("name", NAMES)
def test_smoke_is_as_expected(name):
    experiment = catalog.find(name)
    config = experiment.preset("smoke")
    wrong = [claim.name for claim in experiment.claims(config) if not judge(claim, smoke(name)).as_expected]
    assert wrong == []
    (figure,) = experiment.figures(config, smoke(name))
    assert all(curve.x and len(curve.x) == len(curve.y) for panel in figure.panels for curve in panel.curves)
    assert experiment.figures(config, [])  # a page before anything has run


def worse(name: str, broken) -> set[str]:
    """Claims that notice when values are changed."""
    experiment = catalog.find(name)
    records = [record | {"values": broken(record["values"])} for record in smoke(name)]
    claims = experiment.claims(experiment.preset("smoke"))
    return {claim.name for claim in claims if not judge(claim, records).as_expected}


@pytest.mark.parametrize(
    ("name", "claims"),
    [
        ("noise-sweep", {"noise/gap@1", "noise/gap@3", "noise/gap-grows@3"}),
        pytest.param("sample-sweep", {"n=25/validation-better", "n=50/validation-better"}, marks=pytest.mark.slow),
    ],
)
def test_swapped_ways_of_learning_are_noticed(name, claims):
    def swapped(values):
        other = {"train": "validation", "validation": "train"}
        parts = {name: name.partition("/") for name in values}
        return {f"{other.get(way, way)}/{rest}" if rest else way: values[n] for n, (way, _, rest) in parts.items()}

    assert claims <= worse(name, swapped)


@pytest.mark.slow
def test_a_bound_that_is_exceeded_is_noticed():
    for name in ("vanishing", "explosion", "log", "log_floor"):
        assert f"naive objective/{name}" in worse("explosion", lambda values, name=name: values | {name: 0.99})


@pytest.mark.parametrize("name", ["stable-meta-gradient", "step-scaling"])
def test_a_misprint_stands_beside_what_is_right(name):
    experiment = catalog.find(name)
    claims = experiment.claims(experiment.preset("laptop"))
    assert any(claim.origin == "misprint" and claim.why for claim in claims)
    assert any(claim.origin == "paper" and claim.expected == "held" for claim in claims)


def test_the_paper_preset_of_the_learned_optimizer_is_that_of_the_thesis_where_it_says():
    config = catalog.find("learned-optimizer").preset("paper")
    given = {"images": "mnist", "examples": 1000, "hidden": (100, 20), "batch": 32, "tests": 5, "steps": 4000}
    assert {name: value for name, value in dataclasses.asdict(config).items() if name in given} == given
