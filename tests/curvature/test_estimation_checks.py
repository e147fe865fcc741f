"""What is checked late keeps no data alive, and what the host knows of a mask or of weights holds for all readings."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.foundations.errors import InputError
from layerwise.foundations.likelihoods import Categorical, Terms


class Loader:
    """Makes every batch anew, and counts how many are still there."""

    def __init__(self) -> None:
        self.made: list[weakref.ref] = []
        self.most = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(8):
            x = torch.randn(4, 3)
            self.made.append(weakref.ref(x))
            yield x, torch.zeros(4, dtype=torch.long)
            del x
            self.most = max(self.most, sum(made() is not None for made in self.made))


def test_products_keep_no_batch():
    data = Loader()
    F = lw.fisher(nn.Linear(3, 2), data, structure="implicit")
    _ = F @ torch.ones(8)
    assert len(data.made) > 0
    assert data.most <= 2


@dataclass(frozen=True, kw_only=True)
class Quartered(Categorical):
    """Weights of its own."""

    def standardize(self, f: Tensor, y: Any, mask: Tensor | None, arrange: Callable[[Tensor], Tensor]) -> Terms:
        terms = super().standardize(f, y, mask, arrange)
        return replace(terms, weight=terms.weight / 4)


@dataclass(frozen=True, kw_only=True)
class FirstAlone(Categorical):
    """A mask of its own."""

    def standardize(self, f: Tensor, y: Any, mask: Tensor | None, arrange: Callable[[Tensor], Tensor]) -> Terms:
        terms = super().standardize(f, y, mask, arrange)
        keep = torch.ones_like(terms.weight, dtype=torch.bool) if terms.mask is None else terms.mask.clone()
        keep[:, 1:] = False
        return replace(terms, mask=keep, weight=terms.weight * keep)


def test_a_subclass_may_change_weights():
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 2), torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 0, 1])
    G = lw.fisher(model, (x, y), likelihood=Categorical()).to_dense()
    found = lw.fisher(model, (x, y), likelihood=Quartered()).to_dense()
    torch.testing.assert_close(found, G / 4)


def test_a_subclass_may_change_the_mask():
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 2), torch.randn(6, 5, 3), torch.randint(2, (6, 5))
    y[0, 4] = -100
    found = lw.fisher(model, (x, y), likelihood=FirstAlone(class_axis=-1), estimator="exact").to_dense()
    exact = lw.fisher(model, (x[:, 0], y[:, 0]), estimator="exact").to_dense()
    torch.testing.assert_close(found, exact)


def test_products_check_outputs_and_terms():
    """As all other structures do."""
    model, x, y = nn.Linear(3, 2), torch.randn(4, 3), torch.zeros(4, dtype=torch.long)
    F = lw.fisher(model, (x, torch.full_like(y, -100)), structure="implicit", normalize="terms")
    with pytest.raises(InputError, match="no position counts"):
        _ = F @ torch.ones(8)
    with torch.no_grad():
        model.bias[0] = torch.inf
    F = lw.fisher(model, (x, y), structure="implicit")
    with pytest.raises(InputError, match="output is NaN or infinite"):
        _ = F @ torch.ones(8)


@dataclass(frozen=True, kw_only=True)
class Wrapped(Quartered):
    """Another's reading, with weights of its own."""

    def standardize(self, f: Tensor, y: Any, mask: Tensor | None, arrange: Callable[[Tensor], Tensor]) -> Terms:
        terms = Categorical().standardize(f, y, mask, arrange)
        return replace(terms, weight=terms.weight / 4)


def test_another_reading_may_be_changed():
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 2), torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 0, 1])
    G = lw.fisher(model, (x, y), likelihood=Categorical()).to_dense()
    torch.testing.assert_close(lw.fisher(model, (x, y), likelihood=Wrapped()).to_dense(), G / 4)


def test_complex_targets_are_refused():
    x = torch.randn(4, 3)
    with pytest.raises(InputError, match="complex64"):
        lw.fisher(nn.Linear(3, 2), (x, torch.zeros(4, 2, dtype=torch.complex64)), likelihood="bernoulli")
