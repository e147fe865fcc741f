"""Packed factors: every member takes the steps that it takes with whole ones, and saves and reports the same."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.optim.cuda import backend, factor
from layerwise.optim.cuda.linalg.packed import is_packed, pack, unpack
from layerwise.optim.cuda.rows import Rows, average_rows_, together
from layerwise.optim.engine import Layerwise
from layerwise.optim.rule import Context, Shape
from random_tensors import randn

Make = Callable[[nn.Module], Layerwise]
MEMBERS: dict[str, Make] = {
    "KFAC": lambda m: lw.optim.KFAC(m, lr=0.05, solver="products", refresh_every=1, scale="formula"),
    "EKFAC": lambda m: lw.optim.EKFAC(
        m, lr=0.05, solver="products", refresh_every=1, scaling="running", scale="formula"
    ),
    "FOOF": lambda m: lw.optim.FOOF(m, lr=0.05, solver="products", refresh_every=1, scale="formula"),
    "LocoProp": lambda m: lw.optim.LocoProp(m, lr=0.05, solver="products", refresh_every=1),
    "Shampoo": lambda m: lw.optim.Shampoo(m, lr=0.05, solver="products", refresh_every=2, scale="formula"),
    "Shampoo, sums": lambda m: lw.optim.Shampoo(
        m, lr=0.05, solver="products", accumulate_factors=True, refresh_every=2, scale="formula"
    ),
    "SOAP": lambda m: lw.optim.SOAP(m, lr=0.05, solver="products", refresh_every=2, scale="formula"),
}
STEPS = 10
"""More than those whose inverses are exact."""


def trained(make: Make) -> tuple[Layerwise, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Linear(20, 6)  # 21 columns: padded to 32, three tiles
    opt = make(model)
    for step in range(STEPS):
        opt.zero_grad()
        (model(randn(12, 20, seed=step)) - randn(12, 6, seed=99)).square().sum().div(24).backward()
        opt.step()
    return opt, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    monkeypatch.setattr(backend, "PAD_TO", {"cpu": 16})
    return lambda on: monkeypatch.setattr(factor, "packs", lambda shape, size: on)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(("name", "sync"), [(name, name not in ("KFAC", "Shampoo", "SOAP")) for name in MEMBERS])
def test_steps_are_the_same(name: str, sync: bool, packing: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch):
    """Eager, and asynchronous as on a GPU."""
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: sync))
    found = []
    for on in (False, True):
        packing(on)
        found.append(trained(MEMBERS[name]))
    (plain, end), (packed, same) = found
    (state,) = [s.state for s in packed._stacks or [] if "Q" in s.state]
    assert all(is_packed(state[side].mean) for side in ("P", "Q") if side in state)
    # Means of diagonals are summed in another order.
    torch.testing.assert_close(same, end, rtol=1e-5, atol=1e-6)
    reports = [opt.health() for opt in (plain, packed)]
    assert reports[1].condition == pytest.approx(reports[0].condition, rel=1e-5)
    assert reports[1].damping == pytest.approx(reports[0].damping, rel=1e-5)
    assert (reports[1].refusals, reports[1].fallbacks) == (reports[0].refusals, reports[0].fallbacks)
    saved = [next(iter(next(iter(opt.state_dict()["state"].values())).values())) for opt in (plain, packed)]
    assert saved[1].keys() == saved[0].keys()
    for key in saved[0]:
        torch.testing.assert_close(saved[1][key], saved[0][key], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("untyped")
def test_locoprop_by_products_is_locoprop():
    """Its inverse is kept in split fp16 there, though it is not refined."""
    ends = [trained(lambda m, s=s: lw.optim.LocoProp(m, lr=0.05, solver=s))[1] for s in ("cholesky", "products")]
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("untyped")
def test_the_model_of_the_loss_is_the_same(packing: Callable[[bool], None]):
    found = []
    for on in (False, True):
        packing(on)
        opt, _ = trained(MEMBERS["KFAC"])
        (treated,) = [s for s in opt._stacks or [] if "P" in s.state]
        D = randn(1, 16, 32, seed=3)
        found.append(opt.rule.quadratic(treated.state, D))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("bias", [False, True])
def test_rows_are_averaged_into_packed_means(bias: bool):
    X = [randn(40, 16, seed=k).bfloat16() for k in range(2)]
    rows = together([Rows(x, torch.bfloat16, 1.0, bias) for x in X], [40, 40])
    assert rows is not None
    M = randn(2, 32, 40, seed=5)
    whole = M @ M.mT
    packed, counts = pack(whole), [torch.ones(2), torch.ones(2)]
    for mean, count in zip((whole, packed), counts, strict=True):
        average_rows_(mean, count, rows, 0.9, Context(1, 0.0, 0.0, True, {}))
    torch.testing.assert_close(unpack(packed), whole, rtol=1e-6, atol=1e-6)
    assert torch.equal(*counts)


def test_what_is_packed():
    shape = Shape(2, 512, 520, torch.float32, torch.device("cpu"))
    assert not factor.packs(shape, 512)  # no kernels there
    M = randn(2, 32, 40, seed=6)
    whole = M @ M.mT
    whole = (whole + whole.mT) / 2  # a product's two halves may be rounded differently
    for of in (factor.size, factor.diagonal, factor.whole):
        found, expected = of(pack(whole)), of(whole)
        assert found == expected if isinstance(found, int) else torch.equal(found, expected)
    packed = pack(torch.zeros(2, 32, 32))
    factor.put_(packed, whole)
    assert torch.equal(unpack(packed), (whole.tril() + whole.tril(-1).mT))
