"""`pieces`: where the entries of stacks lie in their parameters, whatever these are."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from optim_tools import flat
from torch import Tensor, nn

import layerwise as lw
from layerwise.optim.cuda import backend
from layerwise.optim.cuda.device_step import DeviceStep, largest_of
from layerwise.optim.cuda.gradient_sizes import bounds, sizes_of
from layerwise.optim.cuda.pieces import StackPieces, Tables
from layerwise.optim.cuda.scaled import Scaled, unscaled
from layerwise.optim.cuda.storage import StoredMatrix, between, scaled_between
from layerwise.optim.engine import Layerwise
from layerwise.optim.rule import Context
from layerwise.optim.step.stack import Stack

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

OTHERS: dict[str, Make] = {
    "KFAC adam": lambda m: lw.optim.KFAC(m, estimator="empirical", refresh_every=1),
    "Muon": lambda m: lw.optim.Muon(m),
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


class ByTables:
    """What the kernels do with a stack's tables, in torch: one piece after the other."""

    def __init__(self, stack: Stack) -> None:
        self.params = list(stack.params.values())
        slots = {id(p): slot for slot, p in enumerate(self.params)}
        found = StackPieces.of(stack, slots, dict.fromkeys(stack.params, 0))
        assert found is not None
        self.pieces = found

    def views(self, tensors: list[Tensor], stack: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each piece of the tensors, and its place in the stack; where the last row is not full, entry by entry."""
        found = []
        memory = stack.mT if self.pieces.transposed else stack
        for slot, base, rows, columns, row, limit, offset, up, across, *_ in self.pieces.table.tolist():
            own = tensors[slot].as_strided((tensors[slot].numel(),), (1,))
            i, j = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
            inside = i * row + j < limit
            found.append((own[(base + i * row + j)[inside]], (offset + i * up + j * across)[inside]))
        assert memory.is_contiguous()
        return found

    def gathered(self, tensors: list[Tensor]) -> Tensor:
        out = self.pieces.room(torch.float32).fill_(torch.nan)
        flat = (out.mT if self.pieces.transposed else out).reshape(-1)
        for entries, places in self.views(tensors, out):
            assert flat[places].isnan().all()  # nothing is written twice
            flat[places] = entries.float()
        assert flat.isnan().any() == self.pieces.padded
        return flat.view(out.mT.shape).mT if self.pieces.transposed else flat.view(out.shape)


class Images(nn.Module):
    """Convolutions with channels last, a bias, several groups, and one that is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 16, 3), nn.Conv2d(8, 16, 3, bias=False)
        self.grouped, self.depthwise = nn.Conv2d(16, 16, 3, groups=2), nn.Conv2d(16, 16, 3, groups=16)
        self.up, self.norm = nn.ConvTranspose2d(16, 8, 2), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.depthwise(self.grouped(self.norm(self.first(x) + self.second(x)))))


@pytest.mark.parametrize("padding", [1, 16])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("name", ["KFAC by products", "Adam", "KFAC adam", "Muon"])
def test_tables_are_the_stack(name: str, last: bool, padding: int, monkeypatch: pytest.MonkeyPatch):
    """Gathered by tables, gradients are those of the stack; every entry of every parameter once."""
    monkeypatch.setattr(backend, "PAD_TO", {"cpu": padding})
    asynchronous(monkeypatch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        images = Images()
    images = images.to(memory_format=torch.channels_last) if last else images
    for model, x in ((images, torch.randn(4, 8, 8, 8)), (zoo(), torch.randint(9, (8, 4)))):
        opt = OTHERS[name](model) if name in OTHERS else MEMBERS[name](model)
        model(x).square().mean().backward()
        opt.step()
        several = {"grouped.weight", "depthwise.weight", "up.weight"} if last else set()
        for stack in opt._stacks or []:
            if several & {*stack.params}:
                continue
            tables = ByTables(stack)
            found, own = tables.gathered([p.grad for p in tables.params if p.grad is not None]), stack.gradient()[0]
            assert torch.equal(found.nan_to_num(0.0), own)
            laid = tables.pieces.laid_out(own)
            assert (laid.mT if tables.pieces.transposed else laid).is_contiguous()


def test_several_matrices_with_channels_last_have_no_table(monkeypatch: pytest.MonkeyPatch):
    asynchronous(monkeypatch)
    model = Images().to(memory_format=torch.channels_last)
    opt = lw.optim.Adam(model)
    model(torch.randn(4, 8, 8, 8)).square().mean().backward()
    opt.step()
    stack = next(stack for stack in opt._stacks or [] if "grouped.weight" in stack.params)
    slots = {id(p): slot for slot, p in enumerate(stack.params.values())}
    assert StackPieces.of(stack, slots, dict.fromkeys(stack.params, 0)) is None


@pytest.mark.parametrize(("width", "bias", "aligned"), [(64, False, True), (9, False, False), (64, True, False)])
def test_who_is_read_by_vectors(width: int, bias: bool, aligned: bool, monkeypatch: pytest.MonkeyPatch):
    """Where rows begin at multiples of a vector; a bias is a column of the stack."""
    asynchronous(monkeypatch)
    model = nn.Sequential(nn.Linear(width, 5, bias=bias))
    opt = lw.optim.Adam(model, separate_bias=False)
    model(torch.randn(4, width)).square().mean().backward()
    opt.step()
    (stack,) = opt._stacks or []
    assert ByTables(stack).pieces.aligned is aligned


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
        sizes = sizes_of(opt._stacks, Tables(opt._stacks, torch.device("cpu")))
        assert sizes is not None
        found = bounds(opt._stacks, sizes, all_finite, scale, memory)
        for stack in opt._stacks:
            largest = (stack.gradient(scale)[0] * open_).abs().amax((1, 2))
            if any(p.grad is None for p in stack.params.values()):
                assert id(stack) not in found
            elif any(part.rows is not None for spec in stack.specs for part in spec.form.parts):
                assert bool((found[id(stack)] >= largest).all())
            elif all(spec.form.groups == 1 for spec in stack.specs):
                assert torch.equal(found[id(stack)], largest)
            else:
                assert bool((found[id(stack)] >= largest).all())


def test_gradients_that_no_table_reads_have_their_places_after_those_of_tables(monkeypatch: pytest.MonkeyPatch):
    """One of two stacks is read by kernels, as on a GPU, the other's gradients by torch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    opt = lw.optim.Shampoo(model)
    loss = nn.functional.cross_entropy(model(torch.randn(8, 3)), torch.arange(8) % 2)
    loss.backward()
    opt.step()
    stacks = opt._stacks or []
    tables, first = Tables(stacks, torch.device("cpu")), stacks[0]
    monkeypatch.setattr(tables, "reads", lambda stack: SimpleNamespace(stack=stack) if stack is first else None)
    by_slot = torch.stack([p.grad.abs().amax() for p in tables.params if p.grad is not None])
    read = torch.tensor([id(p) in {id(q) for q in first.params.values()} for p in tables.params])
    monkeypatch.setattr(tables, "magnitudes", lambda pieces: torch.where(read, by_slot, 0.0))
    sizes = sizes_of(stacks, tables)
    assert sizes is not None
    assert bool(sizes.finite)
    for p, largest in zip(tables.params, by_slot, strict=True):
        assert sizes.largest[sizes.places[id(p)]] == largest


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
