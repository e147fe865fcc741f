"""Convolutional networks under several methods: smoke presets hold what they claim, and claims can fail."""

import dataclasses
import json
import math
from functools import cache

import jaxtyping
import pytest
from experiment_records import records

from layerwise.data.folder import MissingDataError
from layerwise.experiments.catalog import find
from layerwise.experiments.claims import HELD, NOT_HELD, judge
from layerwise.experiments.george2023.conv_nets import CURVATURE, LABELS, NETWORKS, sooner
from layerwise.foundations.errors import InputError, NameLookupError

pytest.importorskip("sklearn")
NAMES = ("conv-nets", "batch-and-schedule")


@cache
def smoke(name: str):
    experiment = find(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        return experiment, records(experiment, experiment.preset("smoke"), [0])


@pytest.fixture(scope="module", params=NAMES)
def ran(request: pytest.FixtureRequest):
    return smoke(request.param)


def made(config, cells, best):
    """Records of a search that found a loss for each cell, and of curves that end there."""
    series = {name: [0.0, 1.0] for name in ("epoch", "seconds", "test/error")}
    return [
        {
            "cell": cell.key,
            "seed": seed,
            "values": {"best": best(cell), "final": best(cell)},
            "series": series | {"train/loss": [2.0, best(cell)], "seconds": [0.0, 3 * best(cell)]},
        }
        for cell in cells
        for seed in range(config.seeds)
    ]


def test_smoke_holds_what_it_claims(ran):
    experiment, found = ran
    claims = experiment.claims(experiment.preset("smoke"))
    assert claims
    assert [claim.name for claim in claims if judge(claim, found).status != HELD] == []


ORDER = ("ekfac-ra", "ekfac", "kfac", "sgd", "sgd-bn")


@pytest.mark.parametrize("preset", ["smoke", "laptop", "paper"])
@pytest.mark.parametrize("name", NAMES)
def test_every_claim_can_hold_and_fail(name: str, preset: str):
    """With losses in the order that is claimed, with the order turned round, and with losses that are all alike."""
    experiment = find(name)
    config = experiment.preset(preset)
    cells, claims = experiment.cells_of(config), experiment.claims(config)

    def place(cell):
        return ORDER.index(cell.options["method"]) if cell.options["method"] in ORDER else 9

    for best, status in (
        (lambda cell: 0.1 * (1 + place(cell)), HELD),
        (lambda cell: 1 - 0.1 * place(cell), NOT_HELD),
        (lambda cell: 0.5, NOT_HELD),
    ):
        found = made(config, cells, best)
        verdicts = {claim.name: judge(claim, found).status for claim in claims}
        assert verdicts
        assert [key for key, verdict in verdicts.items() if verdict != status] == []


def test_times_are_compared_where_the_loss_is_reached():
    curves = {"fast": ([0, 1, 2], [3.0, 1.0, 0.5]), "slow": ([0, 4, 8], [3.0, 2.0, 1.0]), "never": ([0, 1], [3.0, 2.0])}
    rows = [
        {"cell": cell, "seed": 0, "values": {}, "series": {"seconds": seconds, "train/loss": loss}}
        for cell, (seconds, loss) in curves.items()
    ]
    assert sooner("fast", "slow")(rows) == {0: 1 / 8}
    assert sooner("never", "slow")(rows) == {0: math.inf}
    assert sooner("fast", "absent")(rows) == {}
    rows.append({"cell": "diverged", "seed": 0, "series": {}})
    assert sooner("diverged", "slow")(rows) == {0: math.inf}
    assert sooner("fast", "diverged")(rows) == {0: 0}
    assert sooner("diverged", "diverged")(rows) == {0: math.inf}


def test_all_trials_and_the_choice_are_recorded(ran):
    experiment, found = ran
    config = experiment.preset("smoke")
    for record in found:
        tried, values = json.loads(record["values"]["trials"]), record["values"]
        assert len(tried) == config.trials
        best = min((row for row in tried if row[-1] is not None), key=lambda row: row[-1])
        assert [values[f"chosen/{name}"] for name in values["options"].split(", ")] == best[:-1]
        assert record["series"]["epoch"] == list(range(config.epochs + 1))
        assert 0 <= values["test/error"] <= 1


def test_cells_are_networks_methods_and_ways_to_see_offsets():
    experiment = find("conv-nets")
    keys = [cell.key for cell in experiment.cells_of(experiment.preset("laptop"))]
    with_both = [key for name in CURVATURE for key in (f"three-convolutions/{name}", f"three-convolutions/{name}/kfc")]
    assert keys == ["three-convolutions/sgd", *with_both]
    assert len(experiment.cells_of(experiment.preset("paper"))) == 18
    experiment = find("batch-and-schedule")
    schedules = [
        cell.key for cell in experiment.cells_of(dataclasses.replace(experiment.preset("smoke"), batches=(50, 100)))
    ]
    assert [key for key in schedules if "sgd" in key] == [
        f"three-convolutions/sgd/{way}" for way in ("50", "100", "50/halved")
    ]


def test_batches_and_refreshes_are_those_of_the_thesis(monkeypatch: pytest.MonkeyPatch):
    """On CIFAR-10: batches of 500 for K-FAC's family and of 200 for others, new factors after 500 steps."""
    import torch

    from layerwise.studies.fisher_geometry import image_classifiers as study

    seen = {}
    images = {split: (torch.zeros(50_000, 1), torch.zeros(50_000)) for split in ("train", "test")}

    def compared(given, chosen, **options):
        seen[chosen.name] = (given.batches.batch_size, chosen.fixed.get("refresh_every"), chosen.make)
        return {}, {}

    monkeypatch.setattr(study, "splits", lambda *given: images)
    monkeypatch.setattr(study, "compared", compared)
    experiment = find("conv-nets")
    config = dataclasses.replace(experiment.preset("paper"), networks=("vgg11",))
    for cell in experiment.cells_of(config):
        list(experiment.run(config, cell, [0]))
    assert {name: batch for name, (batch, _, _) in seen.items()} == {
        name: 500 if name in CURVATURE else 200 for name in config.methods
    }
    assert {refresh for _, refresh, _ in (seen[name] for name in CURVATURE)} == {500}
    experiment = find("batch-and-schedule")
    config = dataclasses.replace(experiment.preset("paper"), networks=("vgg11",), methods=("kfac",))
    found = []
    for cell in experiment.cells_of(config):
        list(experiment.run(config, cell, [0]))
        batch, refresh, make = seen["kfac"]
        found.append((batch, refresh, getattr(make, "every", None)))
    assert found == [(100, 500, None), (200, 500, None), (500, 500, None), (1000, 500, None), (500, 500, 500)]


def test_a_method_that_never_trains_is_a_record(ran):
    experiment, _ = ran
    config = dataclasses.replace(experiment.preset("smoke"), methods=("sgd",), rates=(1e20, 1e21), examples=100)
    (record, *_) = records(experiment, config, [0])
    assert record["values"]["diverged"] == 2
    assert record["values"]["best"] == math.inf
    assert not record["series"]
    assert experiment.figures(config, [record])


def test_figures_have_all_points(ran):
    experiment, found = ran
    (figure,) = experiment.figures(experiment.preset("smoke"), found)
    assert all(curve.y for panel in figure.panels for curve in panel.curves)


def test_every_network_and_method_is_known_to_the_study():
    from layerwise.studies.fisher_geometry.image_classifiers import METHODS, TRAINING

    assert set(METHODS) == set(LABELS)
    assert set(NETWORKS) == set(TRAINING)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("wrong", "answer"),
    [
        ({"networks": ("vgg11",)}, "some of three-convolutions for images='digits'"),
        ({"networks": ("vgg12",)}, "Did you mean 'vgg11'"),
        ({"images": "cifar10"}, "some of vgg11, resnet18, resnet34 for images='cifar10'"),
        ({"images": "digit"}, "Did you mean 'digits'"),
        ({"methods": ("kfac-bn",)}, "Did you mean 'kfac'"),
        ({"trials": 1}, "a trial for each"),
        ({"dampings": (0.1, 0.2, 0.3, 0.4), "trials": 20}, "at most three dampings"),
        ({"rates": (0.1, 0.1)}, "each once"),
        ({"examples": 2000}, "at most 1500"),
        ({"epochs": 0}, "epochs=0"),
    ],
)
def test_bad_settings_are_refused_before_anything_runs(name: str, wrong: dict, answer: str):
    experiment = find(name)
    with pytest.raises((InputError, NameLookupError), match=answer):
        experiment.refuse_bad(dataclasses.replace(experiment.preset("smoke"), **wrong))


def test_parts_of_epochs_must_have_one():
    experiment = find("batch-and-schedule")
    for parts in (1, 5):
        with pytest.raises(InputError, match="two parts or more"):
            experiment.refuse_bad(dataclasses.replace(experiment.preset("smoke"), parts=parts))


@pytest.mark.parametrize("name", NAMES)
def test_absent_data_is_said_before_anything_runs(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LAYERWISE_DATA", raising=False)
    experiment = find(name)
    with pytest.raises(MissingDataError, match="LAYERWISE_DATA is not set"):
        experiment.refuse_bad(dataclasses.replace(experiment.preset("paper"), device="cpu"))


@pytest.mark.parametrize("asked", [True, False])
def test_passes_are_in_bfloat16_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, asked: bool):
    from layerwise.studies.fisher_geometry import image_classifiers as study

    made = []

    def compared(given, chosen, **options):
        made.append(type(given.model(0)).__name__)
        return {}, {}

    monkeypatch.setattr(study, "compared", compared)
    experiment = find("conv-nets")
    config = dataclasses.replace(experiment.preset("smoke"), methods=("sgd",), bfloat16=asked)
    list(experiment.run(config, experiment.cells_of(config)[0], [0]))
    assert made == ["InBfloat16" if asked else "Sequential"]
