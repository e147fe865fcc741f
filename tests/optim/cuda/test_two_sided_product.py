"""Products of packed pairs as one product with long sums: by torch, and in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from interpreter import only_interpreted
from layerwise.optim.cuda.elementwise_torch import over
from layerwise.optim.cuda.linalg import packed_fp16, split_fp16, two_sided_product
from layerwise.optim.cuda.linalg.two_sided_product import long_between, one_above_the_other, side_by_side, tripled
from layerwise.optim.cuda.triton import packed as triton_packed
from layerwise.optim.cuda.triton import splits as triton_splits
from random_tensors import randn

pytestmark = pytest.mark.interpreted
K, O, I = 3, 48, 80


@pytest.fixture(autouse=True, params=["torch", pytest.param("kernels", marks=only_interpreted)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Torch, or the kernels, which then take the CPU's matrices."""
    monkeypatch.setattr(triton_packed, "BLOCK", 32)
    monkeypatch.setattr(triton_packed, "MIRROR_BLOCK", 32)
    monkeypatch.setattr(triton_splits, "TILE", {"ROWS": 8, "COLUMNS": 32, "num_warps": 1})
    for module in (packed_fp16, two_sided_product):
        monkeypatch.setattr(module, "available", lambda _: request.param == "kernels")
    return request.param


def kept(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A symmetric stack, packed, and its scales."""
    X = randn(K, n, n, seed=seed)
    X = (X + X.mT) * torch.logspace(-9, 6, K).view(-1, 1, 1)
    H, scale = packed_fp16.zeros(K, 2, n), torch.ones(K)
    packed_fp16.put_(H, scale, X)
    return X, H, scale


@pytest.mark.parametrize("known", [True, False])
def test_a_product_of_both_sides(known: bool):
    (P, *left), (Q, *right) = kept(O, 1), kept(I, 2)
    X = randn(K, O, I, seed=3) * torch.logspace(-3, 0, I)
    largest = X.abs().amax((1, 2)) if known else None
    found = long_between(*left, X, *right, largest=largest)
    expected = P.double() @ X.double() @ Q.double()
    error = (over(found.C.double(), [scale.double() for scale in found.scales]) - expected).flatten(1).norm(dim=1)
    assert bool((error < 2e-6 * expected.flatten(1).norm(dim=1)).all())


def test_scales_are_foreseen():
    """As what one product leaves grows, shrinks, vanishes and is not finite for once."""
    (P, *left), (Q, *right) = kept(O, 1), kept(I, 2)
    before = torch.zeros(K)
    for t, size in enumerate((1.0, 1.3, 5.0, 1e6, 0.0, 1e-7, torch.nan, 1e-7)):
        X = size * randn(K, O, I, seed=t)
        found = long_between(*left, X, *right, before=before)
        value = over(found.C.double(), [scale.double() for scale in found.scales])
        if size != size:
            assert bool(value.isnan().all())
            continue
        expected, middle = P.double() @ X.double() @ Q.double(), P.double() @ X.double()
        assert torch.allclose((before / left[1]).double(), middle.abs().amax((1, 2)) * scale_of(X), rtol=1e-3)
        error = (value - expected).flatten(1).norm(dim=1)
        assert bool((error <= 2e-6 * expected.flatten(1).norm(dim=1)).all())


def scale_of(X: Tensor) -> Tensor:
    return split_fp16.pair_scale(X).double()


def test_halves_stand_where_the_others_meet_them():
    _, H, _ = kept(O, 1)
    hi, lo = packed_fp16.unpack(H).unbind(1)
    assert torch.equal(side_by_side(H), torch.cat([hi, lo, hi], 2))
    assert torch.equal(one_above_the_other(H), torch.cat([hi, lo, hi], 1))
    X = randn(K, O, I)
    pair = split_fp16.split(X)
    for above, axis in ((True, 1), (False, 2)):
        found, scale = tripled(X, above=above)
        assert torch.equal(found, torch.cat([pair.lo, pair.hi, pair.hi], axis))
        assert torch.equal(scale, pair.scale)


def test_what_is_not_finite_stays_visible_in_its_own_matrix():
    (_, *left), (_, *right) = kept(O, 1), kept(I, 2)
    X = randn(K, O, I)
    X[1, 5, 7] = torch.inf
    found = long_between(*left, X, *right)
    finite = over(found.C, found.scales).isfinite().flatten(1)
    assert finite.all(1).tolist() == [True, False, True]
    assert not bool(finite[1].any())
