"""The other experiments on the linear representation: four settings, rates, transfer, many tasks, the family."""

import dataclasses
import math

import jaxtyping
import numpy as np
import pytest
import torch
from experiment_records import records

from layerwise.experiments.catalog import find
from layerwise.experiments.claims import HELD, NOT_HELD, judge
from layerwise.experiments.zhang2025 import contraction as contraction
from layerwise.experiments.zhang2025 import family as family
from layerwise.experiments.zhang2025 import lower_bound as lower_bound
from layerwise.experiments.zhang2025 import multi_task as multi_task
from layerwise.experiments.zhang2025 import second_order as second_order
from layerwise.experiments.zhang2025 import settings as settings
from layerwise.experiments.zhang2025 import transfer as transfer
from layerwise.studies import feature_learning as fl

MODULES = {
    "four-settings": settings,
    "lower-bound": lower_bound,
    "contraction": contraction,
    "transfer": transfer,
    "multi-task": multi_task,
    "family": family,
    "second-order": second_order,
}
ONE_SEED = ("four-settings", "family", "second-order")
"""Long, and no test here needs more; `make mutants` has all seeds."""


@pytest.fixture(scope="module", autouse=True)
def untyped_for_speed():
    """Annotations unchecked, which makes runs three times faster; tests/studies checks them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        yield


class Smoke(dict):
    """Records of smoke presets by the experiment's name, each run when a test first asks for it."""

    def __missing__(self, name):
        experiment = MODULES[name].EXPERIMENT
        config = experiment.preset("smoke")
        self[name] = records(experiment, config, range(1 if name in ONE_SEED else config.seeds))
        return self[name]


@pytest.fixture(scope="module")
def smoke(untyped_for_speed):
    return Smoke()


@pytest.mark.parametrize("name", MODULES)
def test_smoke_runs_claims_and_draws(name, smoke):
    experiment = find(name)
    assert experiment is MODULES[name].EXPERIMENT
    config = experiment.preset("smoke")
    for claim in experiment.claims(config):
        if claim.name.endswith("own-draws"):
            continue  # of two seeds
        verdict = judge(dataclasses.replace(claim, seeds=1) if claim.test != "mean" else claim, smoke[name])
        assert verdict.as_expected, (claim.name, verdict.detail, verdict.values)
    for figure in experiment.figures(config, smoke[name]):
        for panel in figure.panels:
            assert panel.curves
            for curve in panel.curves:
                assert len(curve.x) == len(curve.y) > 0, (figure.name, curve.label)
                assert all(math.isfinite(y) for y in curve.y)


@pytest.mark.parametrize("name", MODULES)
def test_a_seed_is_the_same_alone_and_beside_others(name, smoke):
    experiment = MODULES[name].EXPERIMENT
    alone = records(experiment, experiment.preset("smoke"), [0])
    assert alone == [r for r in smoke[name] if r["seed"] == 0]


def test_every_claim_of_the_longer_presets_finds_its_values(smoke):
    """On short runs of the same cells."""
    for name, sizes in {
        "four-settings": {"steps": 3, "every": 3, "dx": 20, "dy": 8, "k": 3, "batch": 256},
        "family": {"exponents": (-2.0,), "steps": 2, "dx": 20, "dy": 8, "k": 3, "batch": 256},
        "contraction": {"steps": 2, "dx": 16, "dy": 6, "k": 3, "batch": 100, "noisy": 1.0, "starts": 2},
    }.items():
        experiment = MODULES[name].EXPERIMENT
        config = dataclasses.replace(experiment.preset("paper"), **sizes)
        found = records(experiment, config, [0])
        for claim in experiment.claims(experiment.preset("paper")):
            assert set(claim.quantity(found)) == {0} or claim.name.endswith("own-draws"), claim.name


# --- Figures 4, 6–9 -----------------------------------------------------------------------------------------


def test_all_four_settings_and_both_repairs_are_run():
    paper = settings.EXPERIMENT.preset("paper")
    problems = {name: paper.problem(name) for name in paper.settings}
    found = {(p.data, p.anisotropy, p.repair if p.anisotropy == "low" else p.scale) for p in problems.values()}
    readings = [("low", "abs"), ("low", "scaled"), ("high", "none"), ("high", "trace")]
    assert found == {(data, *reading) for data in ("uniform", "gaussian") for reading in readings}
    assert paper.seeds >= 5
    named = {claim.name for claim in settings.EXPERIMENT.claims(paper)}
    assert not any(name.split("/")[1:] == ["amgd", "dist"] for name in named if "low" in name)


def test_claims_of_low_anisotropy_are_the_specification():
    values = {"kfac/dist": 0.002, "dfw/dist": 0.01, "adam/dist": 0.05, "sgd/dist": 0.1, "kfac/loss": 0.075}
    values |= {"amgd-bn-slow/dist": 0.48, "limit": 0.47, "amgd-bn-slow/loss": 0.075}
    record = {"cell": "uniform-low-abs", "values": values | {"adam/loss": 0.08}, "series": {}}
    config = settings.Config(seeds=2, settings=("uniform-low-abs",))

    def statuses(**changed):
        wrong = record | {"values": record["values"] | {key.replace("_", "/"): v for key, v in changed.items()}}
        both = [wrong | {"seed": seed} for seed in (0, 1)]  # of one seed, no share is refuted
        return {claim.name.split("/", 1)[1]: judge(claim, both).status for claim in settings.claims(config)}

    fails = {claim.name.split("/", 1)[1] for claim in settings.claims(config) if claim.expected == "fails"}
    assert fails == {"amgd-bn-slow/dist"}
    assert {name for name, status in statuses().items() if status == NOT_HELD} == fails
    assert statuses(kfac_dist=0.031)["kfac/dist"] == NOT_HELD
    assert statuses(dfw_dist=0.051)["dfw/dist"] == NOT_HELD
    assert statuses(adam_dist=0.36)["adam/dist"] == NOT_HELD
    assert statuses(adam_dist=0.004)["kfac-over-adam"] == NOT_HELD
    assert statuses(sgd_dist=0.009)["kfac-over-sgd"] == NOT_HELD


# --- Proposition 3.5, Theorem 3.6 ---------------------------------------------------------------------------


def test_lower_bound_numbers_of_the_specification(smoke):
    values = smoke["lower-bound"][0]["values"]
    assert values["l=0.1/limsup"] == pytest.approx(0.512, abs=0.001)
    assert values["l=0.1/bound"] == pytest.approx(1 - 4 / 9)
    assert values["l=0.5/intermediate"] < -1e-5


@pytest.mark.parametrize(
    ("module", "wrong", "claim"),
    [
        (contraction, {"kfac@0.9/over": 1.4}, "isotropic/noise/floor"),
        (contraction, {"dfw": 0.7}, "isotropic/noise/dfw"),
        (contraction, {"dfw-not-refitted": 1.0}, "isotropic/noise/dfw-not-refitted"),
        (contraction, {"terms/head": 2.1}, "isotropic/noise/terms/head"),
        (contraction, {"free/found": 0.5}, "isotropic/starts/free/found"),
        (contraction, {"entry": 1.0}, "isotropic/seeds-differ"),
        (lower_bound, {"l=0.1/slack": 0.05}, "tight"),
        (lower_bound, {"l=0.1/slack": -0.01}, "slack"),
        (lower_bound, {"l=0.01/behind": 1.0}, "behind"),
        (lower_bound, {"start": 0.3}, "grid/seeds-differ"),
        (multi_task, {"over": 2.0}, "noise/over"),
        (multi_task, {"few-samples": 1.0}, "noise/few-samples"),
        (transfer, {"beyond": 0.05}, "top/beyond"),
        (transfer, {"beyond-half": 0.0}, "isotropic/beyond-half"),
        (transfer, {"expected": 1.5}, "random/expected"),
    ],
)
def test_claims_fail_on_wrong_values(module, wrong, claim, smoke):
    experiment = module.EXPERIMENT
    found = [
        r | {"values": r["values"] | {name: value for name, value in wrong.items() if name in r["values"]}}
        for r in smoke[experiment.name]
    ]
    (named,) = (c for c in experiment.claims(experiment.preset("smoke")) if c.name == claim)
    assert judge(named, smoke[experiment.name]).status == HELD
    assert judge(named, found).status == NOT_HELD


def test_a_wrong_rank_is_told_from_the_right_one():
    config = contraction.EXPERIMENT.preset("smoke")
    G, task = contraction.problem(config, "isotropic", 2.0, 0)
    assert math.isnan(contraction.rank_distance(config, G, task, 1, 0))
    assert contraction.rank_distance(config, G, task, -1, 0) < 1e-4
    assert contraction.rank_distance(config, G, task, 0, 0) < 1e-4


def test_late_rate_looks_at_resolved_distances_only():
    slow = [1e-5 * 0.9**t for t in range(11)]
    fast = [1e-5, 1e-7, 1e-9, 1e-16, 0.0, 1e-16, 1e-16, 1e-16, 1e-16, 1e-16, 1e-16]
    growing = [1e-5 * 2.0**t for t in range(11)]
    assert contraction.late_rate(torch.tensor([slow, growing]).double()) == pytest.approx(0.9, rel=1e-4)
    assert contraction.late_rate(torch.tensor([slow, fast]).double()) == pytest.approx(0.01, rel=1e-4)


def test_heads_have_the_condition_number_asked_for():
    config = contraction.EXPERIMENT.preset("smoke")
    G, task = contraction.problem(config, "isotropic", 30.0, 0)
    values = torch.linalg.svdvals(task.map @ G.mT)
    assert float(values[0] / values[-1]) == pytest.approx(30, rel=1e-6)


# --- Lemma 3.7 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", transfer.DIRECTIONS)
def test_representations_are_at_their_distance(direction):
    config = transfer.EXPERIMENT.preset("smoke")
    problem = config.problem(0)
    G = transfer.representation(problem, 0.3, direction, 0)
    assert float(fl.subspace_distance(G, problem.G)) == pytest.approx(0.3, rel=1e-9)


def test_bound_terms_by_hand():
    problem = transfer.EXPERIMENT.preset("smoke").problem(0)
    task = problem.test
    misfit, noise = transfer.bound_terms(task, problem.G, 0.2, 100, 0.01)
    F = task.map @ problem.G.mT
    assert misfit == pytest.approx(float(F.norm() ** 2) * float(torch.linalg.norm(task.Sigma, 2)) * 0.04)
    assert noise == pytest.approx((6 * 3 + math.log(100)) / 100)


def test_expected_excess_is_the_mean_of_many_refits():
    """By numpy's least squares on plain samples, at a distance where both parts count."""
    config = transfer.EXPERIMENT.preset("smoke")
    problem = config.problem(0)
    task, n, random = problem.test, 20, np.random.default_rng(0)
    G = transfer.representation(problem, 0.1, "random", 0)
    root, A, g = task.root.numpy(), task.map.numpy(), G.numpy()
    found = []
    for _ in range(3000):
        x = random.standard_normal((n, config.dx)) @ root
        y = x @ A.T + random.standard_normal((n, config.dy))
        fitted = np.linalg.lstsq(x @ g.T, y, rcond=None)[0].T
        found.append(float(np.sum(((fitted @ g - A) @ root) ** 2)))
    assert np.mean(found) == pytest.approx(transfer.expected_excess(task, G, n), rel=0.05)


def test_directions_have_draws_of_their_own(smoke):
    """At distance 0 directions are the same problem, and would be the same numbers if they shared their draws."""
    means = [r["series"]["mean"][0] for r in smoke["transfer"] if r["seed"] == 0 and r["cell"] != "isotropic"]
    assert len(set(means)) == len(means) == 2


# --- The family ---------------------------------------------------------------------------------------------


def test_locoprop_is_foof_with_another_ridge():
    setting = fl.Setting(dx=20, dy=8, k=3, batch=256, scale="trace")
    found = fl.compare({"l": fl.LocoProp(lr=100.0), "f": fl.FOOF(lr=1.0, ridge=0.01)}, setting=setting, steps=10)
    assert float(found["l"].dist[0, -1]) == pytest.approx(float(found["f"].dist[0, -1]), rel=1e-6)


def test_alignment_tells_who_inverts_the_inputs():
    setting = fl.Setting(dx=40, dy=8, k=4, batch=256, scale="trace")
    found = {name: family.alignment(make(), setting, 0) for name, (_, make, _) in family.MEMBERS.items()}
    assert found["kfac"] == pytest.approx(1, abs=1e-6)
    assert found["ngd"] == pytest.approx(1, abs=1e-6)
    assert min(found["dfw"], found["foof"]) > 3 * max(found[name] for name in ("sgd", "adam", "sign", "muon"))


def test_every_member_of_the_study_is_there():
    kinds = {type(make()) for _, make, _ in family.MEMBERS.values()}
    assert {type(algorithm) for algorithm in fl.ALGORITHMS.values()} - {fl.MinMin} == kinds  # min-min is KFAC at rate 1
