"""`ParamLists`: parameters read and written as lists, whatever their shape, make the same steps as one stack."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_tools import flat
from torch import Tensor, nn

import layerwise as lw
from layerwise.optim.cuda.device_step import DeviceStep, largest_of
from layerwise.optim.cuda.executor import _gradient, param_lists
from layerwise.optim.cuda.gradient_sizes import bounds, sizes_of
from layerwise.optim.cuda.scaled import Scaled
from layerwise.optim.cuda.storage import StoredMatrix, between, scaled_between
from layerwise.optim.cuda.unscaled import unscaled
from layerwise.optim.engine import Layerwise
from layerwise.optim.rule import Context

pytestmark = pytest.mark.usefixtures("untyped")
Make = Callable[[nn.Module], Layerwise]
ALL = {"*": {"update": "fallback"}}
MEMBERS: dict[str, Make] = {
    "KFAC": lambda m: lw.optim.KFAC(m, lr=0.01, refresh_every=1, weight_decay=0.1, scale="formula"),
    "KFAC by products": lambda m: lw.optim.KFAC(
        m, lr=0.01, refresh_every=1, solver="products", clip=1e-5, scale="formula"
    ),
    "Shampoo": lambda m: lw.optim.Shampoo(m, lr=0.01, refresh_every=1, nesterov=True, scale="formula"),
    "Adam": lambda m: lw.optim.Adam(m, lr=0.01, weight_decay=0.1),
    "SGD with momentum": lambda m: lw.optim.SGD(m, lr=0.01, momentum=0.9, nesterov=True),
    "fallback sgd": lambda m: lw.optim.KFAC(
        m, lr=0.01, refresh_every=1, update_fallback="sgd", overrides=ALL, scale="formula"
    ),
}


class Zoo(nn.Module):
    """Two embeddings, norms, vectors, packed projections, convolutions of two groups; 4 inputs and a bias beside 5."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(9, 8), nn.Embedding(9, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.conv = nn.Sequential(nn.Conv1d(8, 8, 3, padding=1, groups=2), nn.Tanh(), nn.Conv1d(8, 8, 1, groups=2))
        self.up = nn.ConvTranspose1d(8, 8, 1)
        self.slopes = nn.PReLU(8)
        self.with_bias, self.without = nn.Linear(4, 8), nn.Linear(5, 8, bias=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](self.words(x) + self.places(x))
        h = self.norms[1](h + self.attention(h, h, h, need_weights=False)[0])
        h = self.slopes(self.up(self.conv(h.mT))).mT
        return self.head(self.norms[2](h) + self.with_bias(h[..., :4]) + self.without(h[..., :5]))


def zoo() -> Zoo:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return Zoo().train()


def train(opt: Layerwise, model: Any, steps: range, edit: Callable[[nn.Module, int], None] | None = None) -> None:
    for step in steps:
        g = torch.Generator().manual_seed(step)
        x, y = torch.randint(9, (8, 4), generator=g), torch.randn(8, 4, 3, generator=g)
        opt.zero_grad()
        (model(x) - y).square().mean().backward()
        model.attention.in_proj_bias.grad[8:16] = 0.01  # of the keys: zero but for rounding, which Adam magnifies
        if edit is not None:
            edit(model, step)
        opt.step()


def asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))


def assert_near(found: nn.Module, expected: nn.Module, tolerance: float = 1e-3) -> None:
    way = float((flat(expected) - flat(zoo())).norm())
    assert way > 1e-2
    assert float((flat(found) - flat(expected)).norm()) < tolerance * way


def compare(make: Make, monkeypatch: pytest.MonkeyPatch, edit: Any = None) -> Layerwise:
    model, other = zoo(), zoo()
    train(make(model), model, range(5), edit)
    asynchronous(monkeypatch)
    opt = make(other)
    train(opt, other, range(5), edit)
    assert_near(other, model)
    return opt


@pytest.mark.parametrize("name", MEMBERS)
def test_every_kind_of_parameter(name: str, monkeypatch: pytest.MonkeyPatch):
    compare(MEMBERS[name], monkeypatch)


def drop(model: nn.Module, step: int) -> None:
    """Some gradients are missing at some steps: of an embedding, a norm's bias, one of two linear layers."""
    missing = {
        "words.weight": (1, 3),
        "norms.1.bias": (2,),
        "without.weight": (1, 2),
        "attention.in_proj_bias": (3,),
    }
    for name, steps in missing.items():
        if step in steps:
            model.get_parameter(name).grad = None


@pytest.mark.parametrize("name", MEMBERS)
def test_missing_gradients(name: str, monkeypatch: pytest.MonkeyPatch):
    """Stacks go to and fro between the two ways, and with them the order of their moments in memory."""
    compare(MEMBERS[name], monkeypatch, drop)


def test_what_is_taken_as_a_list(monkeypatch: pytest.MonkeyPatch):
    opt = compare(MEMBERS["Adam"], monkeypatch)
    listed = {spec.name: param_lists(stack) for stack in opt._stacks or [] for spec in stack.specs}
    assert {name for name, found in listed.items() if found is None} <= {"with_bias", "without", "up", "up.weight"}
    words, norm, conv = listed["words"], listed["norms.0"], listed["conv.0"]
    assert words is not None
    assert (words.size, words.transposed, len(words.weights)) == ((9, 8), True, 2)
    assert norm is not None
    assert (norm.size, norm.groups) == ((8, 1), 8)
    assert norm.biases is not None
    assert len(norm.biases) == 3
    assert conv is not None
    assert (conv.size, conv.groups) == ((8, 12), 2)
    stack = next(stack for stack in opt._stacks or [] if param_lists(stack) is words)
    assert stack.state["m"].shape == (2, 8, 9)
    assert stack.state["m"].mT.is_contiguous()  # as the parameter lies


def test_the_same_views_at_every_step(monkeypatch: pytest.MonkeyPatch):
    asynchronous(monkeypatch)
    model = zoo()
    opt = MEMBERS["Adam"](model)
    train(opt, model, range(1))
    lists = [found for stack in opt._stacks or [] if (found := param_lists(stack)) is not None]
    assert lists
    before = [found.parameters() for found in lists]
    train(opt, model, range(1, 2))
    assert all(found.parameters() is views for found, views in zip(lists, before, strict=True))


def test_memory_that_is_exchanged_is_noticed(monkeypatch: pytest.MonkeyPatch):
    asynchronous(monkeypatch)
    model, other = zoo(), zoo()
    for m, exchanged in ((model, False), (other, True)):
        opt = MEMBERS["KFAC"](m)
        train(opt, m, range(2))
        for p in m.parameters() if exchanged else ():
            p.data = p.data.clone()
        train(opt, m, range(2, 4))
    assert torch.equal(flat(model), flat(other))


@pytest.mark.parametrize("name", ["Adam", "SGD with momentum", "KFAC by products"])
def test_saved_and_loaded(name: str, monkeypatch: pytest.MonkeyPatch):
    """The order in memory is no part of what is saved."""
    asynchronous(monkeypatch)
    model = zoo()
    opt = MEMBERS[name](model)
    train(opt, model, range(3))
    other = copy.deepcopy(model)
    opt2 = MEMBERS[name](other)
    train(opt2, other, range(1))
    other.load_state_dict(model.state_dict())
    opt2.load_state_dict(copy.deepcopy(opt.state_dict()))
    for opt_, m in ((opt, model), (opt2, other)):
        train(opt_, m, range(3, 5))
    assert_near(other, model, 1e-5)


# --- how large gradients are ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("open_", "scale"), [(True, 1.0), (True, -3.0), (False, 2.0)])
def test_bounds_hold_for_every_group(open_: bool, scale: float):
    model = zoo()
    opt = MEMBERS["KFAC by products"](model)
    train(opt, model, range(2))
    model.without.weight.grad = None
    assert opt._stacks is not None
    all_finite, memory = torch.tensor(open_), dict[str, Any]()
    for _ in range(2):  # the second time from memory
        sizes = sizes_of(model.parameters())[torch.device("cpu")]
        found = bounds(opt._stacks, sizes, all_finite, scale, memory)
        for stack in opt._stacks:
            largest = _gradient(stack, scale, all_finite)[0].abs().amax((1, 2))
            lists = param_lists(stack)
            if any(p.grad is None for p in stack.params.values()):
                assert id(stack) not in found
            elif any(part.rows is not None for spec in stack.specs for part in spec.form.parts):
                assert bool((found[id(stack)] >= largest).all())
            elif lists is not None and lists.groups == 1:
                assert torch.equal(found[id(stack)], largest)
            else:
                assert bool((found[id(stack)] >= largest).all())


def test_a_bound_is_of_the_step_s_own_gradient_alone():
    grad = torch.ones(1, 2, 2)
    step = DeviceStep(torch.tensor(True), grad, torch.ones(1))
    context = Context(1, 0.1, 0.1, True, {}, gradient=grad, device_step=step)
    assert largest_of(grad, context) is step.largest
    assert largest_of(grad.clone(), context) is None
    assert largest_of(grad, Context(1, 0.1, 0.1, True, {}, gradient=grad)) is None


# --- directions that are not yet divided ---------------------------------------------------------------------


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("sides", ["both", "left", "right"])
def test_between_divides_last(sides: str, halves: int):
    g = torch.Generator().manual_seed(1)
    P, X, Q = (torch.randn(2, 5, 5, generator=g) for _ in range(3))
    left = StoredMatrix.keep(P, halves).matrix() if sides != "right" else None
    right = StoredMatrix.keep(Q, halves).matrix() if sides != "left" else None
    found = scaled_between(left, 1e-12 * X, right)
    assert isinstance(found, Scaled)
    expected = 1e-12 * (P if sides != "right" else torch.eye(5)) @ X @ (Q if sides != "left" else torch.eye(5))
    tolerance = 1e-5 if halves == 2 else 1e-2
    value = unscaled(found)
    assert float((value - expected).norm()) < tolerance * float(expected.norm())
    assert torch.equal(value, between(left, 1e-12 * X, right))


def test_a_member_that_reads_its_roots_twice_has_a_tensor():
    """`MahalanobisSpectral` whitens twice; what it returns is divided."""
    model = nn.Sequential(nn.Linear(4, 3))
    opt = lw.optim.MahalanobisSpectral(model, lr=0.01, solver="products", scale="formula")
    model(torch.randn(8, 4)).square().mean().backward()
    opt.step()
    stack = (opt._stacks or [])[0]
    grad, context = stack.gradient()[0], opt._context(stack, 1)
    roots, whiten = stack.state["roots"], opt.rule._whitened  # type: ignore[attr-defined]
    assert isinstance(roots.direction(grad, context, opt.rule.pair.shifts(context)), Scaled)  # type: ignore[attr-defined]
    assert isinstance(whiten(stack.state, grad, context), Tensor)
    assert isinstance(opt.rule.direction(stack.state, grad, context), Tensor)
