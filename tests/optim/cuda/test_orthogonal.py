"""Products with orthogonal matrices of one fixed scale, against float64: by torch, and in Triton's interpreter."""

from typing import Any

import pytest
import torch
from torch import Tensor

from interpreter import INTERPRETED
from layerwise.optim.cuda import elementwise
from layerwise.optim.cuda.linalg import orthogonal, split_fp16
from layerwise.optim.cuda.linalg.fp16 import Half, HalfPair
from layerwise.optim.cuda.linalg.orthogonal import basis_half, between, rough_between, with_room
from layerwise.optim.cuda.scaled import Scaled, unscaled
from layerwise.optim.cuda.triton import products as triton_products
from layerwise.optim.cuda.triton import splits as triton_splits
from random_tensors import randn

pytestmark = pytest.mark.interpreted
ROUNDING = 1e-3
SIDES = ["both", "left", "right"]


@pytest.fixture(params=["triton" if INTERPRETED else "torch"])
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way the functions go, and what splits and searches they have launched; small tiles for the interpreter."""
    found: list[str] = []
    if request.param == "triton":
        for module in (orthogonal, triton_products, elementwise):
            monkeypatch.setattr(module, "available", lambda device: True)
        tiles = triton_products.Tiles(m=16, n=16, depth=16, warps=1, stages=1)
        for name in ("PAIR_TILES", "ROUGH_TILES"):
            monkeypatch.setattr(triton_products, name, tiles)
    for module, name in ((triton_splits, "_launch"), (triton_splits, "largest_of"), (split_fp16, "pair_scale")):
        was = getattr(module, name)

        def noted(*given: Any, name: str = name, was: Any = was) -> Any:
            found.append(name)
            return was(*given)

        monkeypatch.setattr(module, name, noted)
    return found


def basis(K: int, n: int, seed: int) -> Tensor:
    return torch.linalg.qr(randn(K, n, n, seed=seed))[0]


def error(found: Scaled, expected: Tensor) -> float:
    D = unscaled(found).double()
    return float(((D - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)).max())


def samples(K: int, O: int, I: int) -> dict[str, Tensor]:
    """What a step may be in its basis: noise, one entry alone, signs that add up, ten binades in rows and columns."""
    spike, steep = torch.full((K, O, I), 1e-3), randn(K, O, I, seed=4)
    spike[:, 3, 5] = 100.0
    steep = steep * torch.logspace(0, -5, O)[:, None] * torch.logspace(0, -5, I)
    return {"noise": randn(K, O, I, seed=3), "spike": spike, "steep": steep, "tiny": 1e-33 * randn(K, O, I, seed=5)}


# --- one fixed scale -----------------------------------------------------------------------------------------


def test_a_basis_has_one_scale_whatever_it_holds(launches: list[str]):
    U = torch.stack([torch.eye(8), basis(1, 8, 1)[0], 0.01 * torch.eye(8)])
    half = basis_half(U)
    assert half.scale.tolist() == [2.0**14] * 3
    torch.testing.assert_close(half.hi / 2.0**14, U, rtol=2.0**-11, atol=2.0**-38, check_dtype=False)
    assert set(launches) <= {"_launch"}


def test_what_is_no_basis_is_cut_off_and_nan_stays(launches: list[str]):
    X = torch.zeros(3, 4, 4)
    X[0, 1, 2], X[1, 0, 0], X[2, 3, 3] = -9.0, torch.nan, torch.inf
    half = basis_half(X)
    assert float(half.hi[0, 1, 2]) == -65504
    assert half.hi.isfinite().flatten(1).sum(1).tolist() == [16, 15, 15]


def test_room(launches: list[str]):
    Y = torch.stack([randn(5, 7), 1e4 * randn(5, 7, seed=1), torch.zeros(5, 7), 3e38 * torch.ones(5, 7)])
    largest = Y.abs().amax((1, 2))
    found, searched = with_room(Y, largest), with_room(Y)
    assert torch.equal(found.hi, searched.hi)
    assert torch.equal(found.scale, searched.scale)
    top = found.hi.abs().amax((1, 2)).float()
    assert ((top >= 2.0**6) & (top <= 2.0**7)).tolist() == [True, True, False, True]
    torch.testing.assert_close(found.hi.float() / found.scale[:, None, None], Y, rtol=2.0**-11, atol=0)


def test_a_largest_entry_that_is_nan_makes_its_matrix_nan(launches: list[str]):
    found = with_room(torch.ones(2, 3, 3), torch.tensor([1.0, torch.nan]))
    assert found.hi.isfinite().all((1, 2)).tolist() == [True, False]


# --- products ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("kind", ["noise", "spike", "steep", "tiny"])
@pytest.mark.parametrize("size", [(32, 16), (16, 40)])
def test_the_way_back(size: tuple[int, int], kind: str, sides: str, launches: list[str]):
    """In 11 bits, the intermediate product, too; and nothing of it is searched or split."""
    (O, I), K = size, 2
    U_P, U_Q, Y = basis(K, O, 1), basis(K, I, 2), samples(K, O, I)[kind]
    P, Q = (basis_half(U) for U in (U_P, U_Q))
    half = with_room(Y, Y.abs().amax((1, 2)))
    launches.clear()
    found = rough_between(P if sides != "right" else None, half, Q.mT if sides != "left" else None)
    assert launches == []
    assert found.C.dtype == torch.float32
    expected = Y.double() if sides == "right" else U_P.double() @ Y.double()
    expected = expected if sides == "left" else expected @ U_Q.double().mT
    assert error(found, expected) < ROUNDING


def test_a_row_that_adds_up_is_not_cut_off(launches: list[str]):
    """Signs along a row of U_P and one of U_Q: an entry √(O I) times as large as those of Y, and zeros."""
    n = 64
    hadamard = torch.ones(1, 1)
    while len(hadamard) < n:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    U = basis_half((hadamard / n**0.5)[None])
    Y = (hadamard[5][:, None] * hadamard[9][None, :])[None]
    found = rough_between(U, with_room(1.99 * Y, torch.tensor([1.99])), U.mT)
    D = unscaled(found)
    assert float(D[0, 5, 9]) == pytest.approx(1.99 * n, rel=1e-3)
    assert float(D.abs().sum()) == pytest.approx(1.99 * n, rel=1e-3)


def test_what_float16_cannot_hold_is_cut_off(launches: list[str]):
    """Far beyond any basis: finite, and NaN where there was one."""
    scale = torch.tensor([2.0**14, 2.0**14])
    U, Y = Half(torch.full((2, 16, 16), 6e4).half(), scale), torch.full((2, 16, 16), -6e4).half()
    Y[1, 0, 0] = torch.nan
    found = rough_between(U, Half(Y, torch.ones(2)), U)
    assert found.C.isfinite().flatten(1).all(1).tolist() == [True, False]


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("kind", ["noise", "spike", "steep"])
@pytest.mark.parametrize("size", [(32, 16), (16, 40)])
def test_the_way_in_has_22_bits(size: tuple[int, int], kind: str, sides: str, launches: list[str]):
    """Without a search for the largest entry of what the first product leaves."""
    (O, I), K = size, 2
    X, P, Q = samples(K, O, I)[kind], basis_half(basis(K, O, 1)), basis_half(basis(K, I, 2))
    U_P, U_Q = (U.hi.double() / 2.0**14 for U in (P, Q))  # they are taken for exact
    pair: HalfPair = split_fp16.split(X)
    launches.clear()
    found = between(P.mT if sides != "right" else None, pair, Q if sides != "left" else None)
    assert set(launches) <= {"_launch"}
    assert len(launches) <= 1
    expected = X.double() if sides == "right" else U_P.mT @ X.double()
    expected = expected if sides == "left" else expected @ U_Q
    assert error(found, expected) < 2e-6
