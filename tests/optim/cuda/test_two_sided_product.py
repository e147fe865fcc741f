"""Products of two sides in fp16 alone: by torch, and in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from interpreter import only_interpreted
from layerwise.optim.cuda.elementwise_torch import over
from layerwise.optim.cuda.linalg import two_sided_product
from layerwise.optim.cuda.linalg.fp16 import Half
from layerwise.optim.cuda.linalg.two_sided_product import ROW, half_between, row_bound
from layerwise.optim.cuda.storage import StoredMatrix
from random_tensors import randn, randn64

pytestmark = pytest.mark.interpreted
K, O, I = 3, 48, 80


@pytest.fixture(autouse=True, params=["torch", pytest.param("kernels", marks=only_interpreted)])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch, or the kernels, which then take the CPU's matrices."""
    monkeypatch.setattr(two_sided_product, "available", lambda _: request.param == "kernels")


def inverse(n: int, condition: float, size: float, seed: int) -> Tensor:
    """Positive definite, of some condition and largest eigenvalue, for each group."""
    U = torch.linalg.qr(randn64(K, n, n, seed=seed))[0]
    return ((U * torch.logspace(0, -1, n).double() ** torch.tensor(condition).log10()) @ U.mT * size).float()


def kept_half(X: Tensor) -> Half:
    """As a `StoredMatrix` keeps an inverse in first halves."""
    n = X.shape[-1]
    matrix = StoredMatrix(torch.zeros(len(X), 1, n, n, dtype=torch.float16), torch.ones(len(X)))
    matrix.write(slice(None), X)
    found = matrix.matrix()
    assert isinstance(found, Half)
    return found


def off(P: Tensor | None, X: Tensor, Q: Tensor | None, largest: Tensor | None = None) -> float:
    """The relative error of `half_between`, of the group that is worst."""
    left, right = (None if M is None else kept_half(M) for M in (P, Q))
    found = half_between(left, X, right, largest)
    assert found.C.dtype == torch.float16
    assert bool(found.C.isfinite().all())
    expected = X.double()
    expected = expected if P is None else P.double() @ expected
    expected = expected if Q is None else expected @ Q.double()
    value = over(found.C.double(), [scale.double() for scale in found.scales])
    return float(((value - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)).max())


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("condition", [1.0, 30.0, 1e3])
def test_a_product_in_fp16(condition: float, known: bool):
    """Of inverses that are kept scaled by their row sums: the error is that of three roundings to 11 bits."""
    P, Q = inverse(O, condition, 3.0, 1), inverse(I, condition, 0.2, 2)
    X = randn(K, O, I, seed=3) * torch.logspace(-3, 3, K).view(-1, 1, 1)
    largest = X.abs().amax((1, 2)) if known else None
    assert off(P, X, Q, largest) < 2e-3
    assert off(P, X, None, largest) < 1e-3
    assert off(None, X, Q, largest) < 1e-3


@pytest.mark.parametrize(("left", "middle", "right"), [(1e30, 1e-30, 1e30), (1e-30, 1e30, 1e-30), (1e30, 1e30, 1e-30)])
def test_neither_overflow_nor_underflow_in_fp16(left: float, middle: float, right: float):
    P, Q = inverse(O, 1e3, left, 1), inverse(I, 1e3, right, 2)
    assert off(P, middle * randn(K, O, I, seed=3), Q) < 2e-3


def test_no_product_exceeds_its_operand():
    """The worst there is: equal rows of ones, and an X of ones, whose sums are as large as they get."""
    P, Q, X = torch.ones(K, O, O), torch.ones(K, I, I), torch.ones(K, O, I)
    assert off(P, X, Q) == 0
    assert off(-P, 1.99 * X, Q) < 2e-3
    found = half_between(kept_half(P), X, kept_half(Q))
    assert float(found.C.abs().max()) < 2.0**15


def test_the_bound_of_rows():
    """Scaled by it, the magnitudes of the fullest row add up to more than ½ and at most 1."""
    X = inverse(O, 1e3, 1.0, 1) * torch.logspace(-20, 20, K).view(-1, 1, 1)
    sums = X.double().abs().sum(-1).amax(-1)
    torch.testing.assert_close(row_bound(X).double() / ROW, sums, rtol=1e-6, atol=0)
    scaled = sums * kept_half(X).scale.double()
    assert bool(((scaled > 0.5 - 1e-6) & (scaled <= 1 + 1e-6)).all())


def test_the_bound_of_what_is_not_finite():
    """Is not finite, for its own matrix alone, and the one that was kept there stays."""
    before, X = inverse(O, 10.0, 1.0, 1), inverse(O, 10.0, 1.0, 2)
    X[1, 3, 4] = torch.inf
    assert row_bound(X).isfinite().tolist() == [True, False, True]
    stored = StoredMatrix.keep(before, 1)
    stored.write(slice(None), X)
    expected = torch.stack([X[0], before[1], X[2]])
    assert float((stored.value() - expected).abs().max()) < 1e-3 * float(expected.abs().max())
