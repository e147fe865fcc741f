"""A side beyond `max_factor` has no factor, and no moment of it is formed on the way: a head of 50,000 classes has none
of 10 GB."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import layerwise as lw
from layerwise.distributed.processes import Processes
from layerwise.optim.cuda import rows
from layerwise.optim.engine import Layerwise

pytestmark = [
    pytest.mark.usefixtures("untyped"),
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),  # a CPU without bfloat16: torch goes on
    pytest.mark.filterwarnings("ignore:.*get the fallback's update"),  # EKFAC needs both sides
]

WIDTH, LONG, LIMIT = 16, 512, 64
"""A moment of the long side would have 512² entries, the weight itself has 16 · 512."""


class Largest(TorchDispatchMode):
    """The most entries of any tensor that torch makes within a ``with``."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operation(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.entries = max([self.entries, *sizes])
        return out


class WithHead(nn.Module):
    """Inputs that need a gradient, so that none is the user's own, and a head with as many classes as a vocabulary."""

    def __init__(self, wide: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(8, WIDTH)
        self.wide = nn.Linear(LONG, WIDTH) if wide else None
        self.head = nn.Linear(WIDTH, WIDTH if wide else LONG)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        if self.wide is not None:  # a long input, as of flattened images
            h = torch.tanh(self.wide(h.repeat(1, LONG // WIDTH)))
        return self.head(h)


def step(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    opt.zero_grad()
    F.cross_entropy(model(x), torch.arange(4) % WIDTH).backward()
    opt.step()


MEMBERS = {
    "KFAC": lambda model: lw.optim.KFAC(model, max_factor=LIMIT),
    "KFAC, drawn labels": lambda model: lw.optim.KFAC(model, max_factor=LIMIT, likelihood="categorical"),
    "KFAC, reduced": lambda model: lw.optim.KFAC(model, max_factor=LIMIT, sharing="reduce"),
    "KFAC, formula": lambda model: lw.optim.KFAC(model, max_factor=LIMIT, scale="formula"),
    "EKFAC": lambda model: lw.optim.EKFAC(model, max_factor=LIMIT, likelihood="categorical"),
    "FOOF": lambda model: lw.optim.FOOF(model, max_factor=LIMIT),
    "Shampoo": lambda model: lw.optim.Shampoo(model, max_factor=LIMIT),
    "SOAP": lambda model: lw.optim.SOAP(model, max_factor=LIMIT),
    "MahalanobisSpectral": lambda model: lw.optim.MahalanobisSpectral(model, max_factor=LIMIT),
}


@pytest.mark.parametrize("wide", [False, True], ids=["long outputs", "long inputs"])
@pytest.mark.parametrize("member", MEMBERS)
def test_no_member_forms_the_moment_of_a_long_side(member: str, wide: bool):
    torch.manual_seed(0)
    model = WithHead(wide)
    opt = MEMBERS[member](model)
    before = [p.detach().clone() for p in model.parameters()]
    with Largest() as seen:
        for _ in range(2):
            step(model, opt)
    assert WIDTH * LONG <= seen.entries < 8 * WIDTH * LONG < LONG**2
    assert all(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("over", [1, 2])
def test_rows_that_wait_for_the_step(over: int, monkeypatch: pytest.MonkeyPatch):
    """As on a GPU in half precision: those of the long side are not even kept."""
    monkeypatch.setattr(rows, "waits_for_step", rows.has_plain_rows)
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))
    torch.manual_seed(0)
    model = WithHead()
    opt = lw.optim.KFAC(
        model, max_factor=LIMIT, likelihood="categorical", factor_every=2, refresh_every=2, statistics_over=over
    )
    with Largest() as seen, torch.autocast("cpu", torch.bfloat16):
        for _ in range(4):
            step(model, opt)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
        opt.zero_grad()
        F.cross_entropy(model(x), torch.arange(4)).backward()
    sums = opt._accumulator.take()["head"]
    assert sums.inputs is not None
    assert sums.outgrads is None
    assert sums.G is None
    assert seen.entries < 8 * WIDTH * LONG


def test_several_processes_add_up_what_is_formed():
    """A process that did not call a layer has zeros in its place; not of a moment that nobody forms."""

    class Two(Processes):
        count = 2  # type: ignore[assignment]

        def add_up(self, tensors: Any) -> list[Tensor]:
            return list(tensors)

    model = WithHead()
    opt = lw.optim.KFAC(model, max_factor=LIMIT, likelihood="categorical")
    model(torch.randn(4, 8)).sum().backward()
    own = opt._accumulator._sums
    assert {*own} == {"body", "head"}
    own["head"].A = None
    with Largest():
        opt._accumulator.processes = Two()
        taken = opt._accumulator.take_all(opt._capture.table.layers, torch.device("cpu"))
    assert taken["head"].G is None
    assert taken["head"].A is not None
    assert taken["body"].G is not None


def test_what_has_a_factor_has_its_moment():
    """The side that is short enough is preconditioned as it would be without the long one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 9))
    opt = lw.optim.KFAC(model, likelihood="categorical", max_factor=8, scale="formula")
    x = torch.randn(5, 6)
    F.cross_entropy(model(x), torch.arange(5)).backward()
    h = torch.tanh(model[0](x)).detach()
    opt.step()
    head = next(stack for stack in opt._stacks or [] if stack.specs[0].name == "2")
    assert "P" not in head.state
    a = torch.cat([h, torch.ones(5, 1)], 1)
    torch.testing.assert_close(head.state["Q"].mean[0], a.mT @ a / 5)
