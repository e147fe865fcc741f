"""quadratic-model, supernat, which-norm, complexity: smoke presets, claims that can fail, bad input."""

import dataclasses

import jaxtyping
import pytest
import torch
from experiment_records import records, smoke

from error_sentences import WORDED
from layerwise.experiments.catalog import find
from layerwise.experiments.claims import HELD, NOT_HELD, judge
from layerwise.experiments.george2023 import complexity, quadratic_model
from layerwise.foundations.errors import InputError

NAMES = ("quadratic-model", "supernat", "which-norm", "complexity")


def ran_smoke(name: str):
    if name == "complexity":
        pytest.importorskip("sklearn")
    return find(name), find(name).preset("smoke"), smoke(name)


@pytest.fixture(params=NAMES)
def ran(request: pytest.FixtureRequest):
    return ran_smoke(request.param)


def decided(experiment, config, found) -> dict[str, bool]:
    """By name, whether a claim ended as it is expected to; those that lack seeds are left out."""
    verdicts = {claim.name: judge(claim, found) for claim in experiment.claims(config)}
    return {name: verdict.as_expected for name, verdict in verdicts.items() if verdict.status in (HELD, NOT_HELD)}


def test_smoke_is_as_expected(ran):
    found = decided(*ran)
    assert len(found) >= 3
    assert [name for name, expected in found.items() if not expected] == []


def test_claims_follow_the_numbers(ran):
    """Each claim about one value, with that value turned into the opposite, ends the other way."""
    experiment, config, found = ran
    for claim in experiment.claims(config):
        verdict = judge(claim, found)
        if verdict.status not in (HELD, NOT_HELD) or claim.name.endswith("seeds-differ"):
            continue
        worst = {"<=": 1e9, "<": 1e9, ">=": -1e9, ">": -1e9, "within": 1e9}[claim.relation]
        wrong = -worst if verdict.status == NOT_HELD else worst
        turned = dataclasses.replace(claim, quantity=lambda r, v=wrong: dict.fromkeys(range(config.seeds), v))
        assert judge(turned, found).status != verdict.status


@pytest.mark.parametrize(
    ("name", "cell", "change", "claim"),
    [
        ("quadratic-model", "formulas", {"ode/linearized": 1e-3}, "formulas/ode/linearized"),
        ("quadratic-model", "formulas", {"descent/halved": 4.0}, "formulas/descent/halved"),
        ("quadratic-model", "order-reversal", {"order/non-linear": -0.8}, "order-reversal/order/non-linear"),
        ("quadratic-model", "order-reversal", {"times/linearized": 0.03}, "order-reversal/times/linearized"),
        ("quadratic-model", "label-noise/aligned", {"difficult/non-linear": 1.8}, "label-noise/aligned/difficult"),
        ("quadratic-model", "spurious-feature", {"difficult/non-linear": 1.2}, "spurious-feature/difficult"),
        ("supernat", "regression", {"supernat/test": 0.4, "gd/test": 0.5}, "final-error"),
        ("supernat", "regression", {"supernat/test": 0.6, "gd/test": 0.5}, "better"),
        ("supernat", "regression", {"supernat/test": 0.15, "gd/test": 0.5}, "quarter"),
        ("supernat", "regression", {"supernat/bound": 9.0}, "bound"),
        ("supernat", "regression", {"supernat-trace/test": 0.0}, "trace"),
        ("which-norm", "singular-values", {"agrees/optimal": -1.0}, "follows"),
        ("which-norm", "singular-values", {"loose": 1.0}, "loose"),
        ("which-norm", "eigenvalues", {"varies": 0.1}, "constant"),
        ("complexity", "corruption/1", {"path": 0.0}, "corruption"),
        ("complexity", "width/1024", {"path": 1e9}, "width/path"),
        ("complexity", "width/1024", {"frobenius": 0.1}, "width/frobenius"),
        ("complexity", "width/1024", {"path": 1e9}, "width/compared"),
    ],
)
def test_every_claim_can_fail(name: str, cell: str, change: dict, claim: str):
    experiment, config, found = ran_smoke(name)
    broken = [r | {"values": r["values"] | change} if r["cell"] == cell else r for r in found]
    assert decided(experiment, config, broken)[claim] is False


@pytest.mark.parametrize("preset", ["laptop", "paper"])
def test_claims_of_larger_presets_read_what_is_recorded(ran, preset: str):
    experiment, _, found = ran
    config = dataclasses.replace(experiment.preset(preset), seeds=2)
    like = {record["cell"].partition("/")[0]: record for record in found}
    again = [
        like.get(cell.key.partition("/")[0], found[-1]) | {"cell": cell.key, "seed": seed}
        for cell in experiment.cells_of(config)
        for seed in (0, 1)
    ]
    assert all(judge(claim, again).n == 2 for claim in experiment.claims(config))
    assert experiment.figures(config, again)


def test_figures_have_all_points(ran):
    experiment, config, found = ran
    for figure in experiment.figures(config, found):
        for panel in figure.panels:
            assert all(len(curve.x) == len(curve.y) > 0 for curve in panel.curves)
    assert experiment.figures(config, [])


def test_orders_and_agreements():
    assert quadratic_model.order([1.0, 2.0, 2.0]) == pytest.approx(2 / 3)
    assert complexity.agreement([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)
    assert complexity.agreement([1, 1], [1, 2]) == 0
    quantity = complexity.across("width", (8, 64), ["path", "gap"], lambda a, b: a[1] / a[0] + b[1])
    rows = [{"cell": f"width/{w}", "seed": s, "values": {"path": w, "gap": s}} for w in (8, 64) for s in (0, 1)]
    assert quantity(rows[:-1]) == {0: 8.0}
    assert quantity(rows) == {0: 8.0, 1: 9.0}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("quadratic-model", {"flipped": 10}),
        ("quadratic-model", {"mu": (1.0, 2.0)}),
        ("quadratic-model", {"threshold": 1.5}),
        ("supernat", {"rate": 2.0}),
        ("supernat", {"steps": 0}),
        ("which-norm", {"examples": 1000}),
        ("which-norm", {"scales": 1}),
        ("which-norm", {"least": 0.6}),
        ("complexity", {"images": "digit"}),
        ("complexity", {"trained_on": 1790}),
        ("complexity", {"corruptions": (0.0, 1.5)}),
        ("complexity", {"momentum": 1.5}),
    ],
)
def test_bad_settings_are_refused_before_anything_runs(name: str, wrong: dict):
    experiment = find(name)
    with pytest.raises((InputError, KeyError), match=WORDED):
        experiment.refuse_bad(dataclasses.replace(experiment.preset("smoke"), **wrong))


def test_the_paper_preset_runs_small(monkeypatch: pytest.MonkeyPatch):
    """MNIST and CIFAR-10 of noise, VGG19 with two channels, a few steps."""
    from layerwise import data
    from layerwise.studies.tangent_alignment import classification

    def noise(name: str):
        rng = torch.Generator().manual_seed(0)
        shape = (1, 28, 28) if name == "mnist" else (3, 32, 32)
        part = data.Images(torch.rand(40, *shape, generator=rng), torch.arange(40) % 10)
        return part, part

    monkeypatch.setattr(classification, "_images", noise)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    small = {"seeds": 1, "widths": (4, 6, 8), "corruptions": (0.0, 1.0), "channels": (2,), "photographs": 30}
    paper = dataclasses.replace(
        find("complexity").preset("paper"), **small, trained_on=30, batch=15, most=2, device="cpu"
    )
    found = records(complexity.EXPERIMENT, paper, [0])
    claims = complexity.claims(paper)
    assert {claim.name for claim in claims} >= {"corruption", "width/frobenius-ranks"}
    assert all(judge(claim, found).n == 1 for claim in claims)
    assert [record["values"]["steps"] for record in found] == [2.0] * 6
