"""One contract for both backends: factors, inverse roots, eigenbases and the ends of steps, against float64.

The `cuda` backend runs on a CPU here, by plain torch: eager and asynchronous, with exact decompositions ("auto") and
with refinement by products ("products").
"""

from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from optim_tools import Mean, power
from torch import Tensor

from layerwise.optim.backend import Backend
from layerwise.optim.cuda.backend import CudaBackend
from layerwise.optim.cuda.device_step import DeviceStep
from layerwise.optim.factored_damping import factored_damping
from layerwise.optim.reference import Reference
from layerwise.optim.rule import Context, Health, Shape, State
from random_tensors import randn64

K, O, I = 2, 6, 9
CPU, ALL = torch.device("cpu"), slice(0, K)
DECAY, EXAMPLES = 0.8, 5


@dataclass(frozen=True)
class Setting:
    """A backend, a type of numbers, and whether the host may look at values."""

    backend: Backend
    dtype: torch.dtype
    asynchronous: bool = False

    def __str__(self) -> str:
        name = "reference" if isinstance(self.backend, Reference) else f"cuda-{self.backend.solver}"  # type: ignore[attr-defined]
        return f"{name}-{'asynchronous' if self.asynchronous else 'eager'}-{str(self.dtype).removeprefix('torch.')}"

    @property
    def shape(self) -> Shape:
        return Shape(K, O, I, self.dtype, CPU)

    @property
    def by_products(self) -> bool:
        return isinstance(self.backend, CudaBackend) and self.backend.solver == "products"

    def tolerance(self, by_products: float, followed: bool = False) -> float:
        """Relative; `by_products` in single precision, of what is kept in fp16. In double precision products leave
        something only of what is `followed`, not solved anew."""
        if self.dtype == torch.float64:
            return 1e-5 if self.by_products and followed else 1e-9
        return by_products if self.by_products else 2e-5

    def context(self, step: int = 100, finite: bool = True, health: Health | None = None, **options: Any) -> Context:
        """Of a step whose gradients are finite or not; only an asynchronous one learns that from the device."""
        assert self.asynchronous or finite
        on_device = DeviceStep(torch.tensor(finite)) if self.asynchronous else None
        given = {"shape": self.shape, "examples": EXAMPLES, "memory": {}, **options}
        return Context(step, 0.1, 0.1, True, {}, self.backend, health or Health(), device_step=on_device, **given)

    def moment(self, size: int, seed: int = 0, condition: float = 100.0) -> Tensor:
        """Second moments ``[K, n, n]`` with eigenvalues well apart."""
        U = torch.linalg.qr(randn64(K, size, size, seed=seed + size))[0]
        values = torch.logspace(0, -float(torch.tensor(condition).log10()), size, dtype=torch.float64)
        return ((U * values) @ U.mT).to(self.dtype)

    def drift_(self, factor: Any, seed: int) -> None:
        """Change a factor by some percent of itself in every direction, as a new batch does."""
        M = factor.dense().double()
        E = randn64(*M.shape, seed=seed)
        root = power(M, 0.5)
        new = root @ (torch.eye(M.shape[-1]) + 0.1 * (E + E.mT) / (2 * M.shape[-1]) ** 0.5) @ root
        factor.update_(new.to(self.dtype), 0.8, self.context(), how="ema")

    def factors(self, powers: tuple[float, float], seed: int = 0) -> tuple[Any, Any]:
        """P and Q that have seen one batch."""
        P = self.backend.factor("P", self.shape, O, powers[0])
        Q = self.backend.factor("Q", self.shape, I, powers[1])
        P.update_(self.moment(O, seed), DECAY, self.context())
        Q.update_(self.moment(I, seed), DECAY, self.context())
        return P, Q


BACKENDS = (Reference(), CudaBackend(), CudaBackend("products"))
SETTINGS = [
    Setting(backend, dtype, asynchronous)
    for backend in BACKENDS
    for dtype in (torch.float32, torch.float64)
    for asynchronous in (False, True)
    if not (asynchronous and isinstance(backend, Reference))
]
EACH = pytest.mark.parametrize("setting", SETTINGS, ids=str)
ASYNCHRONOUS = pytest.mark.parametrize("setting", [one for one in SETTINGS if one.asynchronous], ids=str)
How = Literal["mean", "ema", "sum"]


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Group by group, relative to the size of each."""
    off, size = ((X.double().flatten(1).norm(dim=1)) for X in (found.double() - expected.double(), expected))
    worst = float((off / size).max())
    assert worst <= tolerance


# --- factors -------------------------------------------------------------------------------------------------


def expected_average(moments: list[Tensor], how: How) -> Tensor:
    """In float64, from a definition of each."""
    if how == "sum":
        return torch.stack(moments).sum(0)
    if how == "ema":
        weights = [(1 - DECAY) * DECAY**age for age in reversed(range(len(moments)))]
        return sum(w * M for w, M in zip(weights, moments, strict=True))  # type: ignore[return-value]
    mean = Mean(DECAY)
    for M in moments:
        mean.add(M)
    return mean.value()


@EACH
@pytest.mark.parametrize("how", ["mean", "ema", "sum"])
def test_a_factor_averages(setting: Setting, how: How):
    factor = setting.backend.factor("Q", setting.shape, I, 1.0)
    moments = [setting.moment(I, seed) for seed in range(3)]
    for M in moments:
        factor.update_(M, DECAY, setting.context(), how=how)
    expected = expected_average([M.double() for M in moments], how)
    tolerance = 1e-6 if setting.dtype == torch.float32 else 1e-12
    assert_near(factor.dense(), expected, tolerance)
    assert factor.count.tolist() == [3, 3]
    diagonal = expected.diagonal(dim1=-2, dim2=-1)
    assert_near(factor.mean_eigenvalue().unsqueeze(1), diagonal.mean(-1, keepdim=True), tolerance)
    assert_near(factor.trace(slice(1, 2)).unsqueeze(1), diagonal.sum(-1, keepdim=True)[1:], tolerance)
    X = randn64(K, O, I).to(setting.dtype)
    assert_near(factor.product(X), X.double() @ expected, 10 * tolerance)


@EACH
def test_a_group_that_was_not_seen_keeps_its_mean(setting: Setting):
    factor, context = setting.backend.factor("P", setting.shape, O, 1.0), setting.context()
    first, second = (setting.moment(O, seed) for seed in (0, 1))
    factor.update_(first, DECAY, context)
    factor.update_(second, DECAY, context, seen=torch.tensor([True, False]))
    assert factor.count.tolist() == [2, 1]
    assert torch.equal(factor.dense()[1], first[1])
    assert_near(factor.dense()[:1], expected_average([first.double(), second.double()], "mean")[:1], 1e-6)
    context.health.settle()
    assert context.health.skipped_statistics == 0  # nobody asked for it


@EACH
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("how", ["mean", "ema", "sum"])
def test_a_moment_that_is_not_finite_is_left_out(setting: Setting, how: How, bad: float):
    factor, context = setting.backend.factor("P", setting.shape, O, 1.0), setting.context()
    factor.update_(setting.moment(O), DECAY, context, how=how)
    before, broken = factor.dense().clone(), setting.moment(O, 1)
    broken[1, 2, :], broken[1, :, 2] = bad, bad
    factor.update_(broken, DECAY, context, how=how)
    assert factor.count.tolist() == [2, 1]
    assert torch.equal(factor.dense()[1], before[1])
    assert not torch.equal(factor.dense()[0], before[0])
    context.health.settle()
    assert context.health.skipped_statistics == (1 if how == "mean" else 0)


@ASYNCHRONOUS
@pytest.mark.parametrize("how", ["mean", "ema", "sum"])
def test_a_step_that_is_left_out_changes_no_factor(setting: Setting, how: How):
    factor = setting.backend.factor("P", setting.shape, O, 1.0)
    factor.update_(setting.moment(O), DECAY, setting.context(), how=how)
    before, count = factor.dense().clone(), factor.count.clone()
    context = setting.context(finite=False)
    factor.update_(torch.full((K, O, O), torch.nan, dtype=setting.dtype), DECAY, context, how=how)
    assert torch.equal(factor.dense(), before)
    assert torch.equal(factor.count, count)


@EACH
def test_moments_of_the_gradient(setting: Setting):
    G = randn64(K, O, I, seed=3).to(setting.dtype)
    found = dict(setting.backend.gradient_moments(G, ["P", "Q"], setting.context()))
    tolerance = 1e-5 if setting.dtype == torch.float32 else 1e-12
    assert_near(found["P"], G.double() @ G.double().mT, tolerance)
    assert_near(found["Q"], G.double().mT @ G.double(), tolerance)
    assert dict(setting.backend.gradient_moments(G, [], setting.context())) == {}


# --- inverse roots -------------------------------------------------------------------------------------------

DAMPING = (0.1, 0.05)


def shifts(mean_P: Tensor | None, mean_Q: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Other shares of both mean eigenvalues."""
    return (None if mean_P is None else DAMPING[0] * mean_P), (None if mean_Q is None else DAMPING[1] * mean_Q)


def explicit_root(M: Tensor, share: float, p: float) -> Tensor:
    """``(M + shift I)^(−p)`` in float64."""
    M = M.double()
    shift = share * M.diagonal(dim1=-2, dim2=-1).mean(-1)
    return power(M + shift.view(-1, 1, 1) * torch.eye(M.shape[-1], dtype=M.dtype), -p)


@EACH
@pytest.mark.parametrize("sides", ["both", "left", "right"])
@pytest.mark.parametrize("powers", [(1.0, 1.0), (0.5, 0.25), (1.0, 0.5)])
def test_roots_are_those_of_the_damped_factors(setting: Setting, powers: tuple[float, float], sides: str):
    """At first, and when factors have changed."""
    P, Q = setting.factors(powers)
    P, Q = (P if sides != "right" else None), (Q if sides != "left" else None)
    roots, X = setting.backend.inverse_roots(P, Q, powers, setting.shape), randn64(K, O, I, seed=5).to(setting.dtype)
    if powers == (1.0, 1.0):  # identities, until there are statistics
        assert_near(setting.backend.tensor(roots.direction(X, setting.context(), shifts)), X, setting.tolerance(2e-3))
    for turn in range(4):
        context = setting.context(100 + 10 * turn)
        for factor in (P, Q):
            if factor is not None and turn:
                setting.drift_(factor, turn)
        roots.refresh_(P, Q, shifts, ALL, context)
        expected = X.double()
        if P is not None:
            expected = explicit_root(P.dense(), DAMPING[0], powers[0]) @ expected
        if Q is not None:
            expected = expected @ explicit_root(Q.dense(), DAMPING[1], powers[1])
        found = setting.backend.tensor(roots.direction(X, context, shifts))
        assert found.dtype == setting.dtype
        refined = setting.by_products and turn > 0
        assert_near(found, expected, 1e-2 if refined else setting.tolerance(5e-3))


@EACH
def test_roots_of_some_groups(setting: Setting):
    P, Q = setting.factors((1.0, 1.0))
    roots, X = setting.backend.inverse_roots(P, Q, (1.0, 1.0), setting.shape), randn64(K, O, I).to(setting.dtype)
    roots.refresh_(P, Q, shifts, slice(1, 2), setting.context())
    found = setting.backend.tensor(roots.direction(X, setting.context(), shifts))
    expected = explicit_root(P.dense(), DAMPING[0], 1.0) @ X.double() @ explicit_root(Q.dense(), DAMPING[1], 1.0)
    assert_near(found[1:], expected[1:], setting.tolerance(2e-3) + 1e-4 * (setting.dtype == torch.float32))
    assert_near(found[:1], X[:1], setting.tolerance(2e-3))


@EACH
def test_a_factor_that_cannot_be_inverted_keeps_its_last_root(setting: Setting):
    P, Q = setting.factors((1.0, 1.0))
    roots, X = setting.backend.inverse_roots(P, Q, (1.0, 1.0), setting.shape), randn64(K, O, I).to(setting.dtype)
    health = Health()
    roots.refresh_(P, Q, shifts, ALL, setting.context(100, health=health))
    before = setting.backend.tensor(roots.direction(X, setting.context(), shifts)).clone()
    indefinite = torch.diag(torch.tensor([5.0, 1.0, 1.0, 1.0, 1.0, -2.0], dtype=setting.dtype))
    P.load("P", slice(1, 2), indefinite.unsqueeze(0))
    for turn in range(1, 3):
        roots.refresh_(P, Q, shifts, ALL, setting.context(100 + turn, health=health))
    after = setting.backend.tensor(roots.direction(X, setting.context(), shifts))
    assert bool(torch.isfinite(after).all())
    assert_near(after, before, setting.tolerance(2e-3))
    health.settle()
    assert health.fallbacks == 2


@EACH
def test_saved_roots_are_plain_and_come_back(setting: Setting):
    P, Q = setting.factors((1.0, 1.0))
    make = lambda: setting.backend.inverse_roots(P, Q, (1.0, 1.0), setting.shape)  # noqa: E731
    roots, X = make(), randn64(K, O, I).to(setting.dtype)
    roots.refresh_(P, Q, shifts, ALL, setting.context())
    saved, other = roots.saved(), make()
    assert {name: (tuple(value.shape), value.dtype) for name, value in saved.items()} == {
        "P_root": ((K, O, O), setting.dtype),
        "Q_root": ((K, I, I), setting.dtype),
    }
    for name, value in saved.items():
        other.load(name, ALL, value.clone())
    found, expected = (
        setting.backend.tensor(each.direction(X, setting.context(), shifts)).clone() for each in (other, roots)
    )
    assert torch.equal(found, expected)


# --- eigenbases ----------------------------------------------------------------------------------------------

MEASURED = pytest.mark.parametrize("measured", [True, False])


def basis_of(setting: Setting, measured: bool) -> tuple[Any, Any, Any]:
    """P, Q and a fresh basis of both."""
    P, Q = setting.factors((0.0, 0.0))
    basis = setting.backend.eigenbasis(P, Q, setting.shape, measured=measured)
    basis.refresh_(P, Q, ALL, setting.context())
    return P, Q, basis


@EACH
@MEASURED
def test_a_basis_is_orthogonal_and_diagonalises(setting: Setting, measured: bool):
    """``U_Pᵀ (P X Q) U_Q = s_P ⊙ (U_Pᵀ X U_Q) ⊙ s_Q``, at first and after factors have changed."""
    P, Q, basis = basis_of(setting, measured)
    X, tensor = randn64(K, O, I, seed=7).to(setting.dtype), setting.backend.tensor
    for turn in range(3):
        context = setting.context(100 + 10 * turn)
        if turn:
            setting.drift_(P, turn)
            setting.drift_(Q, turn)
            basis.refresh_(P, Q, ALL, context)
        R = tensor(basis.rotate(X.clone(), context)).clone()
        back = tensor(basis.unrotate(R.clone(), context))
        assert_near(back, X, setting.tolerance(2e-3, turn > 0))
        assert_near(
            R.flatten(1).norm(dim=1, keepdim=True),
            X.flatten(1).norm(dim=1, keepdim=True),
            setting.tolerance(2e-3, turn > 0),
        )
        PXQ = (P.dense().double() @ X.double() @ Q.dense().double()).to(setting.dtype)
        turned = tensor(basis.rotate(PXQ, context))
        scaled = basis.values_P.double().unsqueeze(-1) * R.double() * basis.values_Q.double().unsqueeze(-2)
        assert_near(turned, scaled, 5e-2 if setting.by_products and turn else max(setting.tolerance(5e-3), 1e-9))
        values = torch.linalg.eigvalsh(P.dense().double())
        found = basis.values_P.double().sort().values
        assert_near(found, values, 2e-2 if setting.by_products and turn else setting.tolerance(1e-3))


@EACH
def test_moments_are_carried_along_when_a_basis_turns(setting: Setting):
    """First moments are those of the same matrix; second moments stay positive, and their sum."""
    P, Q = setting.factors((0.0, 0.0))
    basis, context = setting.backend.eigenbasis(P, Q, setting.shape, measured=True), setting.context(1)
    basis.begin_(P, Q, context)
    G, tensor = randn64(K, O, I, seed=8).to(setting.dtype), setting.backend.tensor
    M = tensor(basis.rotate(G, context)).clone()
    V = M.square()
    total = V.double().sum((1, 2))
    for turn in range(1, 4):
        context = setting.context(1 + turn)
        setting.drift_(P, turn)
        setting.drift_(Q, turn)
        basis.follow_(P, Q, ALL, context, M, V)
    assert_near(tensor(basis.unrotate(M.clone(), context)), G, setting.tolerance(1e-2, True))
    assert bool((V >= 0).all())
    assert_near(V.double().sum((1, 2)).unsqueeze(1), total.unsqueeze(1), setting.tolerance(1e-2, True))


# --- the ends of steps ---------------------------------------------------------------------------------------

BETAS, EPS = (0.9, 0.95), 1e-8


@EACH
def test_adam(setting: Setting):
    """Also where a group has seen fewer steps."""
    shape = setting.shape
    state: State = {"m": shape.zeros(O, I), "v": shape.zeros(O, I), "steps": torch.tensor([0, 2], dtype=setting.dtype)}
    m, v, steps = (x.double().clone() for x in (state["m"], state["v"], state["steps"]))
    for seed in range(3):
        G = randn64(K, O, I, seed=seed).to(setting.dtype)
        found = setting.backend.adam_(state, G, BETAS, EPS, setting.context())
        steps = steps + 1
        m, v = torch.lerp(G.double(), m, BETAS[0]), torch.lerp(G.double().square(), v, BETAS[1])
        c1, c2 = (1 - beta ** steps.view(-1, 1, 1) for beta in BETAS)
        expected = m / c1 / ((v / c2).sqrt() + EPS)
        assert_near(found, expected, 1e-5 if setting.dtype == torch.float32 else 1e-10)
    assert state["steps"].tolist() == [3, 5]


@ASYNCHRONOUS
def test_adam_in_a_step_that_is_left_out(setting: Setting):
    shape = setting.shape
    state: State = {"m": shape.zeros(O, I), "v": shape.zeros(O, I), "steps": shape.zeros()}
    setting.backend.adam_(state, randn64(K, O, I).to(setting.dtype), BETAS, EPS, setting.context())
    before = {name: x.clone() for name, x in state.items()}
    setting.backend.adam_(state, shape.zeros(O, I), BETAS, EPS, setting.context(finite=False))
    assert all(torch.equal(state[name], x) for name, x in before.items())


@EACH
@pytest.mark.parametrize("floored", [False, True])
def test_adam_in_a_basis(setting: Setting, floored: bool):
    """SOAP's; no step where second moments are not above their floor."""
    _, _, basis = basis_of(setting, True)
    shape, tensor = setting.shape, setting.backend.tensor
    state: State = {"basis": basis, "M": shape.zeros(O, I), "V": shape.zeros(O, I), "steps": shape.zeros()}
    M, V, level = torch.zeros(K, O, I).double(), torch.zeros(K, O, I).double(), 0.3
    floor = lambda correction: level * correction if floored else None  # noqa: E731
    for step in range(1, 4):
        G, context = randn64(K, O, I, seed=step).to(setting.dtype), setting.context()
        R = tensor(basis.rotate(G, context)).double().clone()
        Y = setting.backend.adam_in_basis_(state, basis.rotate(G, context), G, BETAS, EPS, floor, context)
        found = tensor(basis.unrotate(Y, context))
        M, V = torch.lerp(R, M, BETAS[0]), torch.lerp(R.square(), V, BETAS[1])
        c1, c2 = (1 - beta**step for beta in BETAS)
        expected = M / (V.sqrt() + EPS) * c2**0.5 / c1
        if floored:
            expected = expected * (1 - level * c2 / V).clamp_min(0)
        expected = tensor(basis.unrotate(expected.to(setting.dtype), context))
        assert_near(found, expected, setting.tolerance(3e-3))
    assert_near(state["M"], M, setting.tolerance(1e-3))
    assert_near(state["V"], V, setting.tolerance(2e-3))
    assert state["steps"].tolist() == [3, 3]


@EACH
@pytest.mark.parametrize("average", [None, 0.7])
@pytest.mark.parametrize("factored", [False, True])
def test_damped_quotients(setting: Setting, factored: bool, average: float | None):
    """``U_P [R / (s + s_P·right + left·s_Q + constant)] U_Qᵀ``, s averaged before where that is asked for."""
    _, _, basis = basis_of(setting, average is not None)
    backend, context = setting.backend, setting.context()
    G, s = randn64(K, O, I, seed=2).to(setting.dtype), randn64(K, O, I, seed=3).square().add(0.1).to(setting.dtype)
    if factored:
        added: Any = factored_damping(basis.values_P, basis.values_Q, 0.1, relative=True, own=(O, I))
    else:
        added = (None, None, torch.tensor([0.5, 0.25], dtype=setting.dtype))
    R = backend.tensor(basis.rotate(G, context)).double().clone()
    expected_s = s.double() if average is None else torch.lerp(EXAMPLES * R.square(), s.double(), average)
    damped = expected_s + added[2].double().view(-1, 1, 1)
    if factored:
        left, right = (x.double().view(-1, 1, 1) for x in added[:2])
        values_P, values_Q = basis.values_P.double(), basis.values_Q.double()
        means = values_P.mean(-1).view(-1, 1, 1), values_Q.mean(-1).view(-1, 1, 1)
        assert_near(left.flatten(1), (0.1**0.5 * means[0]).flatten(1), setting.tolerance(2e-5))
        assert_near(right.flatten(1), (0.1**0.5 * means[1]).flatten(1), setting.tolerance(2e-5))
        damped = damped + values_P.unsqueeze(-1) * right + left * values_Q.unsqueeze(-2)
    rotated = basis.rotate(G, context)
    if average is not None:  # which leaves what is divided as it is
        backend.average_squares_(s, rotated, average, context)
    Y = backend.damped_quotient(rotated, s, basis, added, G)
    found = backend.tensor(basis.unrotate(Y, context))
    expected = backend.tensor(basis.unrotate((R / damped).to(setting.dtype), context))
    assert_near(found, expected, setting.tolerance(3e-3))
    assert_near(s, expected_s, setting.tolerance(1e-3))
    assert_near(backend.damped_scalings(s, basis, *added), damped, setting.tolerance(1e-3))


@EACH
@pytest.mark.parametrize("average", [None, 0.7])
def test_a_quotient_by_the_factors_own_eigenvalues_inverts_them(setting: Setting, average: float | None):
    """``(P ⊗ Q + c)⁻¹``, whichever basis was found."""
    P, Q, basis = basis_of(setting, False)
    G, context = randn64(K, O, I, seed=2).to(setting.dtype), setting.context()
    s = basis.values_P.unsqueeze(-1) * basis.values_Q.unsqueeze(-2)
    constant = torch.full((K,), 0.05, dtype=setting.dtype)
    added: Any = (None, None, constant)
    if average is not None:  # averaged with squares of nothing
        setting.backend.average_squares_(s, torch.zeros_like(G), average, context)
    weight = 1.0 if average is None else average
    Y = setting.backend.damped_quotient(basis.rotate(G, context), s, basis, added, G)
    found = setting.backend.tensor(basis.unrotate(Y, context))
    for k in range(K):
        A = weight * torch.kron(P.dense()[k].double(), Q.dense()[k].double())
        expected = torch.linalg.solve(A + 0.05 * torch.eye(O * I).double(), G[k].double().flatten()).view(1, O, I)
        assert_near(found[k : k + 1], expected, setting.tolerance(5e-3) + 1e-5 * (setting.dtype == torch.float32))


@EACH
def test_scalings_of_examples_replace_those_of_before(setting: Setting):
    s, total = randn64(K, O, I).square().to(setting.dtype), randn64(K, O, I, seed=1).square().to(setting.dtype)
    before = s.clone()
    setting.backend.replace_scalings_(s, total, 4, torch.tensor([True, False]), setting.context())
    assert torch.equal(s[1], before[1])
    assert_near(s[:1], total[:1] / 4, 1e-6)
    if setting.asynchronous:
        before = s.clone()
        setting.backend.replace_scalings_(s, total, 4, torch.tensor([True, True]), setting.context(finite=False))
        assert torch.equal(s, before)


@EACH
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_that_is_orthogonalized(setting: Setting, nesterov: bool):
    M, G, mu = randn64(K, O, I).to(setting.dtype), randn64(K, O, I, seed=1).to(setting.dtype), 0.9
    expected_M = torch.lerp(G.double(), M.double(), mu)
    expected = torch.lerp(G.double(), expected_M, mu) if nesterov else expected_M
    found = setting.backend.orthogonalized_momentum_(
        M, G, mu, nesterov, lambda X: 2 * X, setting.context(), fused=False
    )
    assert_near(M, expected_M, 1e-6)
    assert_near(found, 2 * expected, 1e-6)
