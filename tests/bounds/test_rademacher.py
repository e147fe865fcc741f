"""Complexities of linear classes and flows: bounds above values, values against all signs, contractions, margins."""

import itertools
import math

import pytest
import torch

import layerwise as lw
from error_sentences import WORDED
from layerwise import bounds
from layerwise.foundations.errors import InputError


def kernel(seed: int, n: int, rank: int = 3) -> torch.Tensor:
    Phi = torch.randn(n, rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Phi @ Phi.T


def over_all_signs(kernels, radii) -> float:
    n = len(kernels[0])
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=n)), dtype=torch.float64)
    total = sum(m * ((s @ K) @ s).clamp_min(0).sqrt() for s in signs for K, m in zip(kernels, radii, strict=True))
    return float(total) / len(signs) / n


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_is_above_the_value(seed):
    K = kernel(seed, 8)
    exact, bound = over_all_signs([K], [1.7]), bounds.rademacher_bound(K, 1.7)
    found = bounds.rademacher(K, 1.7, draws=20_000, seed=seed)
    assert abs(found.value - exact) < 5 * found.standard_error
    assert exact <= bound <= 2**0.5 * exact  # Khintchine: Jensen loses at most √2
    assert bound == pytest.approx(1.7 / 8 * float(K.trace()) ** 0.5)


def test_the_value_is_the_supremum():
    """Over a sphere of weights, for one draw after the other."""
    rng = torch.Generator().manual_seed(0)
    Phi, A = (torch.randn(*shape, generator=rng, dtype=torch.float64) for shape in ((5, 3), (3, 3)))
    K = bounds.rescaled_kernel(Phi, A)
    torch.testing.assert_close(K, Phi @ torch.linalg.inv(A @ A.T) @ Phi.T)
    w = torch.randn(200_000, 3, generator=rng, dtype=torch.float64)
    w = w / (w @ A).norm(dim=1, keepdim=True)  # ‖w‖_A = 1
    for _ in range(5):
        s = torch.randint(2, (5,), generator=rng).double() * 2 - 1
        best, formula = float((w @ Phi.T @ s).max()), float((s @ K @ s).sqrt())
        assert best <= formula + 1e-9
        assert best > 0.99 * formula


def test_flows():
    kernels, radii = [kernel(s, 7) for s in range(3)], [0.5, 1.0, 0.2]
    exact, found = over_all_signs(kernels, radii), bounds.flow_rademacher(kernels, radii, draws=20_000)
    bound = bounds.flow_rademacher_bound(kernels, radii)
    assert abs(found.value - exact) < 5 * found.standard_error
    assert exact <= bound
    assert bound == pytest.approx(sum(m / 7 * float(K.trace()) ** 0.5 for K, m in zip(kernels, radii, strict=True)))


def test_kernels_of_models():
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    x = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    K = lw.ntk(model, x)
    trace = float(lw.jacobian(model, x).to_dense().square().sum())
    assert bounds.multiclass_bound(K, 2.0, margin=0.5) == pytest.approx(3**1.5 * 2 / (0.5 * 10) * trace**0.5, rel=1e-5)
    one = lw.ntk(model, x, outputs=0)
    per_class = [bounds.rademacher_bound(lw.ntk(model, x, outputs=c), 2.0) for c in range(3)]
    assert bounds.rademacher_bound(one, 2.0) == pytest.approx(bounds.rademacher_bound(one.matrix(), 2.0), rel=1e-5)
    assert bounds.multiclass_contraction(per_class, 0.5) <= bounds.multiclass_bound(K, 2.0, margin=0.5) * (1 + 1e-5)
    with pytest.raises(InputError, match="one scalar function"):
        bounds.rademacher_bound(K, 2.0)


def test_margins_and_losses():
    f = torch.tensor([[2.0, 0.5, 1.0], [1.0, 3.0, 0.0], [0.0, 0.2, 0.1]])
    y = torch.tensor([0, 0, 1])
    torch.testing.assert_close(bounds.margins(f, y), torch.tensor([1.0, -2.0, 0.1]))
    assert bounds.margin_loss(f, y, gamma=2.0) == pytest.approx((0.5 + 1 + 0.95) / 3)
    assert bounds.margin_loss(f, y, gamma=1e-6) == pytest.approx(1 / 3)  # the share of errors
    u = torch.linspace(-1, 3, 100)
    phi = bounds.ramp(u, gamma=2.0)
    assert float((phi[1:] - phi[:-1]).abs().max()) <= float(u[1] - u[0]) / 2 + 1e-6  # 1/γ-Lipschitz
    assert float(phi[0]) == 1
    assert float(phi[-1]) == 0
    assert bounds.margins(torch.tensor([[1.0], [2.0]]), torch.tensor([-1, 1])).tolist() == [-1, 2]
    assert bounds.margin_percentile(f, y, percent=50) == pytest.approx(0.1)
    assert bounds.binary_contraction(3.0, gamma=1.5) == 2


def test_the_generalization_bound_holds_for_a_linear_class():
    """Error on fresh data below the bound, in many draws of 60 examples in 2 dimensions."""
    rng = torch.Generator().manual_seed(0)
    direction = torch.tensor([1.0, 0.5])
    fresh = torch.randn(20_000, 2, generator=rng)
    for _ in range(20):
        x = torch.randn(60, 2, generator=rng)
        y = torch.sign(x @ direction + 0.3 * torch.randn(60, generator=rng))
        w = torch.linalg.lstsq(x, y[:, None]).solution.squeeze(1)
        complexity = bounds.rademacher_bound(x @ x.T, float(w.norm()))
        bound = bounds.generalization_bound(
            bounds.margin_loss(x @ w, y, 0.5), bounds.binary_contraction(complexity, 0.5), len(x)
        )
        assert float((torch.sign(fresh @ w) != torch.sign(fresh @ direction)).float().mean()) <= bound
    assert bounds.generalization_bound(0.1, 0.2, 50, 0.1) == pytest.approx(0.5 + 3 * math.sqrt(math.log(20) / 100))


@pytest.mark.parametrize("seed", range(3))
def test_the_optimal_rescaling_is_a_minimum(seed):
    rng = torch.Generator().manual_seed(seed)
    Phi, y = torch.randn(5, 8, generator=rng, dtype=torch.float64), torch.randn(5, generator=rng, dtype=torch.float64)
    K = Phi @ Phi.T
    found = bounds.optimal_rescaling(K, y)
    w = Phi.T @ torch.linalg.solve(K, y)
    _, _, Vt = torch.linalg.svd(Phi, full_matrices=False)
    Vt = Vt.flip(0)  # ascending

    def bound(nu: torch.Tensor) -> float:
        norm = ((Vt @ w).square() * nu).sum().sqrt()
        trace = (found.eigenvalues / nu).sum()
        return float(norm * trace.sqrt() / 5)

    assert bound(torch.ones(5, dtype=torch.float64)) == pytest.approx(float(found.bound), rel=1e-8)
    assert bound(found.scales) == pytest.approx(float(found.optimal_bound), rel=1e-8)
    for _ in range(50):
        other = found.scales * (0.3 * torch.randn(5, generator=rng, dtype=torch.float64)).exp()
        assert bound(other) >= float(found.optimal_bound) - 1e-12
    assert float(found.optimal_bound) <= float(found.bound)
    both = bounds.optimal_rescaling(torch.stack([K, 2 * K]), torch.stack([y, y]))
    torch.testing.assert_close(both.optimal_bound, found.optimal_bound.expand(2))


def test_modes_of_eigenvalue_zero_are_left_out():
    K = torch.diag(torch.tensor([4.0, 1.0, 0.0], dtype=torch.float64))
    found = bounds.optimal_rescaling(K, torch.tensor([2.0, 3.0, 7.0], dtype=torch.float64))
    assert float(found.optimal_bound) == pytest.approx(5 / 3)
    assert float(found.bound) == pytest.approx((10 * 5) ** 0.5 / 3)


def test_random_state_is_left_alone():
    before = torch.get_rng_state()
    bounds.rademacher(kernel(0, 5), 1.0, draws=10)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "call",
    [
        lambda: bounds.rademacher_bound(torch.ones(2, 3), 1.0),
        lambda: bounds.rademacher_bound(torch.eye(3), -1.0),
        lambda: bounds.rademacher(torch.eye(3), 1.0, draws=1),
        lambda: bounds.flow_rademacher_bound([torch.eye(3), torch.eye(4)], [1.0, 1.0]),
        lambda: bounds.flow_rademacher_bound([torch.eye(3)], [1.0, 1.0]),
        lambda: bounds.multiclass_bound(torch.eye(10), 1.0, margin=1.0, classes=3),
        lambda: bounds.multiclass_bound(torch.eye(10), 1.0, margin=0.0, classes=2),
        lambda: bounds.margins(torch.ones(3), torch.tensor([0, 1, 1])),
        lambda: bounds.margins(torch.ones(3, 2), torch.tensor([0, 1, 2])),
        lambda: bounds.ramp(torch.ones(3), gamma=0.0),
        lambda: bounds.margin_percentile(torch.ones(3), torch.ones(3), percent=101),
        lambda: bounds.generalization_bound(0.1, 0.1, 10, delta=0.0),
        lambda: bounds.optimal_rescaling(torch.eye(3), torch.ones(4)),
        lambda: bounds.optimal_rescaling(torch.eye(3), torch.tensor([1.0, math.nan, 1.0])),
    ],
)
def test_bad_input(call):
    with pytest.raises(InputError, match=WORDED):
        call()


def test_a_kernel_in_single_precision_has_the_modes_of_its_rank():
    generator = torch.Generator().manual_seed(0)
    Phi = torch.randn(50, 10, generator=generator, dtype=torch.float64)
    y = torch.sign(Phi @ torch.randn(10, generator=generator, dtype=torch.float64))
    exact, rounded = (bounds.optimal_rescaling((Phi @ Phi.T).to(kind), y.to(kind)) for kind in (y.dtype, torch.float32))
    assert float(rounded.bound) == pytest.approx(float(exact.bound), rel=1e-3)


def test_labels_in_a_column():
    f, y = torch.tensor([[0.5], [2.0], [-1.0]]), torch.tensor([[1.0], [-1.0], [1.0]])
    assert bounds.margins(f, y).tolist() == [0.5, -2.0, -1.0]
    with pytest.raises(InputError, match="one label an example"):
        bounds.margins(f, y[:2])
