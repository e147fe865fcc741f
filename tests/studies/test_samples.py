"""Samples needed by optimizers: the problem, the count, and a search that gives up nothing that matters."""

import math

import jaxtyping
import numpy as np
import pytest
import torch

from layerwise.foundations.errors import InputError
from layerwise.studies.feature_learning import samples
from layerwise.studies.feature_learning.measures import subspace_distance
from layerwise.studies.feature_learning.members import MEMBERS, member
from layerwise.studies.feature_learning.reduced_rank import least_squares_needed
from layerwise.studies.feature_learning.samples import Recovery

SMALL = {"dx": 8, "dy": 4, "k": 2, "batch": 32, "steps": 60, "stay": 4}


@pytest.fixture
def untyped_for_speed(monkeypatch):
    """Annotations unchecked in long runs; the short ones below check them."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def test_the_teacher_has_the_spectrum_asked_for():
    setting = Recovery(condition=1e3, **SMALL)
    G, task = samples.draw_teacher(setting, 0)
    values = torch.linalg.eigvalsh(task.Sigma)
    torch.testing.assert_close(values, setting.eigenvalues)
    assert float(values.mean()) == pytest.approx(1.0)
    ratios = (values[1:] / values[:-1]).numpy()
    np.testing.assert_allclose(ratios, 1e3 ** (1 / 7), rtol=1e-8)
    torch.testing.assert_close(task.root @ task.root, task.Sigma)
    torch.testing.assert_close(torch.linalg.svdvals(task.map)[:2], torch.ones(2).double())
    torch.testing.assert_close(samples.draw_teacher(Recovery(**SMALL), 0)[0], G)  # the same at every κ


def test_batches_are_fresh_and_those_of_the_law():
    setting = Recovery(condition=100.0, **SMALL | {"batch": 4000})
    _, task = samples.draw_teacher(setting, 0)
    (x, y), (other, _) = (samples.batch(setting, task, 0, step) for step in (1, 2))
    assert not torch.equal(x, other)
    torch.testing.assert_close(x, samples.batch(setting, task, 0, 1)[0])
    torch.testing.assert_close(x.mT @ x / 4000, task.Sigma, atol=0.15, rtol=0)
    assert float((y - x @ task.map.mT).std()) == pytest.approx(0.1, rel=0.05)


def test_sgd_is_the_formula():
    """Two steps of the plain loop by hand."""
    setting = Recovery(condition=10.0, **SMALL | {"steps": 2})
    G_star, task = samples.draw_teacher(setting, 3)
    G, F = (p.detach().numpy().copy() for p in samples.student(setting, 3).parameters())
    for step in (1, 2):
        x, y = (a.numpy() for a in samples.batch(setting, task, 3, step))
        residual = x @ G.T @ F.T - y
        G, F = G - 0.2 * (residual @ F).T @ x / 32, F - 0.2 * residual.T @ (x @ G.T) / 32
    Q, basis = np.linalg.qr(G.T)[0], G_star.numpy()
    sine = np.linalg.norm(Q - basis.T @ (basis @ Q), 2)
    assert samples.descend(setting, member("sgd"), 0.2, 3).dist[-1] == pytest.approx(sine, rel=1e-10)


def test_needed_is_the_first_of_a_row():
    setting = Recovery(stay=2, batch=10)
    assert samples.samples_needed([0.1, 0.1], setting) == 0
    assert samples.samples_needed([1.0, 0.3, 0.31, 0.3], setting) == math.inf
    assert samples.samples_needed([1.0, 0.3, 0.31, 0.3, 0.2], setting) == 30
    assert samples.samples_needed([], setting) == math.inf


@pytest.mark.usefixtures("untyped_for_speed")
def test_search_finds_what_all_rates_would():
    setting = Recovery(**SMALL)
    for name in ("sgd", "kfac"):
        rates = samples.rates(name, 4)
        runs = [samples.descend(setting, member(name), rate, 0).needed for rate in rates]
        found = samples.search(setting, member(name), 0, rates)
        assert found.best.needed == min(runs) < math.inf
        assert runs[found.place] == found.best.needed
        assert found.rate == rates[found.place]


@pytest.mark.usefixtures("untyped_for_speed")
def test_what_does_not_arrive_is_said():
    slow = samples.descend(Recovery(**SMALL), member("sgd"), 1e-6, 0)
    assert (slow.needed, len(slow.dist)) == (math.inf, 61)
    wild = samples.descend(Recovery(**SMALL), member("sgd"), 50.0, 0)
    assert wild.needed == math.inf
    assert len(wild.dist) < 20
    given_up = samples.descend(Recovery(**SMALL), member("sgd"), 1e-6, 0, limit=320)
    assert len(given_up.dist) == 11
    found = samples.search(Recovery(**SMALL), member("sgd"), 0, [1e-6, 0.02])
    assert (found.best.needed, found.place) == (math.inf, 1)  # the one that ends nearer


@pytest.mark.usefixtures("untyped_for_speed")
def test_a_run_that_diverged_is_not_the_nearest():
    """At rate 10 the first step ends nearer than 60 small ones do, and the second loss is 100 times the first."""
    setting, rates = Recovery(condition=1e4, steps=60), [0.003, 0.01, 3.0, 10.0]
    wild = samples.descend(setting, member("sgd"), 10.0, 1)
    assert wild.diverged
    found = samples.search(setting, member("sgd"), 1, rates)
    assert not found.best.diverged
    assert wild.dist[-1] < found.best.dist[-1]
    assert (found.rate, len(found.best.dist)) == (0.01, 61)
    assert samples.search(setting, member("sgd"), 1, [10.0]).best.diverged  # if there is no other


@pytest.mark.usefixtures("untyped_for_speed")
def test_a_run_within_the_distance_is_not_given_up():
    """Its first step inside came before the limit, so it may be the best, though it must still stay there."""
    setting, rate = Recovery(**SMALL), samples.rates("kfac", 3)[1]
    free = samples.descend(setting, member("kfac"), rate, 0)
    assert 0 < free.needed < math.inf
    for later in (0, setting.stay - 1):
        limit = free.needed + later * setting.batch
        assert samples.descend(setting, member("kfac"), rate, 0, limit).needed == free.needed
    assert samples.descend(setting, member("kfac"), rate, 0, free.needed - setting.batch).needed == math.inf


@pytest.mark.parametrize("name", MEMBERS)
def test_every_member_runs_and_is_reproducible(name):
    setting = Recovery(condition=10.0, **SMALL | {"steps": 6})
    rate = samples.rates(name, 5)[1]
    first, second = (samples.descend(setting, member(name), rate, 1).dist for _ in range(2))
    assert first == second
    assert len(first) == 7
    assert all(0 <= value <= 1 for value in first)
    assert first[-1] != first[0]


def test_rates_are_as_many_for_each():
    for name in MEMBERS:
        rates = samples.rates(name, 5)
        assert len(rates) == 5
        assert rates[-1] / rates[0] == pytest.approx(100, rel=1e-3)
        assert samples.rates(name, 1) == [rates[2]]


@pytest.mark.usefixtures("untyped_for_speed")
def test_least_squares_is_the_floor():
    """Without noise it is exact once n reaches dx; with noise it needs more where λ_min is small."""
    exact = Recovery(**SMALL | {"dx": 12}, noise=0.0)
    assert least_squares_needed(exact, 0) <= 12
    needed = [least_squares_needed(Recovery(condition=kappa, **SMALL), 0) for kappa in (1, 1e4)]
    assert needed[0] < needed[1]
    assert needed[0] < samples.search(Recovery(**SMALL), member("kfac"), 0, samples.rates("kfac", 3)).best.needed
    assert least_squares_needed(Recovery(**SMALL | {"steps": 1}, condition=1e8), 0) == math.inf


def by_decompositions(setting, seed, every=4):
    """Reduced-rank least squares by a full least squares after every few samples."""
    target, task = samples.draw_teacher(setting, seed)
    xs, ys = (torch.cat(a) for a in zip(*(samples.batch(setting, task, seed, s) for s in range(1, 6)), strict=True))
    first = -(-setting.dx // every)
    dist = [1.0] * first
    for n in range(first * every, len(xs) + 1, every):
        A = torch.linalg.lstsq(xs[:n], ys[:n]).solution.mT
        U = torch.linalg.svd(xs[:n] @ A.mT, full_matrices=False)[2][: setting.k]
        dist.append(float(subspace_distance(U @ A, target)))
    return samples.samples_needed(dist, Recovery(stay=setting.stay, batch=every, distance=setting.distance))


@pytest.mark.usefixtures("untyped_for_speed")
@pytest.mark.parametrize("kappa", [1, 10, 100])
def test_accumulated_least_squares_is_least_squares(kappa):
    """The same count as long as both grids are."""
    for seed in range(4):
        setting = Recovery(condition=kappa, **SMALL | {"batch": 30})
        expected = by_decompositions(setting, seed)
        assert 8 <= expected <= 120
        assert least_squares_needed(setting, seed) == expected


def test_growth_is_the_exponent():
    assert samples.growth([1, 10, 100], [3.0, 3 * 10**0.4, 3 * 10**0.8]) == pytest.approx(0.4)
    assert math.isnan(samples.growth([1, 10], [3.0, math.inf]))


def test_bad_input():
    for wrong in ({"k": 9}, {"dx": 2}, {"condition": 0.5}, {"distance": 1.0}, {"stay": 0}, {"condition": math.inf}):
        with pytest.raises(InputError):
            Recovery(**SMALL | wrong)
    with pytest.raises(InputError, match="no rates"):
        samples.search(Recovery(), member("sgd"), 0, [])
