"""What the paper says about the algorithms, as equalities."""

import pytest
import torch

from error_sentences import WORDED
from layerwise import feature_learning as fl
from layerwise.foundations.errors import InputError, NameLookupError
from layerwise.foundations.random import stream
from layerwise.studies.feature_learning.algorithms import Weights
from layerwise.studies.feature_learning.batch import draw_batch, solve_right
from layerwise.studies.feature_learning.by_products import orthonormal_by_products
from layerwise.studies.feature_learning.ngd import fisher, gauss_newton, sampled_fisher
from layerwise.studies.feature_learning.problem import draw_problem
from layerwise.studies.feature_learning.two_layer import (
    grad_F,
    grad_G,
    gradients,
    least_squares_head,
    loss,
    orthonormal_rows,
)

SETTING = fl.Setting(dx=12, dy=5, k=3, batch=90, scale="trace")
F = torch.randn(5, 3, generator=stream(1, "F"), dtype=torch.float64)
G = torch.randn(3, 12, generator=stream(1, "G"), dtype=torch.float64)
LR = torch.tensor(0.3, dtype=torch.float64).view(1, 1)


@pytest.fixture(scope="module")
def batch():
    return draw_batch(draw_problem(SETTING, stream(0, "problem")).train, 90, stream(0, "batch"))


def raw_loss(F, G, batch):
    x, y, _ = batch.samples()
    return (y - x @ G.mT @ F.mT).square().sum(-1).mean() / 2


def test_gradients_and_loss_are_those_of_the_samples(batch):
    f, g = F.clone().requires_grad_(), G.clone().requires_grad_()
    by_autograd = torch.autograd.grad(raw_loss(f, g, batch), (f, g))
    torch.testing.assert_close(grad_F(F, G, batch), by_autograd[0], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(grad_G(F, G, batch), by_autograd[1], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(loss(F, G, batch), raw_loss(F, G, batch), rtol=1e-11, atol=0.0)


@pytest.mark.parametrize("head_lr", [0.3, 1.0])
def test_lemma_3_1_a_preconditioned_step_of_the_head_is_a_mean_with_least_squares(batch, head_lr):
    Sz = G @ batch.Sx @ G.mT
    stepped = F - head_lr * solve_right(Sz, grad_F(F, G, batch))
    mean = (1 - head_lr) * F + head_lr * least_squares_head(G, batch)
    torch.testing.assert_close(stepped, mean, rtol=1e-10, atol=1e-10)


def test_min_min_goes_to_the_least_loss_over_G(batch):
    moved = G - fl.MinMin().direction(F, G, batch)
    x, y, _ = batch.samples()
    best = torch.linalg.pinv(F) @ torch.linalg.lstsq(x, y).solution.mT
    torch.testing.assert_close(moved, best, rtol=1e-9, atol=1e-9)
    least = loss(F, moved, batch)
    for other in range(5):
        push = torch.randn(G.shape, generator=stream(other, "push"), dtype=torch.float64)
        assert loss(F, moved + 1e-3 * push, batch) > least


def test_foof_without_a_ridge_is_dfw_without_ortho(batch):
    foof = fl.FOOF(ridge=1e-12).direction(grad_G(F, G, batch), batch.Sx, LR)
    torch.testing.assert_close(foof, fl.DFW().direction(F, G, batch), rtol=1e-6, atol=1e-8)


def test_locoprop_is_foof_with_rate_one_and_ridge_one_over_the_rate(batch):
    w = Weights(F, G)
    loco = fl.LocoProp().step(w, LR, batch, batch)
    foof = fl.FOOF(ridge=1 / float(LR)).step(w, torch.ones(1, 1, dtype=torch.float64), batch, batch)
    torch.testing.assert_close(loco.G, foof.G, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(loco.F, foof.F, rtol=1e-10, atol=1e-10)


def test_foof_minimises_its_objective_with_half_the_printed_ridge(batch):
    """The objective mean|D z − g|² + λ/2 |D|² has the ridge λ/2; the update with λ is the definition here."""
    x, y, _ = batch.samples()
    r = (x @ G.mT @ F.mT - y) @ F  # dl/dh, a row a sample
    D = torch.linalg.solve(batch.Sx + 0.2 / 2 * torch.eye(12, dtype=torch.float64), (r.mT @ x / len(x)).mT).mT
    D.requires_grad_()
    objective = (x @ D.mT - r).square().sum(-1).mean() + 0.2 / 2 * D.square().sum()
    (gradient,) = torch.autograd.grad(objective, D)
    assert gradient.abs().max() < 1e-10
    torch.testing.assert_close(D.detach(), fl.FOOF(ridge=0.1).direction(grad_G(F, G, batch), batch.Sx, LR))


def test_ekfac_with_the_exact_fisher_is_kfac(batch):
    """Also for several rates and seeds at once, and without harm to a run that is no longer finite."""
    kfac, ekfac = (algorithm.direction(F, G, batch) for algorithm in (fl.KFAC(), fl.EKFAC()))
    assert (ekfac - kfac).norm() < 1e-10 * kfac.norm()
    w = Weights(F, G)
    one, other = (algorithm.step(w, LR, batch, batch) for algorithm in (fl.KFAC(), fl.EKFAC()))
    assert (one.G - other.G).norm() < 1e-10 * one.G.norm()
    assert (one.F - other.F).norm() < 1e-10 * one.F.norm()
    runs = fl.compare({"k": fl.KFAC(lr=[0.1, 1.0]), "e": fl.EKFAC(lr=[0.1, 1.0])}, setting=SETTING, steps=5, seeds=2)
    torch.testing.assert_close(runs["e"].dist, runs["k"].dist, rtol=1e-8, atol=1e-12)
    wild = torch.stack([F, torch.full_like(F, torch.inf)])
    found = fl.EKFAC().direction(wild, torch.stack([G, G]), batch)
    torch.testing.assert_close(found[0], ekfac)
    assert found[1].isnan().all()


def test_ekfac_has_the_fishers_variances_in_the_eigenbasis(batch):
    """Mean over drawn residuals ε of the squared gradient Fᵀε xᵀ of each sample, in the eigenbasis."""
    U, V = torch.linalg.eigh(F.mT @ F)[1], torch.linalg.eigh(batch.Sx)[1]
    x = batch.samples().x
    noise = torch.randn(4000, len(x), 5, generator=stream(0, "labels"), dtype=torch.float64)
    outputs = (noise @ F @ U).square().mean(0)  # of every sample
    s = outputs.mT @ (x @ V).square() / len(x)
    expected = U @ ((U.mT @ grad_G(F, G, batch) @ V) / s) @ V.mT
    found = fl.EKFAC().direction(F, G, batch)
    assert (found - expected).norm() < 0.02 * found.norm()


def test_shampoo_of_the_gradient_is_spectral(batch):
    g = grad_G(F, G, batch)
    values, U = torch.linalg.eigh(g @ g.mT)
    left = (U * values**-0.25) @ U.mT
    values, V = torch.linalg.eigh(g.mT @ g)
    V, values = V[:, -3:], values[-3:]
    right = (V * values**-0.25) @ V.mT
    torch.testing.assert_close(fl.Shampoo().direction(g, batch.Sx, LR), left @ g @ right, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(
        fl.Shampoo().direction(g, batch.Sx, LR), fl.Spectral().direction(g, batch.Sx, LR), rtol=1e-8, atol=1e-8
    )


@pytest.mark.parametrize(
    ("algorithm", "norm"),
    [
        (fl.Sign(ideal=True), lambda M: M.abs().max()),
        (fl.Spectral(ideal=True), lambda M: torch.linalg.matrix_norm(M, 2)),
    ],
)
def test_ideal_steps_are_steepest_descent_in_their_norms(algorithm, norm, batch):
    """−D minimises ⟨g, M⟩ + |M|²/2 (Definition D.1): nothing nearby or random does better."""
    g = grad_G(F, G, batch)
    best = -algorithm.direction(g, batch.Sx, LR)
    least = (g * best).sum() + norm(best) ** 2 / 2
    for seed in range(40):
        push = torch.randn(g.shape, generator=stream(seed, "push"), dtype=torch.float64)
        for size in (1e-3, 0.1, 1.0):
            M = best + size * float(norm(best)) * push
            assert (g * M).sum() + norm(M) ** 2 / 2 >= least


def test_mahalanobis_spectral_is_steepest_descent_in_its_norm(batch):
    g, P, Q = grad_G(F, G, batch), F.mT @ F, batch.Sx

    def root(A):
        values, V = torch.linalg.eigh(A)
        return (V * values.sqrt()) @ V.mT

    def value(M):
        return (g * M).sum() + torch.linalg.matrix_norm(root(P) @ M @ root(Q), 2) ** 2 / 2

    best = -fl.MahalanobisSpectral().direction(F, G, batch)
    inner = torch.linalg.solve(root(Q), torch.linalg.solve(root(P), g).mT).mT
    trace = torch.linalg.svdvals(inner).sum()
    torch.testing.assert_close(value(best), -(trace**2) / 2, rtol=1e-9, atol=0.0)
    for seed in range(40):
        push = torch.randn(g.shape, generator=stream(seed, "push"), dtype=torch.float64)
        assert value(best + 0.1 * best.norm() / push.norm() * push) > value(best)


def test_proposition_d2_as_printed_squares_the_preconditioners(batch):
    """|P^½ M Q^½|_F has the steepest step P⁻¹gQ⁻¹; the printed |PᵀMQᵀ|_F has (PPᵀ)⁻¹g(QᵀQ)⁻¹, which differs."""
    g, P, Q = grad_G(F, G, batch), F.mT @ F, batch.Sx
    step = torch.linalg.solve(P, torch.linalg.solve(Q, g.mT).mT)
    M = (-step).requires_grad_()
    quadratic = (g * M).sum() + torch.trace(P @ M @ Q @ M.mT) / 2
    assert torch.autograd.grad(quadratic, M)[0].abs().max() < 1e-10
    printed = (g * M).sum() + (P @ M @ Q).square().sum() / 2
    assert torch.autograd.grad(printed, M)[0].norm() > 0.1 * g.norm()


# --- natural gradient ---------------------------------------------------------------------------------------


def test_the_joint_fisher_is_that_of_the_samples_and_singular(batch):
    x = batch.samples().x
    z = x @ G.mT
    eye = torch.eye(5, dtype=torch.float64)
    by_G = torch.einsum("oi,na->noia", F, x).reshape(len(x), 5, -1)
    by_F = torch.einsum("op,nj->nopj", eye, z).reshape(len(x), 5, -1)
    J = torch.cat([by_G, by_F], -1)
    M = fisher(F, G, batch)
    torch.testing.assert_close(M, torch.einsum("noa,nob->ab", J, J) / len(x), rtol=1e-10, atol=1e-10)
    assert int(torch.linalg.matrix_rank(M, hermitian=True, rtol=1e-12)) == len(M) - 9  # nullity k²


def test_closed_form_is_the_pseudo_inverse_up_to_gauge(batch):
    M = fisher(F, G, batch)
    g = torch.cat([grad_G(F, G, batch).flatten(), grad_F(F, G, batch).flatten()])
    dense = torch.linalg.pinv(M, hermitian=True, rtol=1e-12) @ g
    dF, dG = gauss_newton(F, G, batch)
    step = torch.cat([dG.flatten(), dF.flatten()])
    torch.testing.assert_close(M @ step, g, rtol=0.0, atol=2e-11 * float(g.abs().max()))
    change = dF @ G + F @ dG
    by_dense = dense[36:].view(5, 3) @ G + F @ dense[:36].view(3, 12)
    torch.testing.assert_close(change, by_dense, rtol=0.0, atol=2e-11 * float(change.abs().max()))


def test_natural_gradient_moves_the_representation_as_kfac(batch):
    torch.testing.assert_close(gauss_newton(F, G, batch)[1], fl.KFAC().direction(F, G, batch), rtol=1e-10, atol=1e-10)


def test_the_head_is_compensated_for_ortho(batch):
    w = Weights(F, G)
    plain = fl.NGD(ortho=False).step(w, LR, batch, batch)
    kept = fl.NGD().step(w, LR, batch, batch)
    torch.testing.assert_close(kept.F @ kept.G, plain.F @ plain.G, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(kept.G @ kept.G.mT, torch.eye(3, dtype=torch.float64), rtol=0.0, atol=1e-12)


def test_sampled_labels_give_the_exact_fisher_in_the_mean(batch):
    """The mean over 400 independent draws of labels; each has a relative error of about 0.4."""
    task = draw_problem(SETTING, stream(0, "problem")).train
    exact = mean = 0.0
    for number in range(400):
        drawn = draw_batch(task, 90, stream(number, "many"))
        exact, mean = exact + fisher(F, G, drawn), mean + sampled_fisher(F, G, drawn, "mc")
    assert (mean - exact).norm() < 0.05 * exact.norm()
    one = sampled_fisher(F, G, batch, "mc") - fisher(F, G, batch)
    assert one.norm() > 0.05 * fisher(F, G, batch).norm()


# --- orthonormal rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("condition", [1.0, 1e3, 1e7, 1e12])
def test_orthonormal_rows_by_products_and_by_qr(condition):
    U, _, Vh = torch.linalg.svd(
        torch.randn(4, 3, 20, generator=stream(0, "q"), dtype=torch.float64), full_matrices=False
    )
    A = U @ torch.diag(torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), 3, dtype=torch.float64)) @ Vh
    eye = torch.eye(3, dtype=torch.float64).expand(4, 3, 3)
    for ortho in (orthonormal_rows, orthonormal_by_products):
        Q = ortho(A)
        torch.testing.assert_close(Q @ Q.mT, eye, rtol=0.0, atol=1e-13)
        R = A @ Q.mT  # lower triangular with positive diagonal, so the rotation is the one of the definition
        assert (R.diagonal(dim1=-2, dim2=-1) > 0).all()
        assert R.triu(1).abs().max() < 1e-13
    torch.testing.assert_close(orthonormal_rows(A), orthonormal_by_products(A), rtol=0.0, atol=1e-13 * condition)


def test_both_gradients_at_once(batch):
    dF, dG = gradients(F, G, batch)
    assert torch.equal(dF, grad_F(F, G, batch))
    assert torch.equal(dG, grad_G(F, G, batch))


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: fl.KFAC(lr=-1.0), InputError),
        (lambda: fl.KFAC(lr=[]), InputError),
        (lambda: fl.SGD(lr=float("nan")), InputError),
        (lambda: fl.AMGD(norm="whiten"), InputError),
        (lambda: fl.NGD(fisher="exakt"), InputError),
        (lambda: fl.NGD(solver="lu"), InputError),
        (lambda: fl.NGD(fisher="mc"), InputError),
        (lambda: fl.simulate("kfak", steps=1), NameLookupError),
        (lambda: fl.simulate("kfac", steps=0), InputError),
        (lambda: fl.simulate("kfac", steps=1, seeds=[]), InputError),
        (lambda: fl.simulate("kfac", steps=1, seeds=[1, 1]), InputError),
        (lambda: fl.simulate("dfw", steps=1, batch=50), InputError),
        (lambda: fl.Setting(k=20), InputError),
        (lambda: fl.Setting(data="normal"), InputError),
        (lambda: fl.Setting(noise_is="std"), InputError),
        (lambda: fl.Setting(noise=-0.1), InputError),
        (lambda: fl.Setting(batch=3), InputError),
        (lambda: fl.Setting(scale="tr"), InputError),
        (lambda: fl.Setting(anisotropy="medium"), InputError),
        (lambda: fl.Setting(anisotropy="low", repair="clip"), InputError),
        (lambda: fl.Setting(anisotropy="low", repair="abss"), InputError),
    ],
)
def test_what_cannot_be_run_is_refused(call, error):
    with pytest.raises(error, match=WORDED):
        call()
