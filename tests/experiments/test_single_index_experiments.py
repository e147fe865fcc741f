"""Figure 3, Theorem 3.9 and Appendix C.4 of Zhang et al. (2025) as experiments: rows, claims that can fail, figures."""

import dataclasses

import jaxtyping
import pytest

from layerwise.experiments import zhang2025_correlation_anisotropy as by_anisotropy
from layerwise.experiments import zhang2025_correlation_damping as by_damping
from layerwise.experiments import zhang2025_head_refit as head_refit
from layerwise.experiments import zhang2025_rank_one as rank_one
from layerwise.experiments.against_theory import agreement, deviations, means
from layerwise.experiments.catalog import find
from layerwise.experiments.claims import HELD, NOT_ENOUGH, NOT_HELD, judge

MODULES = {
    "correlation-damping": by_damping,
    "correlation-anisotropy": by_anisotropy,
    "rank-one": rank_one,
    "head-refit": head_refit,
}


def records(experiment, config):
    return [
        {"cell": cell.key, "seed": row.seed, "values": dict(row.values), "series": dict(row.series)}
        for cell in experiment.cells_of(config)
        for row in experiment.run(config, cell, range(config.seeds))
    ]


@pytest.fixture(scope="module")
def smoke():
    """Records of preset smoke of each, with annotations unchecked for speed; tests/studies checks them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        return {name: records(module.EXPERIMENT, module.EXPERIMENT.preset("smoke")) for name, module in MODULES.items()}


@pytest.mark.parametrize("name", MODULES)
def test_smoke_holds_what_it_claims(name, smoke):
    experiment = find(name)
    assert experiment is MODULES[name].EXPERIMENT
    config = experiment.preset("smoke")
    claims = experiment.claims(config)
    assert claims
    for claim in claims:
        assert judge(claim, smoke[name]).status == HELD, claim.name


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("preset", ["laptop", "paper"])
def test_every_claim_finds_its_values(name, preset, smoke):
    """Small records have all that the claims of the large presets read, but are too few to decide them."""
    experiment = MODULES[name].EXPERIMENT
    found = [record | {"seed": seed} for record in smoke[name] for seed in (record["seed"], record["seed"] + 10)]
    claims = experiment.claims(experiment.preset(preset))
    assert len(claims) == len({claim.name for claim in claims}) >= 3
    for claim in claims:
        assert set(claim.quantity(found)) == {record["seed"] for record in found}, claim.name
        assert judge(claim, found).status == NOT_ENOUGH, claim.name


@pytest.mark.parametrize("name", MODULES)
def test_a_seed_is_the_same_alone(name, smoke):
    experiment = MODULES[name].EXPERIMENT
    config, last = experiment.preset("smoke"), smoke[name][-1]
    cell = next(cell for cell in experiment.cells_of(config) if cell.key == last["cell"])
    (row,) = experiment.run(config, cell, [last["seed"]])
    assert dict(row.series) == last["series"]


@pytest.mark.parametrize("name", MODULES)
def test_figures_show_all_points(name, smoke):
    experiment = MODULES[name].EXPERIMENT
    (figure,) = experiment.figures(experiment.preset("smoke"), smoke[name])
    for panel in figure.panels:
        lengths = {len(curve.x) for curve in panel.curves}
        assert len(lengths) == 1
        assert lengths.pop() >= 3
        assert any(curve.style == "dashed" for curve in panel.curves)
    assert experiment.figures(experiment.preset("smoke"), [])[0].panels


def test_presets_have_the_sizes_of_figure_3():
    left, right = (MODULES[f"correlation-{name}"].EXPERIMENT.preset("paper") for name in ("damping", "anisotropy"))
    assert (left.dx, left.n, left.dh, left.anisotropy) == (900, 5000, 1000, 0.5)
    assert (right.dx, right.n, right.dh, right.damping) == (200, 6000, 1000, 1e-6)
    assert min(left.seeds, right.seeds) >= 30


# --- Claims about Figure 3 --------------------------------------------------------------------------------------


def damping_records(shift=0.0, lead=0.07, seeds=30):
    """Thirty trials around the theory, alternately above and below, so that the mean is exact."""
    config = by_damping.EXPERIMENT.preset("paper")
    theory = [0.79, 0.80, 0.81, 0.7474 + lead, 0.80, 0.78, 0.76]
    found = []
    for seed in range(seeds):
        noise = 0.01 * (-1) ** seed
        kfac = [value + noise + shift for value in theory]
        series = {"damping": list(config.dampings), "kfac": kfac, "kfac/theory": theory, "kfac/estimator": [*kfac]}
        series |= {f"sgd{ending}": [0.7474 + noise] * 7 for ending in ("", "/estimator")}
        series |= {"sgd/theory": [0.7474] * 7}
        values = {"sgd": 0.7474 + noise, "sgd/theory": 0.7474, "kfac@0.3": kfac[3]}
        found.append({"cell": "dampings", "seed": seed, "values": values, "series": series})
    return found


def verdicts(module, found, seeds):
    config = dataclasses.replace(module.EXPERIMENT.preset("paper"), seeds=seeds)
    return {claim.name.split("/")[1]: judge(claim, found) for claim in module.EXPERIMENT.claims(config)}


def test_damping_claims_hold_where_theory_and_simulation_agree():
    assert {verdict.status for verdict in verdicts(by_damping, damping_records(), 30).values()} == {HELD}


def test_damping_claims_fail_one_by_one():
    """The standard error is 0.01/√30 = 0.0019: a shift of 0.005 is beyond two of them, 0.01 beyond four."""
    near = verdicts(by_damping, damping_records(shift=0.005), 30)
    assert near["near-theory"].status == HELD
    assert near["beyond-two-errors"].status == NOT_HELD
    assert near["beyond-two-errors"].mean == pytest.approx(7 / 8)  # all of KFAC's, not SGD's
    assert near["beyond-four-errors"].status == HELD
    far = verdicts(by_damping, damping_records(shift=0.015), 30)
    assert far["near-theory"].status == NOT_HELD
    assert far["near-theory"].mean == pytest.approx(0.015)
    assert far["beyond-four-errors"].status == NOT_HELD
    behind = verdicts(by_damping, damping_records(lead=0.03), 30)
    assert behind["kfac-ahead"].status == NOT_HELD
    assert behind["near-theory"].status == HELD
    records = damping_records()
    for record in records:
        record["series"]["kfac"][5] += 0.1
    moved = verdicts(by_damping, records, 30)
    assert moved["best-damping"].status == NOT_HELD
    assert moved["best-damping"].mean == 3.0
    assert moved["direction-is-the-estimator"].status == NOT_HELD


def test_few_trials_have_a_wider_tolerance_and_no_claim_about_errors():
    names = [claim.name for claim in agreement("a", ["kfac"], seeds=8, tolerance=0.01, source="")]
    assert names == ["a/near-theory"]
    (claim,) = agreement("a", ["kfac"], seeds=8, tolerance=0.01, source="")
    assert claim.target == pytest.approx(0.01 * (30 / 8) ** 0.5)
    assert [c.target for c in agreement("a", ["kfac"], seeds=60, tolerance=0.01, source="")] == [0.01, 0.1, 4.0]


def test_points_and_errors_over_trials():
    found = damping_records(shift=0.002, seeds=4)
    points = deviations(found, "dampings", ["sgd", "kfac"])
    assert len(points) == 8
    assert points[0].difference == pytest.approx(0.0, abs=1e-12)
    assert points[1].difference == pytest.approx(0.002)
    assert points[1].error == pytest.approx(0.01 * (4 / 3) ** 0.5 / 2)
    assert deviations(found[:1], "dampings", ["kfac"]) == []
    assert means(found, "dampings", "damping", "kfac", "KFAC").y[0] == pytest.approx(0.792)


def anisotropy_records(sgd, kfac, damped):
    values = {}
    grid = by_anisotropy.EXPERIMENT.preset("paper").anisotropies
    for at, e in enumerate(grid):
        values |= {f"sgd@{e:g}": sgd[at], f"kfac@{e:g}": kfac[at], f"damped@{e:g}": damped[at]}
    found = []
    for seed in range(30):
        noise = 0.01 * (-1) ** seed
        series = {"anisotropy": list(grid)}
        for name, column in (("sgd", sgd), ("kfac", kfac), ("damped", damped)):
            series |= {name: [value + noise for value in column], f"{name}/theory": column}
        shifted = {name: value + noise for name, value in values.items()}
        found.append({"cell": "anisotropies", "seed": seed, "values": shifted, "series": series})
    return found


SGD = [0.9535, 0.9366, 0.8909, 0.8276, 0.7581, 0.7236, 0.7067, 0.6967]
KFAC = [0.9672, 0.9659, 0.9613, 0.9501, 0.9161, 0.8566, 0.7653, 0.604]
DAMPED = [0.9673, 0.966, 0.9617, 0.9516, 0.9229, 0.8801, 0.829, 0.768]


def test_anisotropy_claims_are_as_expected_on_the_predicted_values():
    found = verdicts(by_anisotropy, anisotropy_records(SGD, KFAC, DAMPED), 30)
    assert all(verdict.as_expected for verdict in found.values())
    assert found["kfac-ahead-always"].status == NOT_HELD
    assert found["sgd-falls"].mean == pytest.approx(0.2299)
    assert found["kfac-ahead"].mean == pytest.approx(0.158)


def test_anisotropy_claims_fail_where_kfac_is_sgd():
    found = verdicts(by_anisotropy, anisotropy_records(SGD, SGD, SGD), 30)
    for name in ("kfac-ahead", "kfac-stays", "damping-helps"):
        assert found[name].status == NOT_HELD, name
    flat = verdicts(by_anisotropy, anisotropy_records(KFAC[:1] * 8, KFAC, DAMPED), 30)
    assert flat["sgd-falls"].status == NOT_HELD


# --- Theorem 3.9 and Appendix C.4 -------------------------------------------------------------------------------


def test_rank_one_claims_read_powers_of_n():
    samples = [500, 1000, 2000, 4000]

    def record(seed, power, size):
        series = {"samples": samples}
        for name in ("sgd", "kfac"):
            series |= {f"{name}/error": [n**power for n in samples], f"{name}/size": [n**size for n in samples]}
        return {"cell": "sizes", "seed": seed, "values": {}, "series": series}

    good = verdicts(rank_one, [record(seed, -0.5, 0.01 * seed) for seed in range(10)], 10)
    assert {verdict.status for verdict in good.values()} == {HELD}
    assert good["sgd-error-falls"].mean == pytest.approx(-0.5)
    bad = verdicts(rank_one, [record(seed, -0.1, -0.4) for seed in range(10)], 10)
    assert {verdict.status for verdict in bad.values()} == {NOT_HELD}


def test_refit_claims_can_fail():
    def record(cell, seed, none, sgd, kfac):
        return {"cell": cell, "seed": seed, "values": {"none": none, "sgd/best": sgd, "kfac/best": kfac}, "series": {}}

    good = [record("relu", s, 0.7, 0.2, 0.16 + s / 999) for s in range(30)]
    odd = [record("tanh", s, 0.8, 0.78, 0.77) for s in range(30)]
    claims = head_refit.EXPERIMENT.claims(head_refit.EXPERIMENT.preset("paper"))
    found = {claim.name: judge(claim, good + odd) for claim in claims}
    assert all(verdict.as_expected for verdict in found.values())
    bad = [record("relu", s, 0.7, 0.16, 0.5 + s / 999) for s in range(30)]
    found = {claim.name: judge(claim, bad + odd) for claim in claims}
    assert found["relu/kfac-beats-random-features"].status == NOT_HELD
    assert found["relu/kfac-before-sgd"].status == NOT_HELD
