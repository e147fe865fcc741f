"""Experiment `samples`: rows, claims that can fail one by one, figures."""

import math
from dataclasses import replace

import jaxtyping
import pytest
from experiment_records import records

from layerwise.experiments.beyond import samples as features_samples
from layerwise.experiments.beyond.samples_runs import BOUNDARY, LIMITS, SIMULATED, STEPS, Config
from layerwise.experiments.catalog import find
from layerwise.experiments.claims import HELD, NOT_HELD, judge
from layerwise.foundations.errors import InputError
from layerwise.studies import feature_learning as fl
from layerwise.studies.feature_learning import samples

EXPERIMENT = features_samples.EXPERIMENT


@pytest.fixture(scope="module")
def smoke():
    """Records of preset smoke, with annotations unchecked for speed; tests/studies checks them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        return records(EXPERIMENT, EXPERIMENT.preset("smoke"), [0])


def test_smoke_holds_what_it_claims(smoke):
    assert find("samples") is EXPERIMENT
    claims = EXPERIMENT.claims(replace(EXPERIMENT.preset("smoke"), seeds=1))
    assert len(claims) == 5
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


def rows(config, cell, seeds):
    return list(EXPERIMENT.run(config, next(c for c in EXPERIMENT.cells(config) if c.key == cell), seeds))


def test_limits_are_those_of_each_damping(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    config = replace(EXPERIMENT.preset("smoke"), dampings=(1.0, 1e-8), steps=25)
    (row,) = rows(config, LIMITS, [0])
    needed = [
        samples.descend(config.recovery(100.0, 64), samples.damped_kfac(damping), config.rate, 0).needed / 64
        for damping in config.dampings
    ]
    assert needed[0] != needed[1]
    assert [row.values["steps@64/1"], row.values["steps@64/1e-08"]] == row.series["steps@64"] == needed


def test_every_seed_has_trials_of_its_own(monkeypatch):
    asked = []
    correlations = fl.correlations
    monkeypatch.setattr(fl, "correlations", lambda s, seed, d: asked.append(seed) or correlations(s, seed, d))
    config = replace(EXPERIMENT.preset("smoke"), anisotropies=(0.0,), trials=2, index_dx=8, dh=8)
    trials = []
    for seed in (0, 1, 2):
        rows(config, BOUNDARY, [seed])
        trials.append(set(asked))
        asked.clear()
    assert [len(own) for own in trials] == [2, 2, 2]
    assert len(set.union(*trials)) == 6


def test_the_late_exponent_is_that_of_large_condition_numbers(monkeypatch):
    """Needs that are flat up to κ = 100 and linear in κ from there."""

    def search(setting, member, seed, rates):
        needed = 6400 * max(1.0, setting.condition / 100)
        return samples.Search(rate=0.1, place=0, best=samples.Descent(dist=(1.0, 0.1), needed=needed))

    monkeypatch.setattr(samples, "search", search)
    config = replace(EXPERIMENT.preset("smoke"), conditions=(1.0, 10.0, 1e2, 1e3, 1e4), members=("sgd",))
    values = rows(config, STEPS, [0])[0].values
    assert values["sgd/late"] == pytest.approx(1.0)
    assert values["sgd/growth"] < 0.7
    assert values["sgd/factor"] == pytest.approx(100)


def test_a_need_of_nothing_gives_no_factor():
    """A start that counts as found."""
    config = replace(EXPERIMENT.preset("smoke"), distance=0.9999999, members=("sgd",), steps=12)
    assert math.isnan(rows(config, STEPS, [0])[0].values["sgd/factor"])


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
    values |= {f"{name}@1": first for name, (first, _) in needed.items()}
    values |= {f"{name}/factor": last / first for name, (first, last) in needed.items()}
    values |= {"sgd/late": 0.85, "kfac/growth": 0.12, "sgd@1000": 3e4, "adam@1000": 1e4, "sign@1000": 5e4}
    points = [(e, factor) for e in config.anisotropies for factor in config.factors]
    series = {"e": [e for e, _ in points], "factor": [factor for _, factor in points]}
    for method in SIMULATED:
        edges = [math.inf if method == "sgd" and e > 0.75 else 1 + 2 * 0.64 / (0.36 * (1 - e**2)) for e, _ in points]
        theory = [
            0.72 if math.isinf(edge) else 0.8 + 0.05 * math.log2(factor)
            for edge, (_, factor) in zip(edges, points, strict=True)
        ]
        series |= {f"{method}/boundary": edges, f"{method}/theory": theory}
        series[f"{method}/learned"] = [rho + shift for rho in theory]
    return [
        {"cell": STEPS, "seed": seed, "values": values, "series": {}},
        {"cell": LIMITS, "seed": seed, "values": steps, "series": {}},
        {"cell": BOUNDARY, "seed": seed, "values": {}, "series": series},
    ]


NEEDED = {
    **dict.fromkeys(("kfac", "ekfac", "foof", "mahalanobis"), (700.0, 2500.0)),
    **dict.fromkeys(("locoprop", "ngd"), (700.0, 7000.0)),
    **dict.fromkeys(("sgd", "sign", "muon", "adam"), (900.0, 200000.0)),
    **dict.fromkeys(("shampoo", "soap"), (3000.0, 14000.0)),
    "least-squares": (30.0, 600.0),
}
BEYOND = {"ngd-beyond-kfac", "locoprop-beyond-kfac"}
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
    assert {claim.name.split("/", 1)[1] for claim in claims if claim.expected == "fails"} == REFUTED


def test_claims_hold_on_what_was_expected():
    found = verdicts()
    assert len(found) >= 20
    assert failed(found) == REFUTED
    never = NEEDED | {"sgd": (900.0, math.inf), "sign": (900.0, math.inf)}
    assert failed(verdicts(never)) == REFUTED


@pytest.mark.parametrize(
    ("change", "failing"),
    [
        ({"kfac": (700.0, 10000.0)}, {"kfac-factor", "kfac-leads", "kfac-near-least-squares", *BEYOND}),
        ({"foof": (700.0, math.inf)}, {"foof-factor"}),
        ({"sgd": (900.0, 9000.0)}, {"sgd-factor"}),
        ({"sgd": (20000.0, math.inf)}, {"sgd-factor"}),  # the budget shows no more than a factor of 13
        ({"ngd": (700.0, 3000.0)}, {"ngd-beyond-kfac"}),
        ({"locoprop": (700.0, 3000.0)}, {"locoprop-beyond-kfac"}),
        ({"soap": (3000.0, 4000.0)}, {"kfac-leads"}),
        ({"soap": (1000.0, 14000.0)}, {"soap-factor"}),
        ({"kfac": (math.inf, math.inf)}, {"kfac-factor", "kfac-leads", "kfac-near-least-squares", *BEYOND}),
        (
            {"kfac": (50000.0, 200000.0), "least-squares": (30.0, 30000.0)}
            | dict.fromkeys(("adam", "sgd", "sign", "muon", "shampoo", "soap"), (2000.0, math.inf)),
            {"kfac-leads", "soap-factor"},
        ),
    ],
)
def test_claims_about_needs_fail_one_by_one(change, failing):
    found = verdicts(NEEDED | change)
    assert failed(found) - REFUTED == failing


def test_claims_about_limits_and_boundary_fail_one_by_one():
    found = verdicts(steps=LIMITED | {"steps@512/0.0001": 7.0})
    assert failed(found) - REFUTED == {"damping"}
    found = verdicts(steps=LIMITED | {"steps@512/0.0001": math.inf, "steps@512/1e-08": 1500.0})
    assert failed(found) - REFUTED == {"damping", "noise"}  # the budget is 2000 steps
    found = verdicts(steps=LIMITED | {"steps@128/1e-08": 7.0})
    assert failed(found) - REFUTED == {"noise"}
    high = failed(verdicts(shift=0.09)) - REFUTED
    assert high == {"near-theory", "sgd-out-of-reach", *(f"{method}-below" for method in SIMULATED)}
    low = failed(verdicts(shift=-0.06)) - REFUTED
    assert low == {"near-theory", *(f"{method}-above" for method in SIMULATED)}


def names(**changes):
    config = replace(EXPERIMENT.preset("laptop"), **changes)
    return {claim.name.split("/", 1)[1] for claim in EXPERIMENT.claims(config)}


def test_only_what_can_be_decided_is_claimed():
    every = names()
    assert {"kfac-leads", "sgd-below", "sgd-out-of-reach", "locoprop-beyond-kfac"} <= every
    assert every - names(members=("kfac", "foof")) >= {"kfac-leads", "sgd-factor"}
    assert not any(name.startswith("kfac-") and name not in every for name in names(members=("foof",)))
    assert not names(members=("foof",)) & {"kfac-leads", "kfac-near-least-squares", "kfac-factor"}
    assert every - names(anisotropies=(0.9,)) == {"sgd-below", "sgd-above"}
    assert every - names(anisotropies=(0.0,)) == {"sgd-out-of-reach"}
    assert names(factors=(2.0, 3.0)) == every - {f"{method}-below" for method in SIMULATED}
    assert not {"adam-before-sgd", "sign-before-sgd"} & names(conditions=(1.0, 1e3, 1e4), members=("sgd", "kfac"))
    assert names(conditions=(1.0, 100.0), members=("sgd",)) == {
        "kfac-below",
        "kfac-above",
        "near-theory",
        "kfac-closed-form",
    }


def test_neither_was_found_decides_nothing():
    config = EXPERIMENT.preset("smoke")
    (claim,) = (claim for claim in EXPERIMENT.claims(config) if "before" in claim.name)

    def status(kfac, sgd):
        values = {"kfac@100": kfac, "sgd@100": sgd}
        return next(iter(claim.quantity([{"cell": STEPS, "seed": 0, "values": values}]).values()))

    assert math.isnan(status(math.inf, math.inf))
    assert status(math.inf, 640.0) == math.inf
    assert status(640.0, math.inf) == 640 / config.beyond
    assert config.beyond == 31 * 64


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"members": ("kfak",)}, "kfac"),
        ({"members": ()}, "at least one"),
        ({"conditions": ()}, "conditions"),
        ({"conditions": (10.0, 100.0)}, "conditions"),
        ({"conditions": (1.0, 100.0, 10.0)}, "conditions"),
        ({"batches": (64,)}, "batches"),
        ({"dampings": (1e-4, 1e-4)}, "dampings"),
        ({"factors": (2.0,)}, "factors"),
        ({"rates": 0}, "rates"),
        ({"dx": 3}, "k=3"),
    ],
)
def test_wrong_configurations_are_refused(wrong, said):
    with pytest.raises(InputError, match=said):
        Config(**wrong)


def test_a_path_goes_on_until_the_last_seed_is_done():
    config = replace(EXPERIMENT.preset("smoke"), members=("sgd",))
    found = [
        {"cell": STEPS, "seed": seed, "values": {}, "series": {"samples": [0, 64, 128, 192], "sgd/dist": dist}}
        for seed, dist in enumerate(([1.0, 0.2, math.nan, math.nan], [1.0, 0.6, 0.4, math.nan]))
    ]
    (curve,) = EXPERIMENT.figures(config, found)[1].panels[0].curves
    assert (curve.x, curve.y) == ([0, 64, 128], [1.0, 0.4, pytest.approx(0.3)])
    assert (curve.low, curve.high) == ([1.0, 0.2, 0.2], [1.0, 0.6, 0.4])
