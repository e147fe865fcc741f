"""Muon, and steepest descent in norms: polar factors, torch's own, optimal values."""

import copy
import math

import pytest
import torch
from optim_tools import (
    Record,
    Reference,
    assert_same_steps,
    batches,
    convnet,
    eye,
    flat,
    gaussian,
    mean_eigenvalue,
    mlp,
    power,
    squares,
    train_step,
)
from torch import Tensor, nn

import layerwise as lw
from layerwise.optim import newton_schulz as spectral

pytestmark = pytest.mark.usefixtures("untyped")
LR = 0.01


def polar(X: Tensor) -> Tensor:
    U, _, Vh = torch.linalg.svd(X, full_matrices=False)
    return U @ Vh


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", ["dense", "sequence", "conv"])
def test_muon_by_singular_values(shape: str, adjust: str, nesterov: bool):
    if shape == "conv":
        model, data = convnet(), batches(20, 2, 4, 4)
    else:
        shapes = {"dense": (5,), "sequence": (4, 5)}[shape]
        model, data = mlp(), batches(20, *shapes, positions=shapes[:-1])
    buffers: dict[str, Tensor] = {}

    def direction(t: int, grads: dict[str, Tensor], records: dict[str, Record]) -> dict[str, Tensor]:
        found = {}
        for name, G in grads.items():
            M = buffers[name] = 0.9 * buffers.get(name, torch.zeros_like(G)) + 0.1 * G
            O, I = G.shape[-2:]
            ratio = math.sqrt(max(1, O / I)) if adjust == "original" else 0.2 * math.sqrt(max(O, I))
            found[name] = ratio * polar(0.1 * G + 0.9 * M if nesterov else M)
        return found

    opt = lw.optim.Muon(model, LR, 0.9, nesterov, 0.1, orthogonalize="polar", adjust=adjust, scale="formula")
    own = Reference(model, direction, squares, LR, weight_decay=0.1, separate=True)
    assert_same_steps(opt, model, own, data, tol=1e-3)
    assert (flat(model) - flat(own.model)).abs().max() < 1e-8


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_is_torchs(adjust: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Weights by torch.optim.Muon, biases by torch.optim.AdamW with the same rates, for 25 steps.

    Torch's iteration is in bfloat16 on every CPU, ours in float32 on those that are slow at it, but for here.

    The iteration in bfloat16 turns the last bit of a gradient into a percent of the step: parameters are set equal
    after each comparison, momentum is not. A step is about 5e-3 in every entry.
    """
    monkeypatch.setattr(spectral, "fast_bfloat16", lambda device: True)
    model = mlp(8, 12, 12, 3).to(dtype)
    other = copy.deepcopy(model)
    opt = lw.optim.Muon(model, lr=0.02, adjust=adjust, scale="formula")
    matrices = [p for p in other.parameters() if p.ndim == 2]
    vectors = [p for p in other.parameters() if p.ndim == 1]
    theirs = (
        torch.optim.Muon(matrices, lr=0.02, adjust_lr_fn=adjust),
        torch.optim.AdamW(vectors, lr=0.02, weight_decay=0.1),
    )
    for x, y in batches(25, 8):
        train_step(model, opt, (x.to(dtype), y), squares)
        other.zero_grad()
        squares(other(x.to(dtype)), y).backward()
        for each in theirs:
            each.step()
        assert (flat(model) - flat(other)).abs().max() < 1e-4
        other.load_state_dict(model.state_dict())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_muon_moves_towards_the_polar_factor():
    """Five steps of the iteration: singular values between 0.5 and 1.5, vectors those of the momentum."""
    G = gaussian(6, 9)
    model = nn.Linear(9, 6, bias=False).double()
    before = model.weight.detach().clone()
    opt = lw.optim.Muon(model, lr=1.0, weight_decay=0.0, scale="formula")
    (model(torch.eye(9, dtype=G.dtype)) * G.T).sum().backward()
    opt.step()
    D = before - model.weight.detach()
    U, _, Vh = torch.linalg.svd(G, full_matrices=False)
    inside = U.T @ D @ Vh.T
    assert ((inside.diagonal() > 0.5) & (inside.diagonal() < 1.5)).all()
    assert (inside - inside.diagonal().diag()).abs().max() < 0.05


# --- steepest descent in a norm (Appendix D) ---------------------------------------------------------------


def test_mahalanobis_spectral():
    data = batches(20, 5)
    model = mlp()
    root = 0.01**0.5

    def direction(t: int, grads: dict[str, Tensor], records: dict[str, Record]) -> dict[str, Tensor]:
        found = {}
        for name, G in grads.items():
            P, Q = records[name].P(), records[name].Q()
            P, Q = (power(M + root * mean_eigenvalue(M) * eye(M), -0.5) for M in (P, Q))
            U, S, Vh = torch.linalg.svd(P @ G @ Q, full_matrices=False)
            found[name] = S.sum() * P @ U @ Vh @ Q
        return found

    opt = lw.optim.MahalanobisSpectral(
        model, 0.002, 0.01, factor_decay=0.0, refresh_every=1, clip=None, scale="formula"
    )
    assert_same_steps(opt, model, Reference(model, direction, squares, 0.002), data)


def _solved_by_the_optimizer(kind, eta: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The step of a member on one layer, with the factors it has and the gradient it saw."""
    model = nn.Sequential(nn.Linear(4, 3, bias=False)).double()
    x, y = gaussian(20, 4, seed=3), gaussian(20, 3, seed=4)
    opt = kind(model, eta)
    before = model[0].weight.detach().clone()
    train_step(model, opt, (x, y), lambda f, y: 0.5 * (f - y).square().sum() / len(f))
    saved = next(iter(opt.state_dict()["state"].values()))["0"]
    return model[0].weight.detach() - before, model[0].weight.grad.clone(), saved["P"][0], saved["Q"][0]


def test_the_spectral_step_reaches_the_optimal_value():
    """``min ⟨g, M⟩ + ‖P^½ M Q^½‖²_op / (2η) = −(η/2) tr(S)²``; no perturbation does better."""
    eta = 0.3
    step, g, P, Q = _solved_by_the_optimizer(
        lambda m, eta: lw.optim.MahalanobisSpectral(
            m, eta, damping=0.0, damping_scale="absolute", clip=None, scale="formula"
        ),
        eta,
    )
    S = torch.linalg.svdvals(power(P, -0.5) @ g @ power(Q, -0.5))

    def objective(M: Tensor) -> Tensor:
        norm = torch.linalg.matrix_norm(power(P, 0.5) @ M @ power(Q, 0.5), 2)
        return (g * M).sum() + norm**2 / (2 * eta)

    assert abs(objective(step) + eta / 2 * S.sum() ** 2) < 1e-9
    for seed in range(200):
        assert objective(step + 10.0 ** -(seed % 4) * step.norm() * gaussian(3, 4, seed=seed)) >= objective(step)


def test_the_step_minimises_the_corrected_norm_and_not_the_printed_one():
    """Prop. D.2: ``−η P⁻¹ g Q⁻¹`` is steepest in ``‖P^½ M Q^½‖_F``; in the printed ``‖Pᵀ M Qᵀ‖_F`` it is not."""
    eta = 0.3
    step, g, P, Q = _solved_by_the_optimizer(
        lambda m, eta: lw.optim.KFAC(m, eta, 0.0, 0.0, damping_scale="absolute", clip=None, scale="formula"), eta
    )

    def corrected(M: Tensor) -> Tensor:
        return (g * M).sum() + (power(P, 0.5) @ M @ power(Q, 0.5)).square().sum() / (2 * eta)

    def printed(M: Tensor) -> Tensor:
        return (g * M).sum() + (P.T @ M @ Q.T).square().sum() / (2 * eta)

    for seed in range(100):
        assert corrected(step + 0.1 * step.norm() * gaussian(3, 4, seed=seed)) > corrected(step)
    M = step.clone().requires_grad_()
    assert torch.autograd.grad(corrected(M), M)[0].abs().max() < 1e-9
    assert torch.autograd.grad(printed(M), M)[0].abs().max() > 0.1 * g.abs().max()
    assert printed(-eta * torch.linalg.inv(P @ P.T) @ g @ torch.linalg.inv(Q.T @ Q)) < printed(step)
