"""Measures along a plain training, random features of two readings, and the quadratic model's crossings."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from error_sentences import WORDED
from layerwise import theory
from layerwise.foundations.errors import InputError, NameLookupError, NumericalError
from layerwise.studies.tangent_alignment import complexity
from layerwise.studies.tangent_alignment.norms import WhichNorm, rank_correlation
from layerwise.studies.training_regimes import quadratic

SMALL = WhichNorm(points=60, samples=5, examples=12)


def test_snapshots_are_the_thesis_grid():
    grid = sorted(complexity.snapshots(400))
    assert grid[:6] == [5, 10, 15, 20, 25, 30]
    assert all(step % 5 == 0 and step <= 400 for step in grid)
    assert grid[-1] >= 400 / 1.15 - 5
    assert max(complexity.snapshots(1), default=0) <= 5


def test_a_training_ends_at_its_cross_entropy():
    pytest.importorskip("sklearn")
    task = complexity.Task(hidden=(20,), trained_on=60, batch=20, lr=0.1)
    found = complexity.measured(task, 3, stop=0.2)
    assert found["loss"] <= 0.2
    assert found["steps"] % 3 == 0
    assert 0 < found["displacement"] <= found["path"]
    assert found["frobenius/margin"] == pytest.approx(found["frobenius"] / found["margin"])
    assert found["parameters"] == 64 * 20 + 20 + 20 * 10 + 10
    stopped = complexity.measured(task, 3, stop=1e-9, most=6)
    assert stopped["steps"] == 6
    assert stopped["loss"] > 0.2


def test_orders_do_not_come_from_torchs_own_state():
    pytest.importorskip("sklearn")
    task = complexity.Task(hidden=(8,), trained_on=40, batch=20)
    before = torch.get_rng_state()
    one = complexity.measured(task, 1, most=4)
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(3)
    assert complexity.measured(task, 1, most=4)["path"] == one["path"]


@pytest.mark.parametrize("rescaled", ["singular-values", "eigenvalues"])
def test_bounds_by_hand(rescaled):
    """One sample, with features rescaled by their SVD."""
    study = WhichNorm(points=40, samples=1, examples=6, scales=(0.3, 0.6), rescaled=rescaled)
    Phi = study.features(2)
    U, s, Vt = torch.linalg.svd(Phi)
    _, functions = torch.linalg.eigh(Phi @ Phi.T)
    y = study.labels(functions)
    (chosen,) = (torch.randperm(40, generator=complexity.stream(2, "samples"))[:6],)
    for point in study.measured(2):
        new = (1 + point.c * (s - 1)) if rescaled == "singular-values" else (1 + point.c * (s**2 - 1)).sqrt()
        features = (U * new) @ Vt
        w = torch.linalg.lstsq(features[chosen], y[chosen][:, None]).solution.squeeze(1)
        bound = float(w.norm() * features[chosen].norm()) / 6
        assert point.bound == pytest.approx(bound, rel=1e-6)
        others = [i for i in range(40) if i not in chosen.tolist()]
        wrong = sum(float(features[i] @ w) * float(y[i]) < 0 for i in others) / len(others)
        assert point.error == pytest.approx(wrong)
        assert point.optimal_bound <= point.bound + 1e-12


def test_features_are_those_of_a_gaussian_kernel():
    K = np.mean([(lambda F: F @ F.T)(WhichNorm(points=80, half_width=2.0).features(s).numpy()) for s in range(40)], 0)
    x = np.linspace(-2, 2, 80)
    assert np.abs(K - np.exp(-np.square(x[:, None] - x))).max() < 0.1


def test_labels_have_both_signs():
    functions = torch.linalg.qr(torch.randn(50, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    functions[:, -1] = 1.0
    y = SMALL.labels(functions)
    assert 0.1 <= float((y < 0).double().mean()) <= 0.9
    with pytest.raises(InputError, match="either sign"):
        SMALL.labels(torch.ones(5, 5, dtype=torch.float64))


def test_rank_correlation():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 6, 20), rng.standard_normal(20)
    assert rank_correlation(a.tolist(), b.tolist()) == pytest.approx(spearmanr(a, b).statistic)
    assert math.isnan(rank_correlation([1, 1, 1], [1, 2, 3]))


@pytest.mark.parametrize(
    "wrong", [{"scales": (0.0, 0.5)}, {"scales": (0.5,)}, {"examples": 60}, {"least": 0.5}], ids=str
)
def test_bad_settings(wrong):
    with pytest.raises(InputError, match=WORDED):
        WhichNorm(**{"points": 60} | wrong)


def test_an_unknown_reading():
    with pytest.raises(NameLookupError, match="eigenvalues"):
        WhichNorm(rescaled="eigenvalue")


def test_numbers_of_the_examples():
    """Half-times and errors at equal progress that a first calculation of these settings had."""
    model = theory.order_reversal(np.array([9.0, 8.0, 7.0, 6.0, 5.0]))
    np.testing.assert_allclose(quadratic.half_times(model, "non-linear"), (0.70, 0.61, 0.54, 0.49, 0.46), atol=0.01)
    np.testing.assert_allclose(quadratic.half_times(model, "linearized"), (77, 87, 99, 116, 139), atol=1)
    for noise, basis, nonlinear, linear in ((5.0, "aligned", 0.11, 0.54), (1.0, "aligned", 2.09, 1.67)):
        groups = theory.label_noise(noise=noise, basis=basis, d=25)
        for regime, expected in (("non-linear", nonlinear), ("linearized", linear)):
            found = quadratic.at_progress(*groups, regime, 0.3)
            assert found.difficult == pytest.approx(expected, abs=0.02)
            assert found.easy == pytest.approx(0.3, abs=1e-6)
    for (noise, core), expected in {
        (10.0, 1.0): (0.88, 0.36),
        (1.0, 0.5): (1.64, 1.07),
        (1.0, 0.2): (2.01, 1.51),
    }.items():
        groups = theory.spurious_feature(noise=noise, core=core, d=25)
        found = [quadratic.at_progress(*groups, regime, 0.3).difficult for regime in quadratic.REGIMES]
        np.testing.assert_allclose(found, expected, atol=0.01)


def test_a_threshold_that_is_never_reached():
    model, clean = theory.label_noise(basis="lapack", d=25)
    with pytest.raises(NumericalError, match="nothing reached"):
        quadratic.at_progress(model, clean, "non-linear", -1.0)


def test_dense_networks_are_gradient_descent():
    """One of them against autograd."""
    model = theory.order_reversal(np.array([3.0, 2.0]))
    curve = quadratic.dense_networks(model, 0, alpha=2.0, steps=5, networks=1, lr=0.05)
    generator = complexity.stream(0, "dense networks")
    W1, W2 = (
        (0.5 / 2**0.5 * (2 * torch.rand(*shape, generator=generator, dtype=torch.float64) - 1)).requires_grad_()
        for shape in ((2, 2), (1, 2))
    )
    X, y = torch.from_numpy(model.X), torch.from_numpy(model.y)
    f0 = (X @ W1.T @ W2.T).detach()
    for row in curve:
        f = 2.0 * (X @ W1.T @ W2.T - f0)
        torch.testing.assert_close(row, f.detach().squeeze(1))
        g1, g2 = torch.autograd.grad((f.squeeze(1) - y).square().mean(), (W1, W2))
        with torch.no_grad():
            W1 -= 0.05 / 4 * g1
            W2 -= 0.05 / 4 * g2
