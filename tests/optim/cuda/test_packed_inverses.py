"""Packed inverses: half the memory, and bit for bit the steps, checkpoints and refreshes of whole ones."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.optim.cuda import backend, factor
from layerwise.optim.cuda.inverse import DeviceRoots
from layerwise.optim.cuda.linalg import packed_fp16
from layerwise.optim.cuda.storage import StoredMatrix, between
from layerwise.optim.engine import Layerwise
from layerwise.optim.rule import tensors
from random_tensors import randn

pytestmark = pytest.mark.usefixtures("untyped")
Make = Callable[[nn.Module], Layerwise]
MEMBERS: dict[str, Make] = {
    "KFAC": lambda m: lw.optim.KFAC(m, lr=0.05, solver="products", refresh_every=2, scale="formula"),
    "half": lambda m: lw.optim.KFAC(m, lr=0.05, solver="products", refresh_every=2, precision="half", scale="formula"),
    "FOOF": lambda m: lw.optim.FOOF(m, lr=0.05, solver="products", refresh_every=1, scale="formula"),
}
STEPS = 12
"""More than those whose inverses are exact."""


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Factors are packed in any case, inverses on demand."""
    monkeypatch.setattr(backend, "PAD_TO", {"cpu": 16})
    monkeypatch.setattr(factor, "packs", lambda shape, size: True)
    return lambda on: monkeypatch.setattr(factor, "packs_inverse", lambda shape, size: on)


class Words(nn.Module):
    """A diagonal factor, two layers alike (21 columns: padded to 32, three tiles), and one whose P is smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 20)
        self.body = nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.embedding(x))


def made(make: Make) -> tuple[nn.Module, Layerwise]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Words()
    return model, make(model)


def train(model: nn.Module, opt: Layerwise, start: int, stop: int) -> None:
    for step in range(start, stop):
        g = torch.Generator().manual_seed(step)
        opt.zero_grad()
        (model(torch.randint(9, (12,), generator=g)) - torch.randn(12, 6, generator=g)).square().sum().backward()
        opt.step()


def numbers(opt: Layerwise) -> list[Tensor]:
    of_layers = [of_layer for of_param in opt.state_dict()["state"].values() for of_layer in of_param.values()]
    return [X for of_layer in of_layers for X in of_layer.values()]


def roots(opt: Layerwise) -> list[Tensor]:
    """As they are stored."""
    entries = [entry for s in opt._stacks or [] for entry in s.state.values() if isinstance(entry, DeviceRoots)]
    return [X for entry in entries for name, X in entry.tensors().items() if name in ("P_root", "Q_root")]


@pytest.mark.parametrize(("name", "sync"), [("KFAC", True), ("KFAC", False), ("half", False)])
def test_steps_and_what_is_saved_are_the_same(
    name: str, sync: bool, packing: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
):
    """Eager, and asynchronous as on a GPU."""
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: sync))
    found = []
    for on in (False, True):
        packing(on)
        model, opt = made(MEMBERS[name])
        train(model, opt, 0, STEPS)
        found.append((*model.parameters(), *numbers(opt)))
        halves = [X for X in roots(opt) if X.ndim > 2]
        assert halves
        assert all(packed_fp16.is_packed(X) == on for X in halves)
        assert len(halves) < len(roots(opt))  # the embedding's is a diagonal
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("kinds", [(False, True), (True, False)])
def test_a_checkpoint_goes_from_one_to_the_other(kinds: tuple[bool, bool], packing: Callable[[bool], None]):
    found = []
    for first, second in ((False, False), kinds):
        packing(first)
        model, opt = made(MEMBERS["KFAC"])
        train(model, opt, 0, 9)
        saved = opt.state_dict()
        packing(second)
        opt = MEMBERS["KFAC"](model)
        opt.load_state_dict(saved)
        train(model, opt, 9, STEPS)
        found.append((*model.parameters(), *numbers(opt)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_product_of_both_sides():
    """Of packed pairs, as a direction is: some 20 bits, whatever their sizes; what is not finite stays in its group."""
    sizes = torch.logspace(-9, 6, 3).view(-1, 1, 1)
    P, Q = (sizes * (M + M.mT) for M in (randn(3, n, n, seed=n) for n in (48, 80)))
    kept = [StoredMatrix.keep(M, 2, triangle=True).matrix() for M in (P, Q)]
    X = randn(3, 48, 80, seed=3) * torch.logspace(-3, 0, 80)
    expected = P.double() @ X.double() @ Q.double()
    error = (between(kept[0], X, kept[1]) - expected).flatten(1).norm(dim=1)
    assert bool((error < 2e-6 * expected.flatten(1).norm(dim=1)).all())
    X[1, 5, 7] = torch.inf
    finite = between(kept[0], X, kept[1]).isfinite().flatten(1)
    assert finite.all(1).tolist() == [True, False, True]
    assert not bool(finite[1].any())


def test_a_layer_without_a_gradient_keeps_its_own(packing: Callable[[bool], None]):
    packing(True)
    model, opt = made(MEMBERS["KFAC"])
    train(model, opt, 0, 3)
    (treated,) = [s for s in opt._stacks or [] if len(s.specs) == 2]
    before = treated.state["roots"].sides["Q"].matrix.data.clone()
    opt.zero_grad()
    model(torch.arange(9)).square().sum().backward()
    for p in model.body[2].parameters():  # type: ignore[index]
        p.grad = None
    opt.step()
    after = treated.state["roots"].sides["Q"].matrix.data
    assert torch.equal(after[1], before[1])
    assert not torch.equal(after[0], before[0])


@pytest.mark.parametrize(("name", "sides", "inverse"), [("KFAC", 2, 0.5), ("FOOF", 1, 0.5), ("half", 2, 0.25)])
def test_state_of_a_square_layer(name: str, sides: int, inverse: float, packing: Callable[[bool], None]):
    """In units of AdamW's, 8 n² bytes: momentum ½, and on each side ½ and what the inverse has, or as much of that as
    lies in tiles on and below the diagonal. With whole inverses K-FAC has more than 2; FOOF's one is always whole."""
    n, tiles = 256, 16
    part = (1 + 1 / tiles) / 2
    for on, kept in ((True, part if sides == 2 else 1.0), (False, 1.0)):
        packing(on)
        model = nn.Linear(n, n, bias=False)
        opt = MEMBERS[name](model)
        model(torch.randn(8, n, generator=torch.Generator().manual_seed(0))).square().sum().backward()
        opt.step()
        held = sum(X.numel() * X.element_size() for s in opt._stacks or [] for X in tensors(s.state).values())
        assert held / (8 * n**2) == pytest.approx(0.5 + sides * (0.5 * part + inverse * kept), rel=1e-3)


def test_a_matrix_is_unpacked_where_it_is_asked_for():
    g = torch.Generator().manual_seed(3)
    X = torch.randn(3, 32, 32, generator=g)
    X = X + X.mT
    for halves in (1, 2):
        kept = [StoredMatrix.keep(X, halves, triangle=triangle) for triangle in (True, False)]
        assert packed_fp16.is_packed(kept[0].data)
        for of in (StoredMatrix.value, StoredMatrix.matrix):
            found, expected = (of(one, slice(1, 3)) for one in kept)
            assert type(found) is type(expected)
            parts = [[Y] if isinstance(Y, Tensor) else list(vars(Y).values()) for Y in (found, expected)]
            assert all(torch.equal(a, b) for a, b in zip(*parts, strict=True))
