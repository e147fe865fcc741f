"""Experiment `samples`: rows, claims that can fail one by one, figures."""

import math

import jaxtyping
import pytest
from experiment_records import records

from layerwise.experiments import features_samples
from layerwise.experiments.catalog import find
from layerwise.experiments.claims import HELD, NOT_HELD, judge
from layerwise.experiments.features_samples_runs import BOUNDARY, LIMITS, SIMULATED, STEPS

EXPERIMENT = features_samples.EXPERIMENT


@pytest.fixture(scope="module")
def smoke():
    """Records of preset smoke, with annotations unchecked for speed; tests/studies checks them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        return records(EXPERIMENT, EXPERIMENT.preset("smoke"), [0])


def test_smoke_holds_what_it_claims(smoke):
    assert find("samples") is EXPERIMENT
    claims = EXPERIMENT.claims(EXPERIMENT.preset("smoke"))
    assert len(claims) == 3
    for claim in claims:
        verdict = judge(claim, smoke)
        assert verdict.status == HELD, (claim.name, verdict.values)


def test_a_row_says_what_was_needed(smoke):
    config, values = EXPERIMENT.preset("smoke"), smoke[0]["values"]
    for name in config.members:
        assert 0 <= values[f"{name}@1/place"] < config.rates
        assert values[f"{name}/factor"] == values[f"{name}@100"] / values[f"{name}@1"]
    assert values["kfac@1"] % config.batch == 0
    assert values["least-squares@1"] <= values["kfac@1"]


def test_the_theory_of_a_boundary_is_its_target(smoke):
    """Simulated at factors of the boundary; below it the lemma is below the target, above it above."""
    config, series = EXPERIMENT.preset("smoke"), smoke[-1]["series"]
    for method in SIMULATED:
        for factor, edge, rho in zip(
            series["factor"], series[f"{method}/boundary"], series[f"{method}/theory"], strict=True
        ):
            assert (rho > config.correlation) == (factor > 1 and math.isfinite(edge))


def test_figures(smoke):
    config = EXPERIMENT.preset("smoke")
    needs, paths, boundary = EXPERIMENT.figures(config, smoke)
    by_label = {curve.label: curve for curve in needs.panels[0].curves}
    assert list(by_label["KFAC"].x) == [1.0, 100.0]
    assert by_label["least squares of rank k"].style == "dashed"
    assert len(paths.panels[0].curves) == len(config.members)
    sgd = next(curve for curve in boundary.panels[0].curves if curve.label == "SGD")
    assert max(sgd.x) < 0.75  # where 1/√(1 + e²) = 0.8
    for figure in EXPERIMENT.figures(config, []):
        assert figure.panels


# --- Claims of the large presets ---------------------------------------------------------------------------------


def made(seed, needed, steps, shift=0.0):
    """Records of preset paper with given needs (κ = 1 and 1e4), steps of KFAC and correlations around the target."""
    config = EXPERIMENT.preset("paper")
    values = {f"{name}@10000": last for name, (_, last) in needed.items()}
    values |= {f"{name}/factor": last / first for name, (first, last) in needed.items()}
    values |= {"sgd/late": 0.85, "kfac/growth": 0.12, "sgd@1000": 3e4, "adam@1000": 1e4, "sign@1000": 5e4}
    points = [(e, factor) for e in config.anisotropies for factor in config.factors]
    series = {"factor": [factor for _, factor in points]}
    for method in SIMULATED:
        edges = [math.inf if method == "sgd" and e > 0.75 else 5.0 for e, _ in points]
        theory = [
            0.72 if math.isinf(edge) else 0.8 + 0.05 * math.log2(factor)
            for edge, (_, factor) in zip(edges, points, strict=True)
        ]
        series |= {f"{method}/boundary": edges, f"{method}/theory": theory}
        series[f"{method}/found"] = [rho + shift for rho in theory]
    return [
        {"cell": STEPS, "seed": seed, "values": values, "series": {}},
        {"cell": LIMITS, "seed": seed, "values": steps, "series": {}},
        {"cell": BOUNDARY, "seed": seed, "values": {}, "series": series},
    ]


NEEDED = {
    **dict.fromkeys(("kfac", "ekfac", "foof", "mahalanobis", "locoprop", "ngd"), (700.0, 2500.0)),
    **dict.fromkeys(("sgd", "sign", "muon", "adam"), (900.0, 200000.0)),
    **dict.fromkeys(("shampoo", "soap"), (3000.0, 14000.0)),
    "least-squares": (30.0, 600.0),
}
REFUTED = {"sign-before-sgd"}
LIMITED = {"steps@128/0.0001": 20.0, "steps@128/1e-08": 50.0, "steps@512/0.0001": 15.0, "steps@512/1e-08": 7.0}


def verdicts(needed=NEEDED, steps=LIMITED, shift=0.0):
    found = [record for seed in range(3) for record in made(seed, needed, steps, shift)]
    claims = EXPERIMENT.claims(EXPERIMENT.preset("paper"))
    return {claim.name.split("/", 1)[1]: judge(claim, found).status for claim in claims}


def failed(found):
    return {name for name, status in found.items() if status == NOT_HELD}


def test_declared_refuted_is_what_fails():
    claims = EXPERIMENT.claims(EXPERIMENT.preset("paper"))
    assert {claim.name.split("/", 1)[1] for claim in claims if claim.expected == "refuted"} == REFUTED


def test_claims_hold_on_what_was_expected():
    found = verdicts()
    assert len(found) >= 20
    assert failed(found) == REFUTED
    never = NEEDED | {"sgd": (900.0, math.inf), "sign": (900.0, math.inf)}
    assert failed(verdicts(never)) == REFUTED


@pytest.mark.parametrize(
    ("change", "failing"),
    [
        ({"kfac": (700.0, 10000.0)}, {"kfac-factor", "kfac-leads", "kfac-near-least-squares"}),
        ({"foof": (700.0, math.inf)}, {"foof-factor"}),
        ({"sgd": (900.0, 9000.0)}, {"sgd-factor"}),
        ({"soap": (3000.0, 4000.0)}, {"kfac-leads"}),
        ({"soap": (1000.0, 14000.0)}, {"soap-factor"}),
        ({"kfac": (math.inf, math.inf)}, {"kfac-factor", "kfac-leads", "kfac-near-least-squares"}),
    ],
)
def test_claims_about_needs_fail_one_by_one(change, failing):
    found = verdicts(NEEDED | change)
    assert failed(found) - REFUTED == failing


def test_claims_about_limits_and_boundary_fail_one_by_one():
    found = verdicts(steps=LIMITED | {"steps@512/0.0001": 7.0})
    assert failed(found) - REFUTED == {"damping"}
    found = verdicts(steps=LIMITED | {"steps@128/1e-08": 7.0})
    assert failed(found) - REFUTED == {"noise"}
    high = failed(verdicts(shift=0.09)) - REFUTED
    assert high == {"near-theory", "sgd-out-of-reach", *(f"{method}-below" for method in SIMULATED)}
    low = failed(verdicts(shift=-0.06)) - REFUTED
    assert low == {"near-theory", *(f"{method}-above" for method in SIMULATED)}
