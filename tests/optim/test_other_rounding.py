"""Steps do not depend on the processor: gradients without full rank, under another order of sums and other bases.

What differs from one BLAS or LAPACK to the next is made by `rounding.OtherOrder`. A null space has many bases, and a
gradient's part in it is rounding; neither may show in a step. Singular values of the first gradients lie well above
√ε of the largest, or at zero: between the two a factor, which is made of squares, does not determine its vectors.
"""

import contextlib
from collections.abc import Callable

import pytest
import torch
from optim_tools import flat
from torch import Tensor, nn

import layerwise as lw
from layerwise.foundations.linalg import guarded_eigh, settled_eigh
from layerwise.optim.cuda.elementwise import rotated_adam_
from layerwise.optim.engine import Layerwise
from rounding import OtherOrder

pytestmark = pytest.mark.usefixtures("untyped")
STEPS = 4


def dead() -> nn.Module:
    """Hidden units that never fire; `few` gives it inputs that are always 0, and one that is always 1."""
    model = nn.Sequential(nn.Linear(9, 6), nn.ReLU(), nn.Linear(6, 4))
    with torch.no_grad():
        model[0].bias[:2] = -100
        model[0].bias[2:] = 1
    return model


def few(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    x = torch.randn(3, 9, generator=g)
    x[:, 5:] = 0
    x[:, 0] = 1
    return x, torch.randn(3, 4, generator=g)


def patches() -> nn.Module:
    """Kernels much wider than high: the first gradient has a rank of 4 in 18 columns."""
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))


def images(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(6, 2, 4, 4, generator=g), torch.randn(6, 3, generator=g)


PROBLEMS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]]]] = {
    "dead units, few examples": (dead, few),
    "wide kernels": (patches, images),
}
MEMBERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SOAP": lambda m: lw.optim.SOAP(m, lr=0.01, refresh_every=2, scale="formula"),
    "SOAP from the first step": lambda m: lw.optim.SOAP(m, lr=0.01, refresh_every=2, skip_first=False, scale="formula"),
    "Shampoo": lambda m: lw.optim.Shampoo(m, lr=0.01, refresh_every=2, scale="formula"),
    "EKFAC": lambda m: lw.optim.EKFAC(m, lr=0.01, refresh_every=2, scale="formula"),
    "EKFAC running": lambda m: lw.optim.EKFAC(m, lr=0.01, refresh_every=2, scaling="running", scale="formula"),
}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def way(problem: str, member: str, dtype: torch.dtype, seed: int) -> Tensor:
    """What a few steps change, on one machine."""
    make, data = PROBLEMS[problem]
    model = seeded(make).to(dtype)
    start, opt = flat(model), MEMBERS[member](model)
    with OtherOrder(seed) if seed else contextlib.nullcontext():
        for step in range(STEPS):
            x, y = (z.to(dtype) for z in data(step))
            opt.zero_grad()
            (0.5 * (model(x) - y).square().sum() / len(x)).backward()
            opt.step()
    return flat(model) - start


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("waits", [True, False])
def test_steps_on_other_machines(member: str, problem: str, waits: bool, monkeypatch: pytest.MonkeyPatch):
    """To rounding times the condition of the factors, 1e6 at most."""
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: waits))
    here = way(problem, member, torch.float64, 0)
    for seed in (1, 2):
        there = way(problem, member, torch.float64, seed)
        assert float((there - here).norm()) < 1e6 * torch.finfo(torch.float64).eps * float(here.norm())


@pytest.mark.parametrize("problem", PROBLEMS)
def test_soap_in_single_precision(problem: str):
    """Where rounding is larger than Adam's own ε of 1e-8, which hides it in float64."""
    here = way(problem, "SOAP", torch.float32, 0)
    for seed in (1, 2):
        assert float((way(problem, "SOAP", torch.float32, seed) - here).norm()) < 1e-2 * float(here.norm())


def test_no_step_where_there_is_no_gradient():
    """Gradients ``L C Rᵀ`` with fixed L and R of rank 4, in float32, where products leave some 1e-7 outside of both."""
    model, g = nn.Linear(9, 6, bias=False), torch.Generator().manual_seed(0)
    L, R = (torch.linalg.qr(torch.randn(n, n, generator=g))[0] for n in (6, 9))
    opt = lw.optim.SOAP(model, lr=0.01, refresh_every=2, scale="formula")
    start = model.weight.detach().clone()
    for _ in range(6):
        C = torch.randn(4, 4, generator=g) + 4 * torch.eye(4)
        opt.zero_grad()
        (model.weight * (100 * L[:, :4] @ C @ R[:, :4].T)).sum().backward()
        opt.step()
    moved = L.T @ (model.weight.detach() - start) @ R
    assert float(moved[:4, :4].abs().max()) > 1e-2
    assert float(moved[4:].abs().max()) < 1e-6
    assert float(moved[:, 4:].abs().max()) < 1e-6


def test_a_null_space_has_one_basis():
    g = torch.Generator().manual_seed(0)
    X = torch.randn(3, 4, 10, generator=g, dtype=torch.float64)
    X[1, :, 6:] = 0
    X[2] = 0
    M = X.mT @ X
    values, vectors = settled_eigh(M)
    assert torch.allclose(vectors * values.unsqueeze(-2) @ vectors.mT, M, atol=1e-12)
    assert torch.allclose(vectors.mT @ vectors, torch.eye(10, dtype=M.dtype).expand(3, 10, 10), atol=1e-12)
    with OtherOrder(1):
        others, plain = settled_eigh(M)[1], guarded_eigh(M)[1]
    assert torch.allclose(others.abs(), vectors.abs(), atol=1e-10)
    assert not torch.allclose(plain.abs(), vectors.abs(), atol=1e-2)
    assert torch.allclose(vectors[2].abs(), torch.eye(10, dtype=M.dtype))


def test_a_floor_of_second_moments():
    """``max(0, 1 − floor/V)`` times the step; without a floor, and with one of zero, the step as it is."""
    R = torch.tensor([1e-7, 1e-3, 1.0, 0.0]).view(1, 2, 2)
    c = torch.tensor([0.5])
    options = {"beta1": 0.5, "beta2": 0.5, "eps": 1e-12, "correction1": c, "correction2": c}
    steps = [
        rotated_adam_(torch.zeros_like(R), torch.zeros_like(R), R, floor=floor, **options).flatten()
        for floor in (None, torch.zeros(1), torch.tensor([0.5e-12]))
    ]
    assert torch.equal(steps[0], steps[1])
    assert torch.allclose(steps[2], torch.tensor([0.0, 1 - 1e-6, 1.0, 0.0]), atol=1e-7)
