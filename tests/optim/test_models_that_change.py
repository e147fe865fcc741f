"""A model that changes after its optimizer was built: noticed before the next forward or step, never left untrained."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from optim_tools import MEMBERS, batches, cross_entropy, flat, member, mlp, train_step
from torch import Tensor, nn

import layerwise as lw
from layerwise.foundations.errors import LayerwiseError, UnsupportedError
from thinning import mostly_slow

pytestmark = pytest.mark.usefixtures("untyped")
DATA = batches(10, 5)
KINDS = ("Adam", "KFAC", "KFAC sampled", "EKFAC", "NGD", "SOAP", "Muon")
EVERY_KIND = pytest.mark.parametrize("name", mostly_slow(MEMBERS, KINDS))


def run(model: nn.Module, opt: torch.optim.Optimizer, start: int, stop: int) -> Tensor:
    for batch in DATA[start:stop]:
        train_step(model, opt, batch, cross_entropy)
    return flat(model)


def state_of(opt: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    return {layer: t for of_param in opt.state_dict()["state"].values() for layer, t in of_param.items()}


@EVERY_KIND
@pytest.mark.parametrize("shape", ["the same", "another"])
def test_a_replaced_layer_is_trained_from_the_next_step(name: str, shape: str):
    model = mlp(5, 5, 5, 3) if shape == "the same" else mlp(5, 5, 4, 3)
    opt = member(name, model)
    run(model, opt, 0, 3)
    others = {k: t["Q"].clone() for k, t in state_of(opt).items() if "Q" in t}
    width = 5 if shape == "the same" else 7
    torch.manual_seed(5)
    model[2], model[4] = nn.Linear(5, width).double(), nn.Linear(width, 3).double()
    before = {k: p.detach().clone() for k, p in model.named_parameters()}
    opt.zero_grad()
    loss = cross_entropy(model(DATA[3][0]), DATA[3][1])
    loss.backward()
    opt.step()
    for k, p in model.named_parameters():
        still = name == "SOAP" and k in ("2.weight", "4.weight")  # its first step only sets the basis
        assert still or not torch.equal(p, before[k]), k
    assert {id(p) for g in opt.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
    assert torch.isfinite(run(model, opt, 4, 8)).all()
    now = state_of(opt)
    assert all(torch.isfinite(t["Q"]).all() and t["Q"].shape[-1] for t in now.values() if "Q" in t)
    if "0" in others:  # kept, and gone on with
        counted = {k: int(t["Q_count"][0]) for k, t in now.items() if "Q_count" in t}
        assert counted["0"] > counted["2"]


@EVERY_KIND
def test_a_new_tensor_in_the_same_module_keeps_the_state(name: str):
    """As ``load_state_dict(assign=True)`` leaves it: training goes on as if values had been copied."""
    pair = []
    for assign in (False, True):
        model = mlp()
        opt = member(name, model)
        run(model, opt, 0, 4)
        model.load_state_dict({k: t * 0.9 for k, t in copy.deepcopy(model.state_dict()).items()}, assign=assign)
        pair.append(run(model, opt, 4, 8))
    assert torch.equal(*pair)


class Adapted(nn.Module):
    """A frozen layer with a low-rank update beside it, as adapters wrap theirs."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False).double()
        self.up = nn.Linear(2, base.out_features, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@EVERY_KIND
def test_an_adapter_that_is_added(name: str):
    """The optimizer says at the first step which parameters it was never told of; told, it trains them."""
    model = mlp()
    opt = member(name, model)
    run(model, opt, 0, 3)
    torch.manual_seed(5)
    model[2] = Adapted(model[2])
    with pytest.raises(LayerwiseError, match=r"2\.down\.weight.*add_param_group"):
        run(model, opt, 3, 4)
    opt.add_param_group({"params": [p for p in model[2].parameters() if p.requires_grad], "lr": 0.01})
    frozen, before = model[2].base.weight.detach().clone(), model[2].up.weight.detach().clone()
    run(model, opt, 4, 7)
    assert torch.equal(model[2].base.weight, frozen)
    assert not torch.equal(model[2].up.weight, before)
    assert torch.isfinite(flat(model)).all()
    assert "2.down.weight" in repr(opt)
    assert "2.base.weight" in {k for g in opt.param_groups for k in g["param_names"]}


class Wrapper(nn.Module):
    """Renames everything inside, as a compiled block does, and calls it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner

    def forward(self, x: Tensor) -> Tensor:
        return self._orig_mod(x)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """What is compiled here does not count in other tests, nor theirs here."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@EVERY_KIND
@pytest.mark.parametrize("how", [Wrapper, lambda block: torch.compile(block, backend="eager")])
def test_a_block_that_is_wrapped_or_compiled_goes_on_alike(name: str, how: Any):
    pair = []
    for wrapped in (False, True):
        model = nn.Sequential(mlp(5, 5, 5), mlp(5, 3))
        opt = member(name, model)
        run(model, opt, 0, 3)
        if wrapped:
            model[0] = how(model[0])
        run(model, opt, 3, 7)
        assert ("0._orig_mod.0.weight" in repr(opt)) == wrapped
        opt.load_state_dict(opt.state_dict())
        pair.append(run(model, opt, 7, 9))
    assert (pair[0] - pair[1]).abs().max() < 1e-12


class ByUse(nn.Module):
    """A weight that no module multiplies by: a layer by its use, which only a forward shows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 4), nn.Linear(4, 3)
        self.W = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.first(x).tanh() @ self.W).tanh())


@pytest.mark.parametrize("name", ["KFAC", "EKFAC", "FOOF"])
@pytest.mark.parametrize("how", ["resumed", "added", "wrapped"])
def test_layers_by_use_keep_their_state(name: str, how: str):
    torch.manual_seed(0)
    model = ByUse().double()
    other = copy.deepcopy(model)
    opt, plain = member(name, model), member(name, other)
    run(model, opt, 0, 4)
    run(other, plain, 0, 4)
    if how == "resumed":
        opt.load_state_dict(opt.state_dict())
    elif how == "added":
        model.extra = nn.Parameter(torch.zeros(2))
        opt.add_param_group({"params": [model.extra]})
    else:
        model.first = Wrapper(model.first)
    run(model, opt, 4, 8)
    run(other, plain, 4, 8)
    difference = (flat(other) - torch.cat([p.flatten() for k, p in model.named_parameters() if k != "extra"])).abs()
    assert difference.max() < 1e-12


def test_freezing_a_layer_disturbs_nothing():
    """Statistics of a forward are not lost where a parameter is frozen before the step."""
    model, other = mlp(), mlp()
    one, two = lw.optim.KFAC(model, lr=0.01), lw.optim.KFAC(other, lr=0.01)
    for t, batch in enumerate(DATA[:4]):
        one.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        model[0].requires_grad_(t % 2 == 1)
        one.step()
        model[0].requires_grad_(True)
        train_step(other, two, batch, cross_entropy)
    assert torch.equal(flat(model), flat(other))


def test_a_change_that_is_refused_is_refused_again(monkeypatch: pytest.MonkeyPatch):
    def refuses(*_: object) -> dict[str, object]:
        raise UnsupportedError("not so")

    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    opt = lw.optim.KFAC(model, estimator="empirical")
    model[0] = nn.Linear(3, 4)
    with monkeypatch.context() as patched:
        patched.setattr("layerwise.optim.engine.divisions", refuses)
        for _ in range(2):
            with pytest.raises(UnsupportedError, match="not so"):
                model(torch.randn(5, 3))
    opt.zero_grad()
    model(torch.randn(5, 3)).square().mean().backward()
    opt.step()
    assert any(p is model[0].weight for group in opt.param_groups for p in group["params"])


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")
def test_a_scripted_part_is_no_obstacle():
    """What holds its parts and parameters are no dictionaries."""
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    model = nn.Sequential(nn.Linear(4, 4), scripted, nn.Linear(4, 2))
    opt = lw.optim.Muon(model)
    before = [p.clone() for p in model.parameters()]
    model(torch.ones(3, 4)).square().sum().backward()
    opt.step()
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("name", ["KFAC", "EKFAC"])
def test_a_change_between_backward_and_step_is_named(name: str):
    """What was seen is of another model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    opt = getattr(lw.optim, name)(model)
    nn.functional.cross_entropy(model(torch.randn(5, 6)), torch.arange(5) % 3).backward()
    opt.step()
    nn.functional.cross_entropy(model(torch.randn(5, 6)), torch.arange(5) % 3).backward()
    model.append(nn.Linear(3, 3))
    opt.add_param_group({"params": list(model[3].parameters())})
    with pytest.raises(LayerwiseError, match=r"have changed.* before the forward rather than before"):
        opt.step()


@pytest.mark.parametrize("name", ["KFAC", "EKFAC"])
def test_inputs_that_are_not_finite_are_named(name: str):
    """By them a model cannot be examined: nothing has changed."""
    model = mlp(6, 8, 3).float()
    opt = getattr(lw.optim, name)(model)
    x = torch.randn(5, 6)
    x[0, 0] = -torch.inf
    nn.functional.cross_entropy(model(x), torch.arange(5) % 3).backward()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(LayerwiseError, match=r"with inputs that are finite.* masks as booleans"):
        opt.step()
