"""Many vectors pulled back at once, also where torch's rules for it are wrong."""

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.layers.capture import vectorised
from layerwise.layers.capture.vectorised import batched_grad
from random_tensors import randn64 as randn


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectorised, "_verdicts", {})


def one_by_one(f: Tensor, inputs: list[Tensor], v: Tensor) -> list[Tensor]:
    rows = [torch.autograd.grad(f, inputs, row, retain_graph=True) for row in v]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_distances(p: float):
    """vmap's rule for the backward of cdist is wrong."""
    a, b = (randn(n, 4, seed=n).requires_grad_() for n in (3, 5))
    f, v = torch.cdist(a * 1, b * 1, p=p), randn(3, 3, 5, seed=9)
    for found, expected in zip(batched_grad(f, [a, b], v), one_by_one(f, [a, b], v), strict=True):
        assert found is not None
        torch.testing.assert_close(found, expected)


class Radial(nn.Module):
    """A head of distances to centres."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.centres = nn.Linear(3, 4), nn.Parameter(randn(5, 4, seed=2).float())
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((-torch.cdist(self.first(x).unsqueeze(1), self.centres.unsqueeze(0)).squeeze(1)).exp())


def test_a_kernel_of_distances():
    torch.manual_seed(0)
    model, x = Radial().double(), randn(4, 3, seed=3)
    rows = torch.stack(
        [
            torch.cat([g.flatten() for g in torch.autograd.grad(y, list(model.parameters()), retain_graph=True)])
            for y in model(x).flatten()
        ]
    )
    torch.testing.assert_close(lw.ntk(model, x).matrix(), rows @ rows.mT)


def test_a_way_is_checked_once_for_each_kind_of_graph(monkeypatch: pytest.MonkeyPatch):
    asked, check = [], vectorised._adds_up
    monkeypatch.setattr(vectorised, "_adds_up", lambda *given: asked.append(1) or check(*given))
    x, v = randn(4).requires_grad_(), randn(3, 4, seed=1)
    for f, checks in ((x.sin(), 1), ((2 * x).sin(), 2), (x.sin(), 2), (x.float().sin(), 3)):
        batched_grad(f, [x], v.to(f.dtype))
        assert len(asked) == checks


@pytest.mark.parametrize("wrong", ["_mapped_grad", "_batched_grad"])
def test_a_way_that_is_wrong_is_left(wrong: str, monkeypatch: pytest.MonkeyPatch):
    """The older way is tried where vmap is wrong, too."""
    right, calls = getattr(vectorised, wrong), []

    def twice_the_last(f: Tensor, inputs: list[Tensor], v: Tensor) -> list[Tensor | None]:
        calls.append(1)
        *others, last = right(f, inputs, v)
        return [*others, None if last is None else 2 * last]

    def refused(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(vectorised, wrong, twice_the_last)
    if wrong == "_batched_grad":
        monkeypatch.setattr(vectorised, "_mapped_grad", refused)
    large, small = (randn(4, seed=s).requires_grad_() for s in (0, 1))
    f, v = 1e3 * large.sin() + small.cos(), randn(3, 4, seed=2)
    for _ in range(2):  # the second time it is not tried
        for found, expected in zip(batched_grad(f, [large, small], v), one_by_one(f, [large, small], v), strict=True):
            torch.testing.assert_close(found, expected)
    assert len(calls) == 1


def test_what_is_not_finite_says_nothing():
    x = torch.zeros(3, requires_grad=True)
    (found,) = batched_grad(x.sqrt(), [x], torch.eye(3))
    assert found is not None
    assert not bool(found.isfinite().all())
    assert not vectorised._verdicts
