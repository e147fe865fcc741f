"""Every member's first step on the single-index problem, against formulas written out; and its training."""

import math

import pytest
import torch

from error_sentences import WORDED
from layerwise import feature_learning as fl
from layerwise.foundations.errors import InputError
from layerwise.foundations.random import stream
from layerwise.studies.feature_learning import index_training
from layerwise.studies.feature_learning.index_family import (
    INDEX_MEMBERS,
    member_step,
    predicted_recovery,
    recovery,
    sign_factor,
    student,
    turned_trial,
)
from layerwise.studies.feature_learning.index_training import (
    learned_correlation,
    loss,
    split_trial,
    train_member,
)
from layerwise.studies.feature_learning.members import MEMBERS
from layerwise.studies.feature_learning.single_index import draw_trial, hermite_link, one_step

SETTING = fl.SingleIndex(dx=12, n=200, dh=20, anisotropy=0.8)
DAMPING = 0.1


@pytest.fixture(scope="module")
def trial():
    return turned_trial(SETTING, 0)


@pytest.fixture(scope="module")
def parts(trial):
    """−∇_G, Sx, and P = mean of (f ∘ σ′)(f ∘ σ′)ᵀ."""
    x, f = trial.sample.x, trial.f0 / 20**0.5
    slopes = f * (1 - torch.tanh(x @ trial.G0.mT).square())
    return one_step(trial) / 20**0.5, x.mT @ x / len(x), slopes.mT @ slopes / len(x)


def same(found, expected, rtol=1e-8):
    assert float((found - expected).norm()) <= rtol * float(expected.norm())


def ridge(S, shift=DAMPING):
    return S + shift * torch.eye(len(S), dtype=S.dtype)


def test_turning_leaves_the_problem_as_it_is(trial):
    plain = draw_trial(SETTING, 0)
    torch.testing.assert_close(trial.sample.x @ trial.index, plain.sample.x @ plain.index)
    torch.testing.assert_close(trial.sample.y, plain.sample.y)
    assert (trial.index - plain.index).norm() > 0.1


def test_sgd_is_the_one_step_of_the_theory(trial, parts):
    same(member_step("sgd", trial, DAMPING), parts[0])


@pytest.mark.parametrize("name", ["foof", "locoprop"])
def test_foof_and_locoprop_multiply_by_the_ridge_inverse(name, trial, parts):
    g, Sx, _ = parts
    same(member_step(name, trial, DAMPING), torch.linalg.solve(ridge(Sx), g.mT).mT)


@pytest.mark.parametrize("name", ["kfac", "kfac-relative"])
def test_kfac_inverts_both_factors(name, trial, parts):
    g, Sx, P = parts
    scales = (1.0, 1.0) if name == "kfac" else (float(P.diagonal().mean()), float(Sx.diagonal().mean()))
    left, right = ridge(P, DAMPING * scales[0]), ridge(Sx, DAMPING * scales[1])
    same(member_step(name, trial, DAMPING), torch.linalg.solve(left, torch.linalg.solve(right, g.mT).mT))


def test_signs_and_orthogonal_factors(trial, parts):
    g = parts[0]
    U, s, Vh = torch.linalg.svd(g, full_matrices=False)
    same(member_step("sign", trial, DAMPING), g.sign())
    same(member_step("adam", trial, DAMPING), g / (g.abs() + 1e-8))
    same(member_step("muon", trial, DAMPING), (20 / 12) ** 0.5 * U @ Vh)
    same(member_step("soap", trial, DAMPING), U @ Vh, rtol=1e-3)  # its ε
    left, right = (1e-4 * float(g.square().sum()) / size for size in g.shape)  # of mean eigenvalues of ggᵀ and gᵀg
    shrunk = s / ((s * s + left) * (s * s + right)) ** 0.25
    same(member_step("shampoo", trial, DAMPING), (U * shrunk) @ Vh)


def test_mahalanobis_whitens_before_and_after(trial, parts):
    g, Sx, P = parts

    def root(S):
        values, V = torch.linalg.eigh(ridge(S, DAMPING * float(S.diagonal().mean())))
        return (V * values**-0.5) @ V.mT

    U, s, Vh = torch.linalg.svd(root(P) @ g @ root(Sx), full_matrices=False)
    same(member_step("mahalanobis", trial, DAMPING), s.sum() * root(P) @ U @ Vh @ root(Sx), rtol=1e-6)


def test_ngd_solves_with_the_whole_matrix_of_the_first_layer(trial, parts):
    x = trial.sample.x
    slopes = trial.f0 / 20**0.5 * (1 - torch.tanh(x @ trial.G0.mT).square())
    rows = torch.einsum("nh,nd->nhd", slopes, x).flatten(1)
    M = rows.mT @ rows / len(x)
    size = DAMPING * float(M.diagonal().sum()) / min(M.shape[0], len(x))
    same(member_step("ngd", trial, DAMPING), torch.linalg.solve(ridge(M, size), parts[0].flatten()).view(20, 12), 1e-6)


def test_ekfac_has_the_second_moments_of_the_samples(trial, parts):
    g, Sx, P = parts
    (s_P, U), (s_Q, V) = torch.linalg.eigh(P), torch.linalg.eigh(Sx)
    x = trial.sample.x
    slopes = trial.f0 / 20**0.5 * (1 - torch.tanh(x @ trial.G0.mT).square())
    s = (slopes @ U).square().mT @ (x @ V).square() / len(x)
    damped = s + DAMPING * (s_P[:, None] + s_Q[None]) + DAMPING**2
    same(member_step("ekfac", trial, DAMPING), U @ ((U.mT @ g @ V) / damped) @ V.mT)


def test_the_left_factor_is_largest_along_the_head(trial, parts):
    """Why inverting P hides β⋆: of all directions it shrinks f₀ most."""
    g, _, P = parts
    values, U = torch.linalg.eigh(P)
    f = trial.f0 / trial.f0.norm()
    assert abs(float(U[:, -1] @ f)) > 0.95
    assert float(values[-1]) > 5 * float(values[-2])
    assert abs(float(torch.linalg.svd(g)[0][:, 0] @ f)) > 0.95  # and f₀ is where the gradient is largest


def test_every_member_of_the_library_is_there():
    assert set(MEMBERS) <= set(INDEX_MEMBERS)


def test_measures_by_hand():
    index = torch.tensor([2.0, 0.0]).double()
    equal = recovery(torch.linalg.qr(torch.randn(5, 2, generator=stream(0, "q"), dtype=torch.float64))[0], index)
    assert equal.share == pytest.approx(2**-0.5)
    assert equal.gap == pytest.approx(1.0)
    lopsided = recovery(torch.diag(torch.tensor([3.0, 4.0]).double()), index)
    assert (lopsided.correlation, lopsided.share, lopsided.gap) == pytest.approx((0.0, 0.6, 0.75))


def test_sign_factor_is_that_of_simulated_signs():
    """Rows sign(a b + noise), with the noise of the derivation and b Gaussian."""
    setting = fl.SingleIndex(dx=400, n=2000, dh=400, anisotropy=0.5)
    a, slope2 = 0.605706, 0.464403  # E σ′ and E σ′² of tanh at N(0, 1)
    deviation = ((1.25 + 3 * 400 / 2000) / 400) ** 0.5
    tau = ((slope2 - a * a) * 3 / 2000) ** 0.5
    b = deviation * torch.randn(4000, generator=stream(0, "b"), dtype=torch.float64)
    noise = tau * torch.randn(1000, 4000, generator=stream(0, "noise"), dtype=torch.float64)
    mean = (a * b + noise).sign().mean(0)
    assert float(mean @ b / (mean.norm() * b.norm())) == pytest.approx(sign_factor(setting), abs=0.01)
    assert math.sqrt(2 / math.pi) < sign_factor(setting) < 1


def test_predictions_are_those_of_the_lemmas():
    found = predicted_recovery(SETTING, 0.3)
    assert [found["sgd"], found["foof"]] == pytest.approx(fl.predicted_correlations(SETTING, [0.3]).tolist())


# --- training ---------------------------------------------------------------------------------------------------


def test_gradients_of_a_network_that_knows_the_direction():
    trial, held, _ = split_trial(fl.SingleIndex(dx=6, n=50, dh=4, activation="relu"), 0, 100)
    model = student(trial)
    with torch.no_grad():
        model[0].weight.copy_(torch.outer(torch.tensor([1.0, -1.0, 2.0, 0.5]).double(), trial.index))
    assert learned_correlation(model, held.x, trial.index) == pytest.approx(1.0)


def test_training_reports_its_best_network():
    trial, held, fresh = split_trial(fl.SingleIndex(dx=6, n=300, dh=12, activation="relu", anisotropy=0.5), 1, 400)
    start = float(loss(student(trial), held).detach())
    one = [train_member("kfac", trial, held, fresh, exponents=[e], steps=10) for e in (-3, -2, 3)]
    both = train_member("kfac", trial, held, fresh, exponents=[-3, -2, 3], steps=10)
    assert both == min(one, key=lambda found: found.held_out)
    assert both.held_out < start
    assert (one[2].steps, one[2].held_out) == (0, start)  # diverged: where it began


def test_samples_to_choose_by_and_to_report_are_others():
    trial, held, fresh = split_trial(fl.SingleIndex(dx=6, n=50, dh=8), 0, 50)
    for one, other in ((trial.sample, held), (trial.sample, fresh), (held, fresh)):
        assert not torch.isclose(one.x, other.x).all(1).any()
        assert not torch.allclose(one.y, other.y)
    clean = hermite_link(held.x @ trial.index)
    assert float((held.y - clean).var()) == pytest.approx(1, abs=0.5)  # of the same problem: what is left is noise


def test_the_choice_is_by_held_out_samples_alone(monkeypatch):
    def found(rate, held_out, train, fresh):
        return index_training.Trained(rate=rate, steps=5, held_out=held_out, train=train, fresh=fresh, correlation=0.5)

    runs = {0.1: [found(0.1, 0.6, 0.1, 0.1)], 1.0: [found(1.0, 0.5, 0.9, 0.9)]}
    monkeypatch.setattr(index_training, "_run", lambda name, trial, others, rate, steps, every: runs[rate])
    trial, held, fresh = split_trial(fl.SingleIndex(dx=6, n=50, dh=8), 0, 50)
    assert train_member("kfac", trial, held, fresh, exponents=[-1, 0], steps=10).rate == 1.0


def test_measuring_a_member_does_not_train_it():
    trial, held, fresh = split_trial(fl.SingleIndex(dx=6, n=100, dh=8, activation="relu"), 0, 100)
    often, once = (train_member("kfac", trial, held, fresh, exponents=[-2], steps=10, every=every) for every in (1, 10))
    assert once.steps == 10
    last = index_training._run("kfac", trial, (held, fresh), 0.01, 10, 1)[-1]
    assert last == once
    assert often.held_out <= once.held_out


def test_large_noise_leaves_the_start():
    trial, held, fresh = split_trial(fl.SingleIndex(dx=6, n=50, dh=8, noise=60.0, activation="relu"), 0, 50)
    assert train_member("sgd", trial, held, fresh, exponents=[9], steps=5).steps == 0


def test_sign_factor_of_a_linear_student_has_no_noise():
    setting = fl.SingleIndex(dx=100, n=200, dh=20, activation="identity")
    assert sign_factor(setting) == pytest.approx(math.sqrt(2 / math.pi), abs=1e-6)


@pytest.mark.parametrize(
    "call",
    [
        lambda trial: member_step("kfak", trial, 0.1),
        lambda trial: member_step("kfac", trial, 0.0),
        lambda trial: train_member("kfac", trial, trial.sample, trial.sample, exponents=[], steps=10),
        lambda trial: train_member("kfac", trial, trial.sample, trial.sample, exponents=[0], steps=3),
    ],
)
def test_what_cannot_be_run_is_refused(call, trial):
    with pytest.raises(InputError, match=WORDED):
        call(trial)
