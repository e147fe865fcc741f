"""Laws of inputs, noise and heads; measures."""

import numpy as np
import pytest
import torch

from layerwise import feature_learning as fl
from layerwise.foundations.random import stream
from layerwise.studies.feature_learning import runs
from layerwise.studies.feature_learning.batch import draw_batch, draw_numbers, signs, stack
from layerwise.studies.feature_learning.batches import batches_of
from layerwise.studies.feature_learning.covariance import covariance, haar, power
from layerwise.studies.feature_learning.measures import excess, transfer_excess
from layerwise.studies.feature_learning.normalise import NORMS, normalised, normaliser
from layerwise.studies.feature_learning.problem import draw_problem
from layerwise.studies.feature_learning.runs import _stacked
from layerwise.studies.feature_learning.two_layer import least_squares_head

SMALL = {"dx": 10, "dy": 4, "k": 2}


def moments(setting, n=200_000, seed=0):
    task = draw_problem(setting, stream(seed, "problem")).train
    return task, draw_batch(task, n, stream(seed, "many")).samples()


@pytest.mark.parametrize("data", ["uniform", "gaussian"])
@pytest.mark.parametrize("anisotropy", ["high", "low"])
def test_inputs_have_the_covariance_and_labels_the_noise(data, anisotropy):
    setting = fl.Setting(**SMALL, data=data, anisotropy=anisotropy, repair="abs", noise=0.3)
    task, (x, y, normal) = moments(setting)
    white = x @ power(task.Sigma, -0.5)
    assert (white.mT @ white / len(x) - torch.eye(10)).abs().max() < 0.02  # six standard errors
    noise = y - x @ task.map.mT
    assert (noise.mT @ noise / len(x) - 0.09 * torch.eye(4)).abs().max() < 0.09 * 0.02
    assert (noise.mT @ white / len(x)).abs().max() < 0.3 * 0.015
    assert (normal.mT @ normal / len(x) - torch.eye(4)).abs().max() < 0.02
    assert (normal.mT @ noise / len(x)).abs().max() < 0.3 * 0.015
    fourth = (white**4).mean()
    assert abs(float(fourth) - (1.0 if data == "uniform" else 3.0)) < 0.05
    if data == "uniform":
        assert torch.allclose(white.abs(), torch.ones(()).double(), atol=1e-9)


def test_statistics_are_those_of_the_samples():
    task = draw_problem(fl.Setting(**SMALL), stream(0, "problem")).train
    batch = draw_batch(task, 77, stream(0, "batch"))
    x, y, _ = batch.samples()
    torch.testing.assert_close(batch.Sx, x.mT @ x / 77, rtol=1e-10, atol=1e-7)
    torch.testing.assert_close(batch.Syx, y.mT @ x / 77, rtol=1e-10, atol=1e-7)
    torch.testing.assert_close(batch.Syy, y.square().sum() / 77, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(batch.ols, torch.linalg.lstsq(x, y).solution.mT, rtol=1e-8, atol=1e-8)
    both = stack([batch, batch])
    torch.testing.assert_close(both.samples().x[1, 0], x)
    assert both.Sx.shape == (2, 1, 10, 10)


def test_batches_are_a_function_of_the_generator():
    task = draw_problem(fl.Setting(**SMALL), stream(0, "problem")).train
    a, b, c = (draw_batch(task, 50, stream(0, "batch", t)) for t in (1, 1, 2))
    assert torch.equal(a.Sx, b.Sx)
    assert torch.equal(a.samples().normal, b.samples().normal)
    assert not torch.equal(a.Sx, c.Sx)
    generator = stream(0, "on")
    assert not torch.equal(draw_batch(task, 50, generator).Sx, draw_batch(task, 50, generator).Sx)


def test_scales_share_their_draws():
    first = {}
    for scale in ("none", "trace", "max"):
        task = draw_problem(fl.Setting(**SMALL, scale=scale), stream(0, "problem")).train
        first[scale] = draw_batch(task, 40, stream(0, "x")).samples().x / task.Sigma.trace().sqrt()
    torch.testing.assert_close(first["none"], first["trace"], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(first["none"], first["max"], rtol=1e-9, atol=1e-9)


def test_signs_of_any_size():
    u = signs(501, 7, np.random.default_rng(0))
    assert u.shape == (501, 7)
    assert (u.abs() == 1).all()
    assert u.mean(0).abs().max() < 5 / 501**0.5


def test_high_anisotropy_as_printed():
    Sigma = covariance(100, stream(0, "s"))
    values = torch.linalg.eigvalsh(Sigma)
    torch.testing.assert_close(values, 10 ** torch.linspace(0, 5, 100, dtype=torch.float64), rtol=1e-8, atol=0.0)
    assert torch.linalg.eigvalsh(covariance(100, stream(0, "s"), scale="max"))[-1] == pytest.approx(1.0)
    assert float(covariance(100, stream(0, "s"), scale="trace").trace()) == pytest.approx(100.0)


def test_low_anisotropy_is_repaired_and_says_so():
    with pytest.warns(UserWarning, match="not positive definite"):
        Sigma = covariance(100, stream(0, "s"), anisotropy="low")
    values = torch.linalg.eigvalsh(Sigma)
    assert values[0] > 0
    N = torch.randn(100, 100, generator=stream(0, "s"), dtype=torch.float64)
    printed = torch.linalg.eigvalsh(5 * torch.eye(100) + (N + N.mT) / 2)
    assert 20 <= int((printed < 0).sum()) <= 36  # about 28 of 100: the paper's matrix is no covariance
    torch.testing.assert_close(values, printed.abs().sort().values, rtol=1e-9, atol=1e-9)
    scaled = torch.linalg.eigvalsh(covariance(100, stream(0, "s"), anisotropy="low", repair="scaled"))
    assert 3.3 < scaled[0] < scaled[-1] < 6.7


def test_noise_as_variance():
    assert fl.Setting(noise_is="var").deviation(0.09) == pytest.approx(0.3)
    task, (x, y, _) = moments(fl.Setting(**SMALL, noise=0.09, noise_is="var"), n=50_000)
    assert float((y - x @ task.map.mT).square().mean()) == pytest.approx(0.09, rel=0.03)


def test_tasks_share_the_representation_and_nearly_the_head():
    p = draw_problem(fl.Setting(), stream(0, "problem"))
    heads = [task.map @ p.G.mT for task in (p.train, p.test)]
    for task, head in zip((p.train, p.test), heads, strict=True):
        torch.testing.assert_close(head @ p.G, task.map, rtol=1e-9, atol=1e-9)
    assert 0.01 < float((heads[0] - heads[1]).norm() / heads[0].norm()) < 0.1
    assert (p.train.Sigma - p.test.Sigma).norm() > 0.5 * p.train.Sigma.norm()
    torch.testing.assert_close(p.train.root @ p.train.root, p.train.Sigma, rtol=1e-9, atol=1e-5)


# --- measures -----------------------------------------------------------------------------------------------


def test_distance_is_the_sine_of_the_largest_angle():
    G = haar(3, 10, stream(0, "G"))
    for angle in (1e-13, 1e-9, 1e-4, 0.5, 1.5):
        other = haar(10, 10, stream(1, "O"))
        basis = torch.linalg.qr(torch.cat([G, other]).mT)[0].mT
        tilted = basis[:3].clone()
        tilted[2] = np.cos(angle) * basis[2] + np.sin(angle) * basis[5]
        mixed = torch.randn(3, 3, generator=stream(2, "mix"), dtype=torch.float64) @ tilted
        assert float(fl.subspace_distance(mixed, G)) == pytest.approx(np.sin(angle), rel=1e-5, abs=2e-15)
        assert float(fl.subspace_distance(G, mixed)) == pytest.approx(np.sin(angle), rel=1e-5, abs=2e-15)


def test_distance_of_what_is_not_finite_is_one():
    G = haar(3, 10, stream(0, "G")).repeat(2, 1, 1)
    G[1, 0, 0] = torch.inf
    assert fl.subspace_distance(G, G[0]).tolist() == pytest.approx([0.0, 1.0], abs=1e-14)


def test_excess_and_transfer_against_samples():
    setting = fl.Setting(**SMALL, scale="trace")
    p = draw_problem(setting, stream(0, "problem"))
    A = torch.randn(4, 10, generator=stream(0, "A"), dtype=torch.float64)
    x = draw_batch(p.test, 400_000, stream(0, "big")).samples().x
    by_samples = (x @ (A - p.test.map).mT).square().sum(-1).mean()
    assert float(excess(A, p.test)) == pytest.approx(float(by_samples), rel=0.02)
    G, batch = haar(2, 10, stream(1, "G")), draw_batch(p.test, 60, stream(0, "test"))
    x, y, _ = batch.samples()
    fitted = torch.linalg.lstsq(x @ G.mT, y).solution.mT
    torch.testing.assert_close(least_squares_head(G, batch), fitted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(transfer_excess(G, batch, p.test), excess(fitted @ G, p.test))


def test_transfer_at_the_true_representation_is_the_noise_of_the_head():
    """σ² dy k / n in the mean, over 300 batches."""
    p = draw_problem(fl.Setting(**SMALL), stream(0, "problem"))
    found = [transfer_excess(p.G, draw_batch(p.test, 100, stream(i, "t")), p.test) for i in range(300)]
    assert float(torch.stack(found).mean()) == pytest.approx(1.0 * 4 * 2 / 100, rel=0.12)


@pytest.mark.parametrize("norm", NORMS)
def test_normalised_inputs(norm):
    task = draw_problem(fl.Setting(**SMALL), stream(0, "problem")).train
    batch = draw_batch(task, 5000, stream(0, "batch"))
    seen = normalised(batch, *normaliser(norm, batch, task.Sigma))
    x, y, _ = seen.samples()
    torch.testing.assert_close(seen.Sx, x.mT @ x / 5000, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(seen.Syx, y.mT @ x / 5000, rtol=1e-8, atol=1e-6)
    tolerance = 1e-6 if norm.endswith("batch") else 0.15
    deviation = seen.Sx - torch.eye(10)
    off = deviation if norm.startswith("whiten") else deviation.diagonal()
    assert off.abs().max() < tolerance
    if norm.endswith("batch"):
        assert x.mean(0).abs().max() < 1e-10
        if norm == "coord_batch":
            expected = torch.nn.functional.batch_norm(batch.samples().x, None, None, training=True)
            torch.testing.assert_close(x, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("data", ["uniform", "gaussian"])
def test_batches_of_many_seeds_are_their_batches_stacked(data):
    """As they are made on a GPU: one product for all seeds."""
    setting = fl.Setting(**SMALL, data=data)
    tasks = [draw_problem(setting, stream(seed, "problem")).train for seed in range(3)]
    whole = stack([draw_batch(task, 77, stream(seed, "batch")) for seed, task in enumerate(tasks)])
    many = _stacked(tasks, torch.float64)
    numbers = [draw_numbers(task, 77, stream(seed, "batch")) for seed, task in enumerate(tasks)]
    found = batches_of(numbers, many, 77)
    for name in ("Sx", "Syx", "Syy"):
        torch.testing.assert_close(getattr(found, name), getattr(whole, name), rtol=1e-12, atol=1e-12)
    for a, b in zip(found.samples(), whole.samples(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_seeds_drawn_together_run_as_those_drawn_apart(monkeypatch):
    def run():
        return fl.compare(["sgd", "kfac", "ngd"], setting=fl.Setting(**SMALL, batch=100), steps=4, seeds=3, together=3)

    apart = run()
    monkeypatch.setattr(runs, "together_on", lambda device, seeds: seeds > 1)
    for name, result in run().items():
        torch.testing.assert_close(result.G, apart[name].G, rtol=1e-9, atol=1e-9)
        assert torch.equal(result.diverged_at, apart[name].diverged_at)
