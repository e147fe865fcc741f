"""Solvers: the same training by each, what is refused and replaced, and checkpoints from one to the other."""

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
from layerwise.optim.cuda.basis import TrackedSide
from layerwise.optim.cuda.monitor import FAILED, LAG, REFUSED, SOLVED, TURNS, WANTING, InverseMonitor
from layerwise.optim.engine import Layerwise
from layerwise.optim.rule import Health
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
    """Cholesky to 1e-4 of the way, Newton to 1e-3, its factors half new at every refresh."""
    make = partial(getattr(lw.optim, name), scale="formula")
    options = {"lr": 0.02, "refresh_every": 2, "damping": 1e-2}
    expected = trained(make, solver="eigh", **options)
    assert_close(trained(make, solver="cholesky", **options), expected, 1e-4)
    assert_close(trained(make, solver="products", **options), expected, 1e-3)
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
    with pytest.raises(InputError, match=r'solver="cholesky".*\. Expected .*"products"; Cholesky gives inverses alone\.'):
        getattr(lw.optim, name)(net(), solver="cholesky", scale="formula")


def test_cholesky_of_one_side_that_is_inverted():
    lw.optim.Shampoo(net(), power=(1.0, 0.0), solver="cholesky", scale="formula")
    with pytest.raises(InputError, match="cholesky"):
        lw.optim.Layerwise(net(), left="outgrads", right="inputs", power=(1.0, 0.5), solver="cholesky")


@pytest.mark.parametrize("name", ["KFAC", "Shampoo", "SOAP", "Muon"])
def test_an_unknown_solver(name: str):
    with pytest.raises(InputError, match=r"Unknown solver='qr'\. Available: auto, cholesky, eigh, newton\."):
        getattr(lw.optim, name)(net(), solver="qr", scale="formula")


def test_auto_is_by_device_and_type():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert method("auto", 1.0, torch.float32, gpu) == method("auto", 0.25, torch.float32, gpu) == "products"
    assert method("auto", 1.0, torch.float64, gpu) == method("auto", 1.0, torch.float32, cpu) == "cholesky"
    assert method("auto", 0.5, torch.float64, gpu) == method("auto", 0.5, torch.float32, cpu) == "eigh"


# --- refusals ----------------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("size_of_change", [1.0, 1e6])
def test_a_factor_that_is_replaced_is_followed(
    size_of_change: float, every: int, sync: bool, monkeypatch: pytest.MonkeyPatch
):
    """It is counted that one refinement did not suffice; a few turns later the inverse is right again."""
    if not sync:
        monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))
    damping, size = 1e-2, 100
    model = nn.Sequential(nn.Linear(size, 6), nn.Tanh(), nn.Linear(6, 4))
    opt = lw.optim.FOOF(
        model, lr=0.0, momentum=0.0, damping=damping, refresh_every=every, solver="products", scale="formula"
    )

    def step(number: int) -> None:
        opt.zero_grad()
        x = torch.randn(400, size, generator=torch.Generator().manual_seed(number))
        model(x).square().mean().backward()
        opt.step()

    for number in range(20):
        step(number)
    before = opt.health().refusals
    assert opt._stacks is not None
    state = next(s.state for s in opt._stacks if s.state["Q"].mean.shape[-1] >= size)
    state["Q"].mean[0, : size + 1, : size + 1] = size_of_change * unrelated(size + 1)
    for number in range(20, 20 + 4 * every + LAG):
        step(number)
    assert opt.health().refusals > before
    found, truth = layers(opt, "Q_root")["0"].double(), exact(layers(opt, "Q")["0"], damping)
    # every > 1: the statistics have gone on since the last turn, by up to nine in twenty
    assert float((found - truth).norm() / truth.norm()) < (1e-2 if every == 1 else 0.6)
    assert opt.health().fallbacks == 0


def test_the_host_hears_after_its_lag():
    monitor, health = InverseMonitor.over(3, torch.device("cpu")), Health()
    assert monitor.take_exact(1, slice(0, 3), health)  # new ones are solved exactly
    monitor.verdict[1:] = torch.tensor([SOLVED, REFUSED])
    monitor.send(5, slice(1, 3))
    assert not monitor.take_exact(5 + LAG - 1, slice(0, 3), health)
    assert not monitor.take_exact(5 + LAG, slice(0, 2), health)
    assert monitor.take_exact(5 + LAG, slice(2, 3), health)
    assert not monitor.take_exact(5 + LAG, slice(2, 3), health)  # it has been
    assert (health.refusals, health.fallbacks) == (1, 0)
    assert [monitor.rounds(slice(*ends)) for ends in ((0, 2), (1, 3))] == [1, 3]
    monitor.verdict[:] = torch.tensor([WANTING + 2, FAILED, 2])
    monitor.send(8, slice(0, 3))
    monitor.poll(8 + LAG, health)
    assert (health.refusals, health.fallbacks) == (2, 1)
    assert [monitor.rounds(slice(k, k + 1)) for k in range(3)] == [2, 1, 3]
    monitor.verdict[:] = 1
    for turn in range(1, TURNS + 1):  # as many rounds as one of the last turns needed
        monitor.send(9, slice(0, 3))
        monitor.poll(9 + LAG, health)
        needed = [2 if turn < TURNS else 1, 1, [3, 2, 1][turn - 1]]
        assert [monitor.rounds(slice(k, k + 1)) for k in range(3)] == needed


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
    monkeypatch.setattr(TrackedSide, "_begin", lambda side, *rest: begun.append(side.side))
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


def test_what_does_not_converge_is_not_taken(monkeypatch: pytest.MonkeyPatch):
    """The last inverse stays, it is counted, and the next turn solves exactly."""
    model = nn.Linear(6, 4)
    opt = lw.optim.FOOF(model, lr=0.0, momentum=0.0, refresh_every=1, solver="products", scale="formula")

    def step(number: int) -> None:
        opt.zero_grad()
        model(torch.randn(50, 6, generator=torch.Generator().manual_seed(number))).square().mean().backward()
        opt.step()

    for number in range(12):
        step(number)
    before, refusals = layers(opt, "Q_root"), opt.health().refusals

    def astray(M: Any, X: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        return 100 * X, torch.full((1,), torch.inf), torch.full((1,), 2.0)

    monkeypatch.setattr("layerwise.optim.cuda.inverse.refined_inverse", astray)
    step(12)
    assert all(torch.equal(root, before[name]) for name, root in layers(opt, "Q_root").items())
    for number in range(13, 13 + LAG):
        step(number)
    assert opt.health().refusals > refusals
    found, truth = (next(iter(M.values())) for M in (layers(opt, "Q_root"), layers(opt, "Q")))
    truth = exact(truth, 0.1)
    assert float((found.double() - truth).norm() / truth.norm()) < 1e-3
