"""First bases by Cholesky and sweeps, against eigh."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_objects import TRUE, context_at, device_step, initial_state, refined, set_factors
from torch import Tensor

import layerwise.optim.cuda.basis as bases
from layerwise.optim.cuda.linalg.first_basis import SHIFT, iterated_once
from layerwise.optim.cuda.linalg.jacobi import coupling
from layerwise.optim.members.ekfac import CorrectedEigenvalues
from layerwise.optim.rule import Shape

N = 96


def factor(kind: str, seed: int = 0) -> Tensor:
    """Of one batch, and hard: of a low rank, with a direction that is all of it, with dead units; or easy."""
    g = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(N, N, generator=g))[0]
    X = torch.randn(32 if kind == "low rank" else 400, N, generator=g) * torch.arange(1, N + 1) ** -1.0 @ Q.mT
    if kind == "outlier":
        X = X + 30 * X.std() * torch.randn(N, generator=g)
    if kind == "dead units":
        X[:, ::7], X[:, 1::50] = 0, 30 * X[:, 1::50]
    return (X.mT @ X / len(X))[None]


@pytest.mark.parametrize("kind", ["plain", "low rank", "outlier", "dead units"])
def test_one_step_of_orthogonal_iteration(kind: str):
    M = factor(kind)
    U, good = iterated_once(M)
    assert good.tolist() == [True]
    assert float((U.mT @ U - torch.eye(N)).abs().max()) < 1e-2  # which a sweep makes orthogonal
    shifted = M + SHIFT * M.diagonal(dim1=1, dim2=2).mean() * torch.eye(N)
    expected = torch.linalg.qr(shifted.double())[0]
    few = slice(0, 8)  # later columns of ill-conditioned matrices are rounding
    overlaps = (U.double() * expected).sum(-2).abs()[0, few]
    assert float(overlaps.min()) > 0.999


def test_what_is_not_positive_definite_gets_the_identity_and_does_not_harm_others():
    M = torch.cat([factor("plain"), -factor("plain"), torch.full((1, N, N), torch.nan), torch.zeros(1, N, N)])
    U, good = iterated_once(M)
    assert good.tolist() == [True, False, False, True]
    torch.testing.assert_close(U[1:], torch.eye(N).expand(3, N, N))


def begun(monkeypatch: pytest.MonkeyPatch, M: Tensor, by_sweeps: bool, steps: Sequence[int] = (1,)) -> Any:
    """The left side of EKFAC's basis after a first refresh, and perhaps the next ones of the same factor."""
    monkeypatch.setattr(bases, "begins_by_sweeps", lambda values: by_sweeps)
    shape = Shape(len(M), N, 16, torch.float32, torch.device("cpu"))
    rule = CorrectedEigenvalues(scaling="running")
    state = initial_state(rule, shape)
    set_factors(state, P=M, Q=torch.eye(16).expand(len(M), 16, 16))
    context = context_at(1, 1e-3, shape, device_step=device_step(TRUE))
    context.health.on_device = True
    for step in steps:
        rule.refresh(state, slice(0, len(M)), replace(context, step=step, memory={"fresh": [step > 1] * len(M)}))
    return refined(state)["P"], context.health


@pytest.mark.parametrize("kind", ["plain", "low rank", "outlier", "dead units"])
def test_a_basis_that_is_begun_by_sweeps_is_nearly_exact_after_eight_steps(kind: str, monkeypatch: pytest.MonkeyPatch):
    M, found = factor(kind), {}
    for by_sweeps in (True, False):
        side, health = begun(monkeypatch, M, by_sweeps, (1, 2, 4, 8))
        U = side.matrix.value()
        found[by_sweeps] = float(coupling(U.mT @ M @ U)), side.values.sort().values
        health.settle()
        assert health.fallbacks == 0
    assert found[True][0] < found[False][0] + 0.1  # rounded to fp16 exact ones are coupled too, with an outlier by 0.1
    mean = float(M.diagonal(dim1=1, dim2=2).mean())
    torch.testing.assert_close(found[True][1], found[False][1], rtol=0.05, atol=2e-2 * mean)


def test_a_factor_without_a_first_iterate_begins_with_the_identity(monkeypatch: pytest.MonkeyPatch):
    """Where Cholesky fails: it is counted, and sweeps at refreshes go on from there."""
    M = torch.cat([factor("plain"), factor("plain")])

    def fails(M: Tensor) -> tuple[Tensor, Tensor]:
        U, _ = iterated_once(M)
        return torch.cat([U[:1], torch.eye(M.shape[-1])[None]]), torch.tensor([True, False])

    monkeypatch.setattr(bases, "iterated_once", fails)
    couplings = []
    for steps in ((1,), (1, 2, 4, 8), (1, 2, 4, 8, 11, 21, 31)):
        side, health = begun(monkeypatch, M, True, steps)
        U = side.matrix.value()
        couplings.append([float(x) for x in coupling(U.mT @ M @ U)])
        health.settle()
        assert health.fallbacks == 2  # one on either side
    assert couplings[0][0] < couplings[0][1]
    assert couplings[2][1] < 0.05 < couplings[1][1] < couplings[0][1]


def test_a_factor_that_nothing_can_begin_keeps_its_basis_and_counts_once(monkeypatch: pytest.MonkeyPatch):
    M = torch.cat([factor("plain"), torch.full((1, N, N), torch.nan)])
    side, health = begun(monkeypatch, M, True)
    health.settle()
    assert health.fallbacks == 1
    assert torch.isfinite(side.values).all()
    assert torch.isfinite(side.matrix.value()).all()
