"""EKFAC's scalings in bfloat16 on a GPU: which are, how large the state is, checkpoints, and where training ends."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.optim.cuda import scalings
from layerwise.optim.cuda.triton.products import available
from layerwise.optim.engine import Layerwise
from layerwise.optim.rule import tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and available(torch.device("cuda"))),
        reason="needs triton and a GPU of capability 8.0; run `make test-gpu` on one",
    ),
]
EVERY = 4
MEMBERS: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "batch": ("EKFAC", {}, torch.bfloat16),
    "deferred": ("EKFAC", {"factor_every": EVERY}, torch.bfloat16),
    "running": ("EKFAC", {"scaling": "running"}, torch.bfloat16),
    "running, exact": ("EKFAC", {"scaling": "running", "damping_split": "exact"}, torch.bfloat16),
    "long": ("EKFAC", {"scaling": "running", "scaling_decay": 0.999}, torch.float32),
    "eigh": ("EKFAC", {"scaling": "running", "solver": "eigh"}, torch.float32),
    "none": ("KFAC", {"damping_split": "exact"}, torch.float32),
}
ROUNDED = [name for name, (_, _, dtype) in MEMBERS.items() if dtype == torch.bfloat16]


def begun(name: str, device: str = "cuda", **options: Any) -> tuple[nn.Module, Layerwise]:
    """Layers of 64 and of 48 outputs: with their bias, 65 inputs are padded to 80."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 48)).to(device)
    member, given, _ = MEMBERS[name]
    return model, getattr(lw.optim, member)(model, lr=0.01, refresh_every=EVERY, **given, **options, scale="formula")


def train(opt: Layerwise, model: nn.Module, start: int, stop: int) -> None:
    device = next(model.parameters()).device
    for step in range(start, stop):
        g = torch.Generator().manual_seed(step)
        x, y = torch.randn(96, 64, generator=g).to(device), torch.randn(96, 48, generator=g).to(device)
        opt.zero_grad()
        (model(x) - y).square().sum(-1).mean().backward()
        opt.step()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def kept(opt: Layerwise) -> list[Tensor]:
    return [stack.state["s"] for stack in opt._stacks or ()]


def saved(opt: Layerwise) -> dict[str, Tensor]:
    return {
        f"{layer}.{name}": X
        for of_param in opt.state_dict()["state"].values()
        for layer, of_layer in of_param.items()
        for name, X in of_layer.items()
        if name in ("s", "s_due")
    }


@pytest.mark.parametrize("name", MEMBERS)
def test_which_are_rounded(name: str):
    model, opt = begun(name)
    train(opt, model, 0, 12)
    assert {s.dtype for s in kept(opt)} == {MEMBERS[name][2]}
    assert all(bool(s.isfinite().all()) and bool(s.any()) for s in kept(opt))
    assert {X.dtype for X in saved(opt).values()} == {torch.float32}


def test_double_stays_double():
    model, opt = begun("running")
    model.double()
    for step in range(2):
        opt.zero_grad()
        model(torch.full((4, 64), 1.0 + step, dtype=torch.float64, device="cuda")).square().sum().backward()
        opt.step()
    assert {s.dtype for s in kept(opt)} == {torch.float64}


class Block(nn.Module):
    """The layers of one of a GPT's, as far as sizes go."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(768, 2304), nn.Linear(768, 768)
        self.up, self.down = nn.Linear(768, 3072), nn.Linear(3072, 768)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.down(self.up(self.out(q * k + v)).tanh())


def test_the_size_of_a_state():
    """Of one block of the GPT that is measured: 2.70 times AdamW's by count, with float32 2.95.

    With embedding and head, whose state is AdamW's own, that is 1.89 times, and would be 2.02.
    """
    torch.manual_seed(0)
    model = Block().cuda()
    opt = lw.optim.EKFAC(model, scaling="running", cuda_graphs=False, scale="formula")
    for _ in range(2):
        opt.zero_grad()
        model(torch.randn(32, 768, device="cuda")).square().mean().backward()
        opt.step()
    state = sum(X.untyped_storage().nbytes() for stack in opt._stacks or () for X in tensors(stack.state).values())
    assert state < 2.72 * 8 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", ROUNDED)
def test_checkpoints_hold_all_of_them(name: str):
    """On the GPU again bit for bit, by way of a CPU too; and a resumed run goes on as it would have, to rounding."""
    model, opt = begun(name, cuda_graphs=False)
    train(opt, model, 0, EVERY + 2)
    state, found = copy.deepcopy(opt.state_dict()), saved(opt)
    there = begun(name, "cpu")[1]
    there.load_state_dict(state)
    there._stacks = there._build()
    assert {s.dtype for s in kept(there)} == {torch.float32}
    for given in (state, there.state_dict()):
        other_model, other = begun(name, cuda_graphs=False)
        other_model.load_state_dict(model.state_dict())
        other.load_state_dict(copy.deepcopy(given))
        other._stacks = other._build()
        assert {s.dtype for s in kept(other)} == {torch.bfloat16}
        again = saved(other)
        assert all(torch.equal(again[key], X) for key, X in found.items() if key.endswith(".s"))
    other_model, other = begun(name, cuda_graphs=False)
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(state)
    start = flat(model)
    for each, its in ((opt, model), (other, other_model)):
        train(each, its, EVERY + 2, 3 * EVERY)
    way = float((flat(model) - start).norm())
    assert float((flat(model) - flat(other_model)).norm()) < 1e-2 * way


@pytest.mark.parametrize("name", ROUNDED)
def test_steps_are_those_with_float32(name: str, monkeypatch: pytest.MonkeyPatch):
    """Six of them: 3.4e-3 of the way apart on a CPU. Rounding does what a change of all weights by 1e-5 does; after
    twenty steps both are 2.6e-2 to 5.2e-2 apart, running.
    """
    ends = []
    for on in (True, False):
        if not on:
            monkeypatch.setattr(scalings, "available", lambda device: False)
        model, opt = begun(name)
        start = flat(model)
        train(opt, model, 0, 6)
        assert {s.dtype for s in kept(opt)} == {torch.bfloat16 if on else torch.float32}
        ends.append(flat(model))
    assert float((ends[0] - ends[1]).norm()) < 2e-2 * float((ends[1] - start).norm())
