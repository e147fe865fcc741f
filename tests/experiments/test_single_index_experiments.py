"""Figure 3, Theorem 3.9 and Appendix C.4 of Zhang et al. (2025) as experiments: rows, claims that can fail, figures."""

import dataclasses

import jaxtyping
import pytest

from layerwise.experiments.against_theory import agreement, deviations, means
from layerwise.experiments.catalog import find
from layerwise.experiments.claims import HELD, NOT_ENOUGH, NOT_HELD, judge
from layerwise.experiments.zhang2025 import correlation_anisotropy as by_anisotropy
from layerwise.experiments.zhang2025 import correlation_damping as by_damping
from layerwise.experiments.zhang2025 import head_refit as head_refit
from layerwise.experiments.zhang2025 import rank_one as rank_one

LABELS = head_refit.LABELS
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
        assert judge(claim, smoke[name]).as_expected, claim.name


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("preset", ["laptop", "paper"])
def test_every_claim_finds_its_values(name, preset, smoke):
    """Small records have all that the claims of the large presets read, but are too few to decide them."""
    experiment = MODULES[name].EXPERIMENT
    small, config = experiment.preset("smoke"), experiment.preset(preset)
    if name == "correlation-anisotropy":  # the claims of these sizes, at the points of the small run
        config = dataclasses.replace(config, anisotropies=small.anisotropies)
    found = smoke[name]
    seeds = {record["seed"] for record in found}
    claims = experiment.claims(config)
    assert len(claims) == len({claim.name for claim in claims}) >= 3
    for claim in claims:
        assert set(claim.quantity(found)) == seeds, claim.name
        if len(seeds) < config.seeds:
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
    for panel in (
        panel for figure in experiment.figures(experiment.preset("smoke"), smoke[name]) for panel in figure.panels
    ):
        lengths = {len(curve.x) for curve in panel.curves}
        assert len(lengths) == 1
        assert lengths.pop() >= 2
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
    claims = module.EXPERIMENT.claims(config)
    return {claim.name.removeprefix(claims[0].name.split("/")[0] + "/"): judge(claim, found) for claim in claims}


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


def test_few_trials_have_a_wider_tolerance_and_fewer_claims_about_errors():
    def targets(seeds):
        claims = agreement("a", ["kfac"], seeds=seeds, tolerance=0.01, source="Lemma 3.12")
        return {claim.name: claim.target for claim in claims}

    assert targets(8) == {"a/near-theory": pytest.approx(0.01 * (30 / 8) ** 0.5)}
    assert targets(12) == {"a/near-theory": pytest.approx(0.01 * 2.5**0.5), "a/beyond-six-errors": 6}
    assert list(targets(60).values()) == [0.01, 0.1, 4.0]


def test_only_the_paper_is_quoted_as_the_paper():
    """Agreement with the lemmas is the paper's claim; tests of ours that failed are not."""
    origins = {claim.name: claim.origin for claim in by_damping.claims(by_damping.EXPERIMENT.preset("paper"))}
    assert origins["dampings/near-theory"] == origins["dampings/kfac-ahead"] == "paper"
    failed = [claim for m in MODULES.values() for claim in m.claims(m.EXPERIMENT.preset("paper")) if claim.why]
    assert failed
    assert {claim.origin for claim in failed} == {"ours"}


def test_trials_that_are_all_the_same_are_noticed():
    found = [record | {"seed": seed} for seed, record in enumerate(damping_records(seeds=1) * 30)]
    got = verdicts(by_damping, found, 30)
    assert got["near-theory"].status == HELD
    assert got["beyond-four-errors"].status == NOT_HELD


def test_points_and_errors_over_trials():
    found = damping_records(shift=0.002, seeds=4)
    points = deviations(found, "dampings", ["sgd", "kfac"])
    assert len(points) == 8
    assert points[0].difference == pytest.approx(0.0, abs=1e-12)
    assert points[1].difference == pytest.approx(0.002)
    assert points[1].error == pytest.approx(0.01 * (4 / 3) ** 0.5 / 2)
    assert deviations(found[:1], "dampings", ["kfac"]) == []
    assert means(found, "dampings", "damping", "kfac", "KFAC").y[0] == pytest.approx(0.792)


def anisotropy_records(sgd, kfac, damped, miss=0.0):
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
        noisy = {name: [0.5 + noise] * 6 for name in ("sgd", "kfac")}
        noisy |= {f"{name}/theory": [0.5 + miss] * 6 for name in ("sgd", "kfac")}
        found.append({"cell": "noise", "seed": seed, "values": {}, "series": noisy})
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


def test_a_wrong_noise_term_is_noticed():
    found = verdicts(by_anisotropy, anisotropy_records(SGD, KFAC, DAMPED, miss=0.06), 30)
    assert {name for name, verdict in found.items() if not verdict.as_expected} == {
        "noise/near-theory",
        "noise/beyond-two-errors",
        "noise/beyond-four-errors",
    }


# --- Theorem 3.9 and Appendix C.4 -------------------------------------------------------------------------------


def test_rank_one_claims_read_powers_of_n():
    samples = [500, 1000, 2000, 4000]

    def record(seed, power, size, share):
        series = {"samples": samples} | {f"{name}/share": [n**power for n in samples] for name in ("sgd", "kfac")}
        values = {f"{name}/{what}": x for name in ("sgd", "kfac") for what, x in (("size", size), ("share", share))}
        return {"cell": "sizes", "seed": seed, "values": values, "series": series}

    good = verdicts(rank_one, [record(seed, -0.5, 1 + 0.01 * seed, 0.03) for seed in range(10)], 10)
    assert {verdict.status for verdict in good.values()} == {HELD}
    assert good["sgd-error-falls"].mean == pytest.approx(-0.5)
    bad = verdicts(rank_one, [record(seed, -0.1, 1.4, 0.1) for seed in range(10)], 10)
    assert {verdict.status for verdict in bad.values()} == {NOT_HELD}


def refit_records(none=0.7, sgd=0.2, kfac=0.16, odd=0.77, left=(0.5, 0.1, 0.05), power=-0.5):
    """Thirty trials of every cell of head-refit; `left` after 0, 1 and 2 terms at every α but the largest."""
    config, found = head_refit.EXPERIMENT.preset("paper"), []
    for seed in range(30):
        for cell, best in (("relu", kfac), ("tanh", odd)):
            values = {"none": none, "sgd/best": sgd, "kfac/best": best + seed / 999}
            found.append({"cell": cell, "seed": seed, "values": values, "series": {}})
            series = {"samples": list(config.samples)}
            values = {f"{n}@{a:g}/{k}": x for n in ("sgd", "kfac") for a in config.orders for k, x in enumerate(left)}
            values |= {"kfac@0.49/3": 1.0}
            series |= {f"{n}@0.2/2": [m**power for m in config.samples] for n in ("sgd", "kfac")}
            found.append({"cell": f"expansion/{cell}", "seed": seed, "values": values, "series": series})
    return found


@pytest.mark.parametrize(
    ("changed", "failing"),
    [
        ({}, set()),
        ({"kfac": 0.45}, {"relu/kfac-beats-random-features", "relu/kfac-before-sgd"}),
        (
            {"kfac": 0.6},
            {f"relu/kfac-{w}" for w in ("beats-random-features", "before-sgd", "generalises")},
        ),
        ({"odd": 0.3}, {"tanh/even-half-is-left"}),
        ({"left": (0.5, 0.1, 0.3)}, {f"expansion/relu/{n}-{w}" for n in LABELS for w in ("small", "second-term")}),
        ({"left": (0.2, 0.1, 0.05)}, {f"expansion/tanh/{n}-first-term" for n in LABELS}),
        ({"power": 0.0}, {f"expansion/relu/{n}-falls" for n in LABELS}),
    ],
)
def test_refit_claims_fail_one_by_one(changed, failing):
    claims = head_refit.EXPERIMENT.claims(head_refit.EXPERIMENT.preset("paper"))
    found = refit_records(**changed)
    assert {claim.name for claim in claims if not judge(claim, found).as_expected} == failing
