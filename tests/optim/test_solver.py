"""Solvers: the same training by each, factors that are replaced, and checkpoints from one to the other."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from optim_tools import flat
from torch import Tensor, nn

import layerwise as lw
from layerwise.foundations.errors import InputError
from layerwise.optim.engine import Layerwise
from layerwise.optim.solver import method

pytestmark = pytest.mark.usefixtures("untyped")
SIZE = 12


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, 4))


def batch(step: int, n: int = 32) -> tuple[Tensor, Tensor]:
    """A teacher's outputs with a little noise."""
    g = torch.Generator().manual_seed(step)
    x = torch.randn(n, SIZE, generator=g) * torch.linspace(0.3, 2, SIZE)
    return x, torch.sin(x[:, :4]) + 0.05 * torch.randn(n, 4, generator=g)


def train(opt: torch.optim.Optimizer, model: nn.Module, start: int, stop: int) -> list[float]:
    losses = []
    for step in range(start, stop):
        x, y = batch(step)
        opt.zero_grad()
        loss = 0.5 * (model(x) - y).square().sum() / len(x)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    return losses


def trained(make: Callable[..., torch.optim.Optimizer], steps: int = 16, **options: Any) -> Tensor:
    model = net()
    train(make(model, **options), model, 0, steps)
    return flat(model)


def assert_close(found: Tensor, expected: Tensor, tol: float) -> None:
    """Within a part of the way gone."""
    way = float((expected - flat(net())).norm())
    assert way > 1e-2
    assert float((found - expected).norm()) < tol * way


# --- the same training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["KFAC", "FOOF"])
def test_inverses_by_every_solver(name: str):
    """To 1e-4 of the way, factors half new at every refresh."""
    make = partial(getattr(lw.optim, name), scale="formula")
    options = {"lr": 0.02, "refresh_every": 2, "damping": 1e-2}
    expected = trained(make, solver="eigh", **options)
    assert_close(trained(make, solver="cholesky", **options), expected, 1e-4)
    assert_close(trained(make, solver="products", **options), expected, 1e-4)
    assert_close(trained(make, **options), expected, 1e-4)  # "auto" on a CPU


@pytest.mark.parametrize(
    ("name", "options", "tol"),
    [
        ("Shampoo", {"damping": 1e-2}, 5e-2),
        ("Shampoo", {"damping": 1e-1, "power": 0.5}, 0.2),
        ("Shampoo", {"damping": 1e-2, "power": (0.5, 0.0)}, 2e-2),
        ("EKFAC", {"damping": 1e-1}, 5e-2),
        ("EKFAC", {"damping": 1e-1, "scaling": "running"}, 5e-2),
        ("KFAC", {"damping": 1e-1, "damping_split": "exact"}, 2e-2),
    ],
)
def test_bases_by_sweeps_of_products(name: str, options: dict[str, Any], tol: float):
    """Factors of the first steps change by halves, and a few sweeps follow them only so far."""
    make = partial(getattr(lw.optim, name), scale="formula")
    expected = trained(make, lr=0.003, refresh_every=1, solver="eigh", **options)
    assert_close(trained(make, lr=0.003, refresh_every=1, solver="products", **options), expected, tol)


@pytest.mark.parametrize("every", [5])
def test_soap_trains_as_well_by_products_as_by_qr(every: int):
    """The mean loss of the last twenty of sixty steps, within five percent."""
    means = []
    for solver in ("auto", "products"):
        model = net()
        losses = train(
            lw.optim.SOAP(model, lr=0.003, refresh_every=every, solver=solver, scale="formula"), model, 0, 60
        )
        means.append(sum(losses[-20:]) / 20)
        assert means[-1] < 0.6 * losses[0]
    assert means[1] == pytest.approx(means[0], rel=5e-2)


@pytest.mark.parametrize("name", ["KFAC", "EKFAC", "FOOF", "Shampoo", "SOAP"])
def test_float64_is_kept_in_float64(name: str):
    """Pairs of float16 are for float32: products in float64 stay exact."""
    model = net().double()
    opt = getattr(lw.optim, name)(model, lr=0.01, refresh_every=1, solver="products", scale="formula")
    x, y = batch(0)
    for _ in range(12):
        opt.zero_grad()
        (model(x.double()) - y.double()).square().mean().backward()
        opt.step()
    saved = opt.state_dict()["state"].values()
    kinds = {
        v.dtype for of_param in saved for of_layer in of_param.values() for k, v in of_layer.items() if k != "fresh"
    }
    assert kinds == {torch.float64}
    assert bool(torch.isfinite(flat(model)).all())


# --- words -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Shampoo", "SOAP", "EKFAC"])
def test_cholesky_is_for_inverses(name: str):
    with pytest.raises(
        InputError, match=r'solver="cholesky".*\. Expected .*"products"; Cholesky gives inverses alone\.'
    ):
        getattr(lw.optim, name)(net(), solver="cholesky", scale="formula")


def test_cholesky_of_one_side_that_is_inverted():
    lw.optim.Shampoo(net(), power=(1.0, 0.0), solver="cholesky", scale="formula")
    with pytest.raises(InputError, match="cholesky"):
        lw.optim.Layerwise(net(), left="outgrads", right="inputs", power=(1.0, 0.5), solver="cholesky")


@pytest.mark.parametrize("name", ["KFAC", "Shampoo", "SOAP", "Muon"])
def test_an_unknown_solver(name: str):
    with pytest.raises(InputError, match=r"Unknown solver='qr'\. Available: auto, cholesky, eigh, products\."):
        getattr(lw.optim, name)(net(), solver="qr", scale="formula")


def test_auto_is_by_device_and_type():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert method("auto", 1.0, torch.float32, gpu) == method("auto", 0.25, torch.float32, gpu) == "products"
    assert method("auto", 1.0, torch.float64, gpu) == method("auto", 1.0, torch.float32, cpu) == "cholesky"
    assert method("auto", 0.5, torch.float64, gpu) == method("auto", 0.5, torch.float32, cpu) == "eigh"


# --- factors that are replaced -----------------------------------------------------------------------------


def layers(opt: torch.optim.Optimizer, of: str) -> dict[str, Tensor]:
    """One tensor of every layer's state."""
    return {
        layer: of_layer[of].clone()
        for of_param in opt.state_dict()["state"].values()
        for layer, of_layer in of_param.items()
        if of in of_layer
    }


def unrelated(n: int) -> Tensor:
    """All its directions have grown, by hundreds: nothing that a refinement could follow."""
    X = torch.randn(n, 4 * n, generator=torch.Generator().manual_seed(7))
    return 300.0 * X @ X.mT / (4 * n)


def exact(Q: Tensor, damping: float) -> Tensor:
    Q = Q.double()
    shift = damping * Q.diagonal(dim1=-2, dim2=-1).mean(-1)
    return torch.linalg.inv(Q + shift.view(-1, 1, 1) * torch.eye(Q.shape[-1], dtype=Q.dtype))


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("size_of_change", [1.0, 1e6])
def test_a_factor_that_is_replaced_has_its_inverse_at_once(
    size_of_change: float, sync: bool, monkeypatch: pytest.MonkeyPatch
):
    """Nothing of the last inverse is left, and nothing is counted."""
    if not sync:
        monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))
    damping, size = 1e-2, 100
    model = nn.Sequential(nn.Linear(size, 6), nn.Tanh(), nn.Linear(6, 4))
    opt = lw.optim.FOOF(
        model, lr=0.0, momentum=0.0, damping=damping, refresh_every=1, solver="products", scale="formula"
    )

    def step(number: int) -> None:
        opt.zero_grad()
        x = torch.randn(400, size, generator=torch.Generator().manual_seed(number))
        model(x).square().mean().backward()
        opt.step()

    for number in range(4):
        step(number)
    assert opt._stacks is not None
    state = next(s.state for s in opt._stacks if s.state["Q"].mean.shape[-1] >= size)
    state["Q"].mean[0, : size + 1, : size + 1] = size_of_change * unrelated(size + 1)
    step(4)
    found, truth = layers(opt, "Q_root")["0"].double(), exact(layers(opt, "Q")["0"], damping)
    assert float((found - truth).norm() / truth.norm()) < 1e-4
    health = opt.health()
    assert (health.fallbacks, health.refusals, health.restarts) == (0, 0, 0)


def test_the_name_of_an_earlier_version():
    with pytest.warns(DeprecationWarning, match="solver='newton' is called 'products' now"):
        opt = lw.optim.KFAC(net(), solver="newton", scale="formula")
    assert opt._how[1].solver == "products"


# --- checkpoints -------------------------------------------------------------------------------------------

RESUMED = [
    ("KFAC", {}, 1e-3),
    ("FOOF", {"nesterov": True}, 1e-3),
    ("Shampoo", {"graft": "adam"}, 2e-2),
    ("EKFAC", {"scaling": "running"}, 5e-2),
    ("SOAP", {}, 5e-2),
]


@pytest.mark.parametrize(("name", "options", "tol"), RESUMED)
@pytest.mark.parametrize(("first", "second"), [("products", "products"), ("auto", "products")], ids=lambda s: s)
def test_a_run_that_is_resumed_goes_on(name: str, options: dict[str, Any], tol: float, first: str, second: str):
    """Stopped after nine of thirteen steps, with momentum: as without a break, whichever solver goes on."""
    options = {"lr": 0.01, "refresh_every": 1, "solver": first, **options}
    make = partial(getattr(lw.optim, name), scale="formula")
    whole = trained(make, 13, **options)
    model = net()
    opt = make(model, **options)
    train(opt, model, 0, 9)
    saved, middle = copy.deepcopy(opt.state_dict()), flat(model)
    other = make(model, **{**options, "solver": second})
    other.load_state_dict(saved)
    train(other, model, 9, 13)
    assert float((flat(model) - whole).norm()) < tol * float((whole - middle).norm()) * (5 if first != second else 1)


@pytest.mark.parametrize("name", ["Shampoo", "EKFAC", "SOAP"])
def test_a_resumed_basis_is_not_begun_again(name: str, monkeypatch: pytest.MonkeyPatch):
    """It was saved with its factor: products bring it up to date, as without a break."""
    make, model = partial(getattr(lw.optim, name), scale="formula"), net()
    opt = make(model, lr=0.01, refresh_every=2, solver="products")
    train(opt, model, 0, 3)
    other = make(model, lr=0.01, refresh_every=2, solver="products")
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    begun = list[str]()
    monkeypatch.setattr("layerwise.optim.cuda.basis.TrackedSide._begin", lambda *_: begun.append("begun"))
    train(other, model, 3, 6)
    assert not begun
    assert other.health().refreshes > 0


@pytest.mark.parametrize(("name", "options", "tol"), RESUMED[:3])
@pytest.mark.parametrize(
    ("first", "second"), [("products", "products"), ("auto", "products"), ("products", "auto")], ids=lambda s: s
)
def test_momentum_is_not_lost(name: str, options: dict[str, Any], tol: float, first: str, second: str):
    make = partial(getattr(lw.optim, name), scale="formula")
    model = net()
    opt = make(model, lr=0.01, refresh_every=1, solver=first, **options)
    train(opt, model, 0, 3)
    kept = layers(opt, "momentum")
    assert kept
    other = make(model, lr=0.0, refresh_every=1, solver=second, **options)
    other.load_state_dict(opt.state_dict())
    for group in other.param_groups:
        group["momentum"], group["lr"] = 0.999999, 0.0
    x, _ = batch(0)
    other.zero_grad()
    (model(x) * 0).sum().backward()
    other.step()
    for layer, value in layers(other, "momentum").items():
        assert torch.allclose(value, kept[layer], rtol=1e-3, atol=1e-6)
