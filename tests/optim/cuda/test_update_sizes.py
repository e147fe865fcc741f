"""``scale="adam"`` without a pass of its own: the ratio of norms is one more scale, and Adam's step is not written."""

import copy
from typing import Any

import pytest
import torch
from gpu_objects import FALSE, TRUE
from optim_tools import flat
from torch import Tensor, nn

import layerwise as lw
from layerwise.optim.backend import Backend, norms
from layerwise.optim.cuda.backend import CudaBackend
from layerwise.optim.cuda.device_step import DeviceStep
from layerwise.optim.cuda.executor import AsynchronousExecutor
from layerwise.optim.cuda.scaled import Scaled, unscaled
from layerwise.optim.engine import Layerwise
from layerwise.optim.rule import Context
from layerwise.optim.step.update import MOST_CHANGE, Part, weight_norms
from random_tensors import randn

pytestmark = pytest.mark.usefixtures("untyped")
MEMBERS: dict[str, dict[str, Any]] = {
    "KFAC": {"estimator": "empirical", "solver": "products", "refresh_every": 1},
    "EKFAC": {"estimator": "empirical", "scaling": "running", "solver": "products", "refresh_every": 1},
    "FOOF": {"solver": "products", "refresh_every": 1},
    "Shampoo": {"solver": "products", "refresh_every": 1},
    "Muon": {},
}


def net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def train(opt: Layerwise, model: nn.Module, steps: range) -> None:
    for step in steps:
        opt.zero_grad()
        (model(randn(16, 6, seed=step)) - randn(16, 3, seed=100 + step)).square().mean().backward()
        opt.step()


def asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))


@pytest.mark.parametrize("scaling", ["running", "none"])
@pytest.mark.parametrize(("nesterov", "dtype"), [(False, torch.float32), (True, torch.float32), (False, torch.float64)])
def test_an_average_in_a_basis_that_turns(
    nesterov: bool, dtype: torch.dtype, scaling: str, monkeypatch: pytest.MonkeyPatch
):
    """EKFAC's, in halves: out of the basis it is the average of all gradients, whatever the basis has become."""
    asynchronous(monkeypatch)
    model = net().to(dtype)
    how: dict[str, Any] = {"scaling": scaling, "solver": "products", "refresh_every": 2, "estimator": "empirical"}
    opt = lw.optim.EKFAC(model, lr=3e-3, nesterov=nesterov, **how)
    averages = [torch.zeros_like(p) for p in model.parameters()]
    for step in range(8):
        x, y = randn(16, 6, seed=step).to(dtype), randn(16, 3, seed=100 + step).to(dtype)
        opt.zero_grad()
        (model(x) - y).square().mean().backward()
        for p, average in zip(model.parameters(), averages, strict=True):
            average.lerp_(p.grad, 0.1)  # type: ignore[arg-type]
        opt.step()
    checked = 0
    for p, expected in zip(model.parameters(), averages, strict=True):
        ((_, state),) = opt.state[p].items()
        if "M" in state:
            found = (state["U_P"] @ state["M"] @ state["U_Q"].mT)[0]
            error = float((found - expected).norm() / expected.norm())
            assert error < (3e-3 if dtype == torch.float32 else 1e-4), "as orthogonal as sweeps leave it"
            assert float((state["M"][0] - expected).norm() / expected.norm()) > 0.1
            checked += 1
    assert checked == 3


@pytest.mark.parametrize("lr", [3e-3, 3.0])  # at the second the change of weights is bounded
@pytest.mark.parametrize("name", MEMBERS)
def test_the_norm_is_that_of_adam(name: str, lr: float, monkeypatch: pytest.MonkeyPatch):
    """Of every matrix; and its direction is the rule's."""
    asynchronous(monkeypatch)
    model = net()
    opt = getattr(lw.optim, name)(model, lr=3e-3, scale="adam", **MEMBERS[name])
    train(opt, model, range(3))
    executor, checked = opt._executor, 0
    assert isinstance(executor, AsynchronousExecutor)
    for stack in opt._stacks or []:
        if not executor.size.sets(stack):
            continue
        grad, context = stack.gradient()[0], opt._context(stack, 1)
        context.device_step, context.gradient = DeviceStep(TRUE, grad), grad
        context.lr = lr
        kept = copy.deepcopy(stack.state)
        D, wanted = executor.size.unsized(stack, grad, context)
        direction = unscaled(D).clone()
        stack.state = kept
        found = executor._of_adams_size(Part(stack, context, grad, [True] * len(stack.specs), grad))
        assert isinstance(found, Scaled)
        value = unscaled(found)
        most = MOST_CHANGE * weight_norms(stack).clamp_min((stack.shape.own_outputs / 3) ** 0.5) / lr
        expected = torch.minimum(wanted, most)
        assert bool((wanted < most if lr < 1 else wanted > most).all())
        torch.testing.assert_close(norms(value), expected, rtol=1e-4, atol=0)
        cosine = (value * direction).flatten(1).sum(1) / norms(value) / norms(direction)
        torch.testing.assert_close(cosine, torch.ones_like(cosine), rtol=1e-4, atol=0)
        checked += 1
    assert checked >= 2


@pytest.mark.parametrize("name", ["FOOF", "Shampoo", "Muon"])  # whose statistics do not wait for the loss's scale
def test_steps_are_those_of_a_cpu(name: str, monkeypatch: pytest.MonkeyPatch):
    ends = []
    for eager in (True, False):
        if not eager:
            asynchronous(monkeypatch)
        model = net()
        opt = getattr(lw.optim, name)(model, lr=3e-3, scale="adam", weight_decay=0.1, **MEMBERS[name])
        train(opt, model, range(5))
        ends.append(flat(model))
    way = float((ends[0] - flat(net())).norm())
    tolerance = 2e-2 if name == "Muon" else 1e-3  # orthogonalized in bfloat16
    assert float((ends[1] - ends[0]).norm()) < tolerance * way


def test_a_gradient_of_zeros_moves_nothing(monkeypatch: pytest.MonkeyPatch):
    """Zero over zero is no update, on this way too."""
    asynchronous(monkeypatch)
    model = net()
    opt = lw.optim.Shampoo(model, lr=3e-3, scale="adam", solver="products", weight_decay=0.0)
    train(opt, model, range(2))
    fresh = net()
    opt = lw.optim.Shampoo(fresh, lr=3e-3, scale="adam", solver="products", weight_decay=0.0)
    for p in fresh.parameters():
        p.grad = torch.zeros_like(p)
    opt.step()
    assert torch.equal(flat(fresh), flat(net()))


# --- norms of Adam's step by the backend ----------------------------------------------------------------------------


@pytest.mark.parametrize("all_finite", [None, TRUE, FALSE], ids=["host", "open", "shut"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("transposed", [False, True])
def test_norms_are_those_of_the_step(transposed: bool, dtype: torch.dtype, all_finite: Tensor | None):
    """Moments and counts move as by `adam_`, whatever the order in memory."""
    backend = CudaBackend()
    step = None if all_finite is None else DeviceStep(all_finite)
    context = Context(1, 0.1, 0.0, True, {}, backend, device_step=step)
    states = [{"m": torch.zeros(3, 5, 7, dtype=dtype), "v": torch.zeros(3, 5, 7, dtype=dtype)} for _ in range(2)]
    for state in states:
        state["steps"] = torch.zeros(3, dtype=dtype)
    for seed in range(3):
        grad = randn(3, 7, 5, seed=seed, dtype=dtype).mT if transposed else randn(3, 5, 7, seed=seed, dtype=dtype)
        if all_finite is FALSE:
            grad = torch.zeros_like(grad)  # as it is gathered
        given = (grad, (0.9, 0.99), 1e-8, context)
        written = backend.adam_(states[0], *given)
        found = backend.adam_norms_(states[1], *given)
        plain = Backend.adam_norms_(backend, {k: X.clone() for k, X in states[1].items()}, *given)
        assert found.shape == plain.shape == (3,)
        torch.testing.assert_close(found, norms(written), rtol=1e-5, atol=0)
        for name in ("m", "v", "steps"):
            assert torch.equal(states[0][name], states[1][name])
    assert bool((found > 0).all()) == (all_finite is not FALSE)
    assert states[1]["steps"].tolist() == [0.0 if all_finite is FALSE else 3.0] * 3
