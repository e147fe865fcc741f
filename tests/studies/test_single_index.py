"""One step on a single-index problem: gradients, directions, the rank-one part and the refitted head, written out."""

import pytest
import torch

from error_sentences import WORDED
from layerwise import feature_learning as fl
from layerwise.foundations.errors import InputError
from layerwise.studies.feature_learning import single_index
from layerwise.studies.feature_learning.one_step import slope_mean
from layerwise.studies.feature_learning.single_index import draw_sample, draw_trial, hermite_link, one_step, randomness

SMALL = {"dx": 12, "n": 90, "dh": 15}


def preconditioned(change, x, damping):
    """The change of KFAC, by a solve with Sx + λI; of SGD for None."""
    if damping is None:
        return change
    Sx = x.mT @ x / len(x)
    return torch.linalg.solve(Sx + damping * torch.eye(len(Sx)), change.mT).mT


def student(name, h):
    return {"tanh": torch.tanh, "relu": torch.relu, "identity": lambda h: h}[name](h)


@pytest.mark.parametrize("activation", ["tanh", "relu", "identity"])
def test_the_step_is_the_gradient_of_the_loss(activation, monkeypatch):
    setting = fl.SingleIndex(**SMALL, activation=activation)
    trial = draw_trial(setting, 0)
    G = trial.G0.clone().requires_grad_()
    output = student(activation, trial.sample.x @ G.mT) @ (trial.f0 / setting.dh**0.5)
    loss = 0.5 * (trial.sample.y - output).square().mean()
    (gradient,) = torch.autograd.grad(loss, G)
    torch.testing.assert_close(one_step(trial), -(setting.dh**0.5) * gradient, rtol=1e-10, atol=1e-13)
    monkeypatch.setattr(single_index, "CHUNK", 7)  # ninety samples in thirteen pieces
    torch.testing.assert_close(one_step(trial), -(setting.dh**0.5) * gradient, rtol=1e-10, atol=1e-13)


def test_correlations_are_those_of_singular_vectors_and_estimators():
    setting, dampings = fl.SingleIndex(**SMALL), [1e-6, 0.1, 10.0]
    trial = draw_trial(setting, 3)
    x, y, index = trial.sample.x, trial.sample.y, trial.index / trial.index.norm()
    found = fl.correlations(setting, 3, dampings)
    for at, damping in enumerate([None, *dampings]):
        top = torch.linalg.svd(preconditioned(one_step(trial), x, damping)).Vh[0]
        b = preconditioned((x.mT @ y / len(y))[None], x, damping)[0]
        assert float(found.learned[at]) == pytest.approx(abs(float(top @ index)), abs=1e-6)
        assert float(found.estimator[at]) == pytest.approx(abs(float(b @ index / b.norm())), abs=1e-9)


def test_with_large_damping_kfac_is_sgd():
    found = fl.correlations(fl.SingleIndex(**SMALL), 0, [1e9])
    torch.testing.assert_close(found.learned[1], found.learned[0], rtol=0, atol=1e-6)
    assert abs(float(torch.diff(fl.predicted_correlations(fl.SingleIndex(), [1e9])))) < 1e-6


def test_more_samples_than_inputs_are_not_needed():
    found = fl.correlations(fl.SingleIndex(dx=40, n=20, dh=30), 0, [1e-6, 1.0])
    assert bool(found.learned.isfinite().all())
    assert bool((found.learned <= 1 + 1e-12).all())


LEVELS = {
    "two": {"anisotropy": 0.6},
    "three": {"spectrum": tuple([2.2] * 30 + [0.7] * 30 + [0.1] * 30)},
}


@pytest.mark.parametrize("levels", LEVELS)
def test_means_over_trials_are_the_predicted_ones(levels, untyped):
    setting, dampings = fl.SingleIndex(dx=90, n=900, dh=200, **LEVELS[levels]), [1e-3, 0.3, 3.0]
    trials = torch.stack([fl.correlations(setting, seed, dampings).learned for seed in range(40)])
    error = trials.std(0) / len(trials) ** 0.5
    difference = (trials.mean(0) - fl.predicted_correlations(setting, dampings)).abs()
    assert bool((error < 0.01).all())
    # Four standard errors, and a correction of the order 1/dx that the limit leaves out.
    assert bool((difference < 4 * error + 0.005).all()), (difference, error)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_the_rank_one_part_is_what_theorem_3_9_says(activation):
    setting, dampings = fl.SingleIndex(**SMALL, activation=activation), [0.3]
    trial = draw_trial(setting, 1)
    x, y = trial.sample.x, trial.sample.y
    found = fl.rank_one(setting, 1, dampings)
    z = torch.linspace(-12, 12, 400_000, dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(student(activation, z).sum(), z)
    density = torch.exp(-(z.detach() ** 2) / 2)
    a = float((slope * density).sum() / density.sum())
    assert slope_mean(setting) == pytest.approx(a, abs=1e-5)
    for at, damping in enumerate([None, *dampings]):
        b = preconditioned((x.mT @ y / len(y))[None], x, damping)[0]
        part = a * torch.outer(trial.f0, b)
        left = preconditioned(one_step(trial), x, damping) - part
        assert float(found.error[at]) == pytest.approx(float(torch.linalg.matrix_norm(left, 2)), rel=1e-4)
        assert float(found.size[at]) == pytest.approx(float(torch.linalg.matrix_norm(part, 2)), rel=1e-4)


def test_what_is_left_beyond_rank_one_falls_with_the_size(untyped):
    def mean_error(k):
        setting = fl.SingleIndex(dx=18 * k, n=100 * k, dh=20 * k)
        return torch.stack([fl.rank_one(setting, seed, [0.3]).error for seed in range(6)]).mean(0)

    assert bool((mean_error(16) < 0.5 * mean_error(2)).all())  # n^−½ would be 0.35


def test_the_refitted_head_is_least_squares():
    setting = fl.SingleIndex(dx=6, n=300, dh=20, activation="relu", noise=0.5)
    found = fl.refit(setting, 2, exponents=[0.0, 0.4], damping=0.2, ridge=1e-12, test=500)
    trial, random = draw_trial(setting, 2), randomness(setting, 2, "refit")
    second, new = (draw_sample(setting, trial.index, n, random) for n in (300, 500))
    target = hermite_link(new.x @ trial.index)

    def error(G):
        head = torch.linalg.lstsq(torch.relu(second.x @ G.mT), second.y[:, None]).solution[:, 0]
        return float((torch.relu(new.x @ G.mT) @ head - target).square().mean() / target.square().mean())

    change = one_step(trial)
    assert found.none == pytest.approx(error(trial.G0), rel=1e-6)
    for at, rate in enumerate([1.0, 300**0.4]):
        kfac = preconditioned(change, trial.sample.x, 0.2)
        assert float(found.sgd[at]) == pytest.approx(error(trial.G0 + rate * change), rel=1e-6)
        assert float(found.kfac[at]) == pytest.approx(error(trial.G0 + rate * kfac), rel=1e-6)


def test_the_law_of_the_data():
    setting = fl.SingleIndex(dx=4, n=200_000, dh=2000, anisotropy=0.6, noise=0.7)
    trial = draw_trial(setting, 0)
    x = trial.sample.x
    assert (x.mT @ x / len(x) - torch.diag(setting.eigenvalues)).abs().max() < 0.03
    residual = trial.sample.y - hermite_link(x @ trial.index)
    assert float(residual.std()) == pytest.approx(0.7, abs=0.01)
    assert float(trial.f0.norm()) == pytest.approx(1.0, abs=0.1)
    assert float(trial.G0.std()) == pytest.approx(0.5, abs=0.02)
    wide = draw_trial(fl.SingleIndex(dx=20_000, n=1, dh=1), 0).index
    assert float(wide.norm()) == pytest.approx(1.0, abs=0.03)


def test_a_trial_is_a_function_of_setting_and_seed():
    setting = fl.SingleIndex(**SMALL)
    a, b = draw_trial(setting, 5), draw_trial(setting, 5)
    assert torch.equal(a.sample.x, b.sample.x)
    assert torch.equal(a.G0, b.G0)
    for other in (draw_trial(setting, 6), draw_trial(fl.SingleIndex(**SMALL, anisotropy=0.2), 5)):
        assert abs(float(torch.corrcoef(torch.stack([a.G0.flatten(), other.G0.flatten()]))[0, 1])) < 0.3


@pytest.mark.parametrize(
    "wrong",
    [
        {"dx": 13},
        {"n": 0},
        {"anisotropy": 1.0},
        {"noise": -1.0},
        {"activation": "tan"},
        {"spectrum": (1.0, 2.0)},
        {"spectrum": tuple([2.0] * 12)},
        {"spectrum": tuple([-1.0] + [13 / 11] * 11)},
    ],
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(InputError, match=WORDED):
        fl.SingleIndex(**SMALL | wrong)


def test_wrong_dampings_and_ridges_are_refused():
    setting = fl.SingleIndex(**SMALL)
    for call in (fl.correlations, fl.rank_one):
        with pytest.raises(InputError, match="dampings"):
            call(setting, 0, [0.1, 0.0])
    with pytest.raises(InputError, match="ridge"):
        fl.refit(setting, 0, exponents=[0.0], ridge=0)


def test_the_size_of_the_rank_one_part_is_the_predicted_one(untyped):
    """Means over trials; ‖f₀‖ and ‖β⋆‖ of a trial are near one."""
    setting = fl.SingleIndex(dx=100, n=300, dh=100, anisotropy=0.7, noise=2.0)
    sizes = torch.stack([fl.rank_one(setting, seed, [0.1, 1.0]).size for seed in range(20)]).mean(0)
    torch.testing.assert_close(sizes, fl.predicted_sizes(setting, [0.1, 1.0]), rtol=0.07, atol=0)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_the_expansion_of_features_written_out(activation):
    """One η, two terms, with norms by SVD and the coefficients of the activations as numbers."""
    setting = fl.SingleIndex(dx=10, n=60, dh=12, anisotropy=0.5, activation=activation)
    found = fl.expand_features(setting, 3, exponents=[0.3], terms=2, damping=0.2)
    trial = draw_trial(setting, 3)
    x = draw_sample(setting, trial.index, 60, randomness(setting, 3, "expansion")).x
    X, y = trial.sample.x, trial.sample.y
    inverse = torch.linalg.inv(X.mT @ X / 60 + 0.2 * torch.eye(10, dtype=torch.float64))
    mu = {"tanh": (0.605706, 0.0), "relu": (0.5, (2 * torch.pi) ** -0.5)}[activation]
    sigma, eta = getattr(torch, activation), 60**0.3
    for right, rows in ((torch.eye(10, dtype=torch.float64), found.sgd), (inverse, found.kfac)):
        u = mu[0] * eta * (x @ right @ X.mT @ y / 60)
        left = [sigma(x @ (trial.G0 + eta * one_step(trial) @ right).mT) - sigma(x @ trial.G0.mT)]
        left.append(left[0] - mu[0] * torch.outer(u, trial.f0))
        left.append(left[1] - mu[1] / 2 * torch.outer(u**2, trial.f0**2))
        size = torch.linalg.matrix_norm(sigma(x @ trial.G0.mT), 2)
        expected = torch.stack([torch.linalg.matrix_norm(one, 2) for one in left]) / size
        torch.testing.assert_close(rows[0], expected, rtol=1e-4, atol=1e-6)


def test_an_expansion_without_terms_is_refused():
    with pytest.raises(InputError, match="terms=0"):
        fl.expand_features(fl.SingleIndex(dx=4, n=10, dh=5), 0, exponents=[0.0], terms=0)
