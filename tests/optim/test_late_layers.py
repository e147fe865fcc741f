"""Layers whose first gradient comes late, as in gradual unfreezing: they begin then, beside others or by themselves."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.optim.engine import Layerwise
from layerwise.optim.step.stack import Stack

WIDTH, LATE, EVERY = 24, 5, 20
MEMBERS: dict[str, Callable[..., Layerwise]] = {
    "KFAC": partial(lw.optim.KFAC, likelihood="categorical"),
    "EKFAC": partial(lw.optim.EKFAC, likelihood="categorical"),
    "FOOF": lw.optim.FOOF,
    "Shampoo": lw.optim.Shampoo,
    "SOAP": lw.optim.SOAP,
}


@pytest.fixture(params=["eager", "asynchronous"], autouse=True)
def executor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As on a CPU and as on a GPU."""
    if request.param == "asynchronous":
        monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))
    return request.param


class Run:
    """A network of three equal layers and a head, some of them without gradients."""

    def __init__(self, member: str, **options: Any) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh()] * 3
        self.model = nn.Sequential(*[type(m)(WIDTH, WIDTH) if isinstance(m, nn.Linear) else m for m in layers])
        self.model.append(nn.Linear(WIDTH, 5))
        self.opt = MEMBERS[member](self.model, lr=1e-2, refresh_every=EVERY, **options)
        self.generator = torch.Generator().manual_seed(1)

    def steps(self, count: int, without: tuple[str, ...] = ()) -> "Run":
        for _ in range(count):
            x = torch.randn(64, WIDTH, generator=self.generator)
            y = torch.randint(5, (64,), generator=self.generator)
            self.opt.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            for name in without:
                for p in self.model.get_submodule(name).parameters():
                    p.grad = None
            self.opt.step()
        return self

    def of(self, layer: str) -> tuple[Stack, slice]:
        """The stack of a layer's weight, and its place there."""
        for stack in self.opt._stacks or []:
            for spec, groups in stack.layers:
                if f"{layer}.weight" in spec.parameters:
                    return stack, groups
        raise AssertionError(layer)

    def fresh(self, layer: str) -> bool:
        """Whether it has a decomposition; host and state agree."""
        stack, groups = self.of(layer)
        assert stack.memory["fresh"] == [bool(on) for on in stack.state["fresh"].tolist()]
        return all(stack.memory["fresh"][groups])

    def weight(self, layer: str) -> Tensor:
        return self.model.get_parameter(f"{layer}.weight").detach().clone()


@pytest.mark.parametrize("member", MEMBERS)
def test_a_layer_that_begins_beside_others(member: str):
    run = Run(member).steps(LATE, without=("2",))
    before = run.weight("2")
    assert torch.equal(before, Run(member).weight("2"))
    assert run.fresh("0")
    assert not run.fresh("2")
    run.steps(1 + (member == "SOAP"))  # whose factors are updated after the direction
    assert run.fresh("2")
    assert not torch.equal(run.weight("2"), before)


def test_the_basis_is_that_of_the_first_factors():
    """Not the identity, nor what one iteration makes of it."""
    run = Run("SOAP").steps(LATE, without=("2",)).steps(2)
    stack, groups = run.of("2")
    saved, factor = stack.state["basis"].saved(groups), stack.state["P"].dense(groups)[0]
    U = saved["U_P"][0].to(factor)
    rotated = U.mT @ factor @ U
    off = rotated - torch.diag(rotated.diagonal())
    assert float(off.norm()) < 0.3 * float(rotated.norm())
    identity = factor - torch.diag(factor.diagonal())
    assert float(off.norm()) < 0.7 * float(identity.norm())


def test_layers_that_begin_by_themselves_do_so_as_at_a_first_step():
    """The head is a stack of its own: SOAP takes no step with its first gradient, which makes the basis."""
    run = Run("SOAP").steps(LATE, without=("6",))
    before = run.weight("6")
    run.steps(1)
    assert torch.equal(run.weight("6"), before)
    assert bool((run.of("6")[0].state["begun"] == 1).all())
    run.steps(1)
    assert run.fresh("6")
    assert not torch.equal(run.weight("6"), before)
