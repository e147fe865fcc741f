"""Factors padded to multiples of 16, and packed: training, what is saved and what is reported do not change by it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_tools import flat
from torch import Tensor, nn

import layerwise as lw
from layerwise.optim.cuda import backend, factor
from layerwise.optim.engine import Layerwise
from layerwise.optim.step import update

pytestmark = pytest.mark.usefixtures("untyped")
Make = Callable[[nn.Module], torch.optim.Optimizer]
MEMBERS: dict[str, Make] = {
    "KFAC": lambda m: lw.optim.KFAC(m, lr=0.005, solver="products", refresh_every=2, scale="formula"),
    "KFAC absolute": lambda m: lw.optim.KFAC(
        m, lr=0.005, solver="products", refresh_every=2, damping=0.03, damping_scale="absolute", scale="formula"
    ),
    "KFAC exact split": lambda m: lw.optim.KFAC(
        m, lr=0.005, solver="products", refresh_every=2, damping_split="exact", scale="formula"
    ),
    "EKFAC": lambda m: lw.optim.EKFAC(m, lr=0.005, solver="products", refresh_every=2, scale="formula"),
    "EKFAC absolute": lambda m: lw.optim.EKFAC(
        m, lr=0.005, solver="products", refresh_every=2, damping=0.03, damping_scale="absolute", scale="formula"
    ),
    "EKFAC running": lambda m: lw.optim.EKFAC(
        m, lr=0.005, solver="products", refresh_every=2, scaling="running", scale="formula"
    ),
    "FOOF": lambda m: lw.optim.FOOF(m, lr=0.005, solver="products", refresh_every=2, weight_decay=0.1, scale="formula"),
    "Shampoo": lambda m: lw.optim.Shampoo(
        m, lr=0.005, solver="products", refresh_every=2, graft="adam", scale="formula"
    ),
    "SOAP": lambda m: lw.optim.SOAP(m, lr=0.005, solver="products", refresh_every=2, scale="formula"),
}
STEPS = 11
"""More than the steps that are solved exactly."""


class Words(nn.Module):
    """An embedding, layers with and without bias, two of one shape: odd sizes everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.body = nn.Sequential(
            nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 7, bias=False), nn.Tanh(), nn.Linear(7, 7, bias=False), nn.Tanh()
        )
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(x)))


def words(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randint(11, (8, 3), generator=g), torch.randn(8, 3, 5, generator=g)


def images(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(8, 2, 5, 5, generator=g), torch.randn(8, 5, generator=g)


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 2, groups=2), nn.Flatten(), nn.Linear(16, 5))


PROBLEMS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]]]] = {
    "words": (Words, words),
    "images": (convolutions, images),
}


def made(problem: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return PROBLEMS[problem][0]()


def train(problem: str, opt: torch.optim.Optimizer, model: nn.Module, start: int, stop: int) -> None:
    for step in range(start, stop):
        x, y = PROBLEMS[problem][1](step)
        opt.zero_grad()
        (0.5 * (model(x) - y).square().sum() / len(x)).backward()
        opt.step()


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """On a CPU: "plain" factors, "padded", or padded and "packed"."""

    def as_asked(kind: str) -> None:
        monkeypatch.setattr(backend, "PAD_TO", {} if kind == "plain" else {"cpu": 16})
        monkeypatch.setattr(factor, "packs", lambda shape, size: kind == "packed")

    return as_asked


def tensors(opt: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{layer}.{name}": value
        for of_param in opt.state_dict()["state"].values()
        for layer, of_layer in of_param.items()
        for name, value in of_layer.items()
    }


def assert_close(found: Tensor, expected: Tensor, start: Tensor, tol: float) -> None:
    """Within a part of the way gone."""
    way = float((expected - start).norm())
    assert way > 1e-2
    assert float((found - expected).norm()) < tol * way


INVERSES = ("KFAC", "KFAC absolute", "FOOF")
"""The same to rounding; a tracked basis may come to rest elsewhere among eigenvalues that are nearly equal."""


def tolerance(name: str) -> float:
    return 1e-4 if name in INVERSES else 5e-2


@pytest.mark.parametrize(
    ("name", "problem"),
    [(name, "words") for name in MEMBERS] + [(name, "images") for name in ("KFAC", "EKFAC", "Shampoo", "SOAP")],
)
def test_training_is_the_same(name: str, problem: str, keep: Callable[[str], None]):
    early, ends, reports = [], [], []
    for kind in ("plain", "packed" if problem == "words" else "padded"):
        keep(kind)
        model = made(problem)
        opt = MEMBERS[name](model)
        train(problem, opt, model, 0, 5)
        early.append(flat(model))
        train(problem, opt, model, 5, STEPS)
        ends.append(flat(model))
        assert isinstance(opt, lw.optim.Layerwise)
        reports.append(opt.health())
    assert_close(
        early[1], early[0], flat(made(problem)), 1e-5 if name in INVERSES else 5e-2 if name == "SOAP" else 3e-3
    )
    assert_close(ends[1], ends[0], flat(made(problem)), tolerance(name))
    plain, padded = reports
    assert padded.damping == pytest.approx(plain.damping, rel=tolerance(name))
    assert padded.condition == pytest.approx(plain.condition, rel=0.5 if name == "SOAP" else tolerance(name))
    assert padded.fallbacks == plain.fallbacks == 0


@pytest.mark.parametrize("name", MEMBERS)
def test_what_is_saved_has_no_padding(name: str, keep: Callable[[str], None]):
    shapes = []
    for kind in ("plain", "packed"):
        keep(kind)
        model = made("words")
        opt = MEMBERS[name](model)
        train("words", opt, model, 0, 4)
        shapes.append({key: (value.shape, value.dtype) for key, value in tensors(opt).items()})
    assert shapes[0] == shapes[1]
    assert not any(16 in shape for shape, _ in shapes[1].values())


@pytest.mark.parametrize("order", ["plain, packed, plain", "packed, plain, packed"])
@pytest.mark.parametrize("name", ["KFAC", "EKFAC running", "Shampoo"])
def test_a_checkpoint_goes_from_one_to_the_other_and_back(name: str, order: str, keep: Callable[[str], None]):
    """Three parts of a training, each by an optimizer of its own, against the same without padding."""
    ends = []
    for kinds in (("plain",) * 3, order.split(", ")):
        model, saved = made("words"), None
        for kind, (start, stop) in zip(kinds, ((0, 9), (9, 11), (11, 13)), strict=True):
            keep(kind)
            opt = MEMBERS[name](model)
            if saved is not None:
                opt.load_state_dict(saved)
            train("words", opt, model, start, stop)
            saved = opt.state_dict()
        ends.append(flat(model))
    assert_close(ends[1], ends[0], flat(made("words")), tolerance(name))


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("name", ["KFAC", "SOAP"])
def test_norms_by_some_rows_are_the_same(
    name: str, sync: bool, keep: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
):
    """Of AdamW's updates (`step.update`), here by rows 0, 3 and 6 of 7: padding shifts neither them nor checkpoints."""
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda _: sync))
    for bound, value in (("SEEN", 2), ("LEAST_SEEN", 6), ("LEAST_ENTRIES", 0)):
        monkeypatch.setattr(update, bound, value)
    assert update.moment_rows(7, 6, own_momentum=False) == (7, 3)
    options: dict[str, Any] = {"refresh_every": 2, "solver": "products"}
    options |= {"estimator": "empirical"} if name == "KFAC" else {}
    ends, shapes = [], []
    for kinds in (("plain", "plain"), ("packed", "packed"), ("plain", "packed"), ("packed", "plain")):
        model, saved = made("words"), None
        for kind, (start, stop) in zip(kinds, ((0, 5), (5, 7)), strict=True):
            keep(kind)
            opt = getattr(lw.optim, name)(model, lr=0.02, **options)
            if saved is not None:
                opt.load_state_dict(saved)
            train("words", opt, model, start, stop)
            saved = opt.state_dict()
        ends.append(flat(model))
        shapes.append({key: X.shape for key, X in tensors(opt).items()})
    assert shapes[0]["body.0.graft_v"] == (1, 3, 6)
    assert all(other == shapes[0] for other in shapes)
    for end in ends[1:]:
        assert_close(end, ends[0], flat(made("words")), 5e-2 if name == "SOAP" else 1e-3)
