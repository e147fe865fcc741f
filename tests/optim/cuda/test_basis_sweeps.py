"""How bases are kept: begun once by eigh, one sweep a refresh, and what is not finite keeps the last one."""

from typing import Any

import pytest
import torch
from gpu_objects import context_at, initial_state, matrix, set_factors
from torch import Tensor

from layerwise.optim.cuda import backend as backends
from layerwise.optim.cuda import basis as bases
from layerwise.optim.cuda.basis import OFTEN, SWEEPS, YOUNG_STEPS, YOUNG_SWEEPS
from layerwise.optim.cuda.linalg.fp16 import Half
from layerwise.optim.cuda.linalg.jacobi import coupling
from layerwise.optim.cuda.linalg.orthogonal import basis_half
from layerwise.optim.kronecker import KroneckerRoots
from layerwise.optim.members.ekfac import CorrectedEigenvalues
from layerwise.optim.members.soap import RotatedAdam
from layerwise.optim.rule import Health, Shape, State, UpdateRule
from random_tensors import randn64

pytestmark = pytest.mark.usefixtures("untyped")
CPU = torch.device("cpu")
ROOTS = KroneckerRoots("gradient", "identity", (0.25, 0.0))


def normal(*shape: int, seed: int) -> Tensor:
    return randn64(*shape, seed=seed).float()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Decompositions and sweeps, in order."""
    found = list[str]()

    def spied(name: str, own: Any) -> Any:
        return lambda *args, **options: found.append(name) or own(*args, **options)

    for name in ("settled_eigh", "tracked_basis"):
        monkeypatch.setattr(bases, name, spied(name, getattr(bases, name)))
    return found


def refresh(rule: UpdateRule, state: State, shape: Shape, turn: int, health: Health, fresh: list[bool]) -> None:
    """Of all groups; those that have a basis already are `fresh`."""
    context = context_at(100 + 10 * turn, 1e-3, shape, health=health, memory={"fresh": fresh})
    rule.refresh(state, slice(0, shape.groups), context)


def test_the_same_sweeps_at_every_refresh(calls: list[str]):
    """However far the factor has come; begun where a group has no basis yet."""
    shape, health = Shape(1, 8, 4, torch.float32, CPU), Health()
    state = initial_state(ROOTS, shape)
    for turn in range(4):
        X = normal(1, 8, 8, seed=turn)
        set_factors(state, P=X @ X.mT)
        refresh(ROOTS, state, shape, turn, health, [turn > 0])
    assert calls == ["settled_eigh", *["tracked_basis"] * 3]
    assert (health.fallbacks, health.refusals, health.restarts) == (0, 0, 0)


def test_how_many_sweeps(monkeypatch: pytest.MonkeyPatch):
    """More of them while statistics are young, and one where refreshes are close to each other."""
    taken, own = list[int](), bases.tracked_basis
    monkeypatch.setattr(bases, "tracked_basis", lambda M, U, sweeps: taken.append(sweeps) or own(M, U, sweeps))
    shape = Shape(1, 8, 4, torch.float32, CPU)
    state = initial_state(ROOTS, shape)
    X = normal(1, 8, 8, seed=0)
    set_factors(state, P=X @ X.mT)
    for every in (10, OFTEN, OFTEN - 1, 1):
        for step in (1, 2, YOUNG_STEPS - 1, YOUNG_STEPS, 100):
            context = context_at(step, 1e-3, shape, memory={"fresh": [step > 1]}, refresh_every=every)
            ROOTS.refresh(state, slice(0, 1), context)
    assert taken == [YOUNG_SWEEPS, YOUNG_SWEEPS, SWEEPS, SWEEPS] * 2 + [YOUNG_SWEEPS, YOUNG_SWEEPS, 1, 1] * 2


@pytest.mark.parametrize("rule", [CorrectedEigenvalues(), ROOTS])
@pytest.mark.parametrize(("precision", "size", "form"), [("half", 8, Half), ("half", 4, Tensor), ("high", 8, Tensor)])
def test_half_precision_rounds_large_factors(
    precision: str, size: int, form: type, rule: UpdateRule, monkeypatch: pytest.MonkeyPatch
):
    """In sweeps, and where eigenvalues are measured that steps are made of."""
    swept, measured, sweep, measure = set[type](), set[type](), bases.tracked_basis, bases.rayleigh_quotients
    monkeypatch.setattr(bases, "tracked_basis", lambda M, *given: swept.add(type(M)) or sweep(M, *given))
    monkeypatch.setattr(bases, "rayleigh_quotients", lambda M, *given: measured.add(type(M)) or measure(M, *given))
    monkeypatch.setattr(backends, "ROUGH_SIZE", 8)
    shape = Shape(1, size, size, torch.float32, CPU)
    state = initial_state(rule, shape, backends.CudaBackend("products", precision))
    X = normal(1, size, size, seed=0)
    set_factors(state, **dict.fromkeys("P" if rule is ROOTS else "PQ", X @ X.mT))
    for turn in range(2):
        refresh(rule, state, shape, turn, Health(), [turn > 0])
    assert swept == {form}
    assert measured == ({form} if rule is ROOTS else set())


def test_refreshes_follow_a_factor_that_moves(monkeypatch: pytest.MonkeyPatch):
    """A running mean of batches that have few directions each, as gradients have. One sweep a refresh falls behind."""
    left = {}
    for name, sweeps in (("usual", bases.SWEEPS), ("one", 1)):
        monkeypatch.setattr(bases, "SWEEPS", sweeps)
        shape = Shape(1, 96, 4, torch.float32, CPU)
        state, M, found = initial_state(ROOTS, shape), torch.eye(96)[None], []
        for turn in range(16):
            X = normal(1, 12, 96, seed=turn)
            M = M.lerp(X.mT @ X / 12, 0.3)
            set_factors(state, P=M)
            refresh(ROOTS, state, shape, turn, Health(), [turn > 0])
            U = matrix(state, "P")
            found.append(float(coupling(U.mT @ M @ U)))
        left[name] = sum(found[6:])
    assert left["usual"] < 0.75 * left["one"]


@pytest.mark.parametrize("sweeps", [1, 2, 3, 4, 5])
def test_a_basis_stays_orthogonal_however_many_sweeps_it_takes(sweeps: int):
    """Of a factor that has nothing to do with it, so that all columns turn as far as they may."""
    U = torch.linalg.qr(normal(1, 96, 96, seed=1))[0]
    M = (U * torch.logspace(0, -3, 96)) @ U.mT
    V = basis_half(torch.linalg.qr(normal(1, 96, 96, seed=2))[0])
    for _ in range(4):
        V, _, couplings = bases.tracked_basis(M, V, sweeps)
        assert torch.isfinite(couplings).all()
        Q = V.hi.float() / V.scale[..., None, None]
        torch.testing.assert_close(Q.mT @ Q, torch.eye(96)[None], rtol=0, atol=0.05)


def test_eigenvalues_after_two_sweeps_are_those_of_orthogonal_columns():
    """Columns are longer in between, by up to a tenth: the trace would be larger than it is."""
    U = torch.linalg.qr(normal(1, 96, 96, seed=1))[0]
    M = (U * torch.linspace(1, 2, 96)) @ U.mT  # close to each other: every pair turns, and hardly changes the diagonal
    V = basis_half(torch.linalg.qr(normal(1, 96, 96, seed=2))[0])
    for sweeps in (1, 2, 3):
        _, values, _ = bases.tracked_basis(M, V, sweeps)
        assert abs(float(values.sum() / M.diagonal(dim1=1, dim2=2).sum()) - 1) < 0.01


def test_a_group_that_comes_later_is_begun(calls: list[str]):
    shape = Shape(2, 8, 4, torch.float32, CPU)
    state = initial_state(ROOTS, shape)
    X = normal(2, 8, 8, seed=0)
    set_factors(state, P=X @ X.mT)
    refresh(ROOTS, state, shape, 0, Health(), [True, False])
    assert calls == ["settled_eigh"]


@pytest.mark.parametrize("rule", [ROOTS, CorrectedEigenvalues(scaling="none")], ids=["Shampoo", "EKFAC"])
def test_sweeps_come_to_the_eigenbasis(rule: UpdateRule):
    """Of a factor that has changed, and then stays."""
    shape, health = Shape(1, 24, 24, torch.float32, CPU), Health()
    state = initial_state(rule, shape)
    U = torch.linalg.qr(normal(1, 24, 24, seed=1))[0]
    M = (U * torch.logspace(0, -2, 24)) @ U.mT
    set_factors(state, P=M, **({"Q": M} if "Q" in state else {}))
    off = []
    for turn in range(12):
        if turn == 1:
            V = torch.linalg.qr(normal(1, 24, 24, seed=2))[0]
            M = M.lerp((V * torch.logspace(0, -2, 24)) @ V.mT, 0.3)
            set_factors(state, P=M, **({"Q": M} if "Q" in state else {}))
        refresh(rule, state, shape, turn, health, [turn > 0])
        V = matrix(state, "P")
        S = V.mT @ M @ V
        off.append(float((S - torch.diag_embed(S.diagonal(dim1=-2, dim2=-1))).norm() / M.norm()))
    assert off[-1] < 5e-3
    assert off[-1] < 0.2 * off[1]
    torch.testing.assert_close(V.mT @ V, torch.eye(24)[None], rtol=0, atol=2e-3)


def test_a_sweep_that_overflows(monkeypatch: pytest.MonkeyPatch):
    """Its basis stays, the other group's goes on; the next sweep follows both."""
    broken = [False]

    def spied(own: Any) -> Any:
        def spy(*args: Any) -> tuple[Any, Tensor, Tensor]:
            U, values, couplings = own(*args)
            couplings[:, 0] = torch.inf if broken[0] else couplings[:, 0]
            return U, values, couplings

        return spy

    monkeypatch.setattr(bases, "tracked_basis", spied(bases.tracked_basis))
    shape, health = Shape(2, 8, 4, torch.float32, CPU), Health()
    state = initial_state(ROOTS, shape)
    P = state["P"].mean

    def turn(number: int) -> tuple[Tensor, Tensor]:
        X = normal(2, 8, 32, seed=number)
        P.lerp_(X @ X.mT / 32, 0.1 if number else 1.0)
        refresh(ROOTS, state, shape, number, health, [number > 0] * 2)
        return matrix(state, "P").clone(), state["roots"].sides["P"].values.clone()

    turn(0)
    before = turn(1)
    broken[0] = True
    kept = turn(2)
    assert [torch.equal(a[0], b[0]) for a, b in zip(before, kept, strict=True)] == [True, True]
    assert not torch.equal(before[0][1], kept[0][1])
    assert health.fallbacks == 1
    broken[0] = False
    after = turn(3)
    assert not any(torch.equal(a[0], b[0]) for a, b in zip(kept, after, strict=True))
    assert health.fallbacks == 1


@pytest.mark.parametrize("rule", [ROOTS, RotatedAdam(), CorrectedEigenvalues()], ids=["Shampoo", "SOAP", "EKFAC"])
def test_one_factor_that_is_not_finite_does_not_cost_the_others(rule: UpdateRule):
    """Its basis stays the identity, with which it began; it is counted at every refresh."""
    shape, health = Shape(2, 8, 8, torch.float32, CPU), Health()
    state = initial_state(rule, shape)
    if "begun" in state:
        state["begun"].fill_(1)
    root = normal(8, 8, seed=3)
    M = root @ root.mT + torch.diag(torch.logspace(1, -1, 8))
    for turn in range(12):
        for side in {"P", "Q"} & {*state}:
            state[side].mean[0], state[side].mean[1] = torch.inf, M * (1 + turn)
        refresh(rule, state, shape, turn, health, [turn > 0] * 2)
    U = matrix(state, "P")
    assert torch.equal(U[0], torch.eye(8))
    S = U[1].mT @ M @ U[1]
    assert float((S - torch.diag(S.diagonal())).norm() / S.norm()) < 1e-2
    sides = 1 if rule is ROOTS else 2
    assert health.fallbacks == sides * 12


def test_a_factor_of_zeros_keeps_what_it_has():
    shape, health = Shape(1, 8, 8, torch.float32, CPU), Health()
    state = initial_state(ROOTS, shape)
    refresh(ROOTS, state, shape, 0, health, [False])
    assert torch.equal(matrix(state, "P")[0], torch.eye(8))
    assert health.fallbacks == 0
