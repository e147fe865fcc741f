"""Newton–Schulz on matrices and on Gram matrices, in float64 and as a GPU's fp16 rounds, against float64 as printed."""

from functools import cache

import pytest
import torch
from torch import Tensor

from layerwise.optim import newton_schulz as module
from layerwise.optim.newton_schulz import COEFFICIENTS, FP16_LIMITS, dtype_of_products, newton_schulz
from random_tensors import randn, randn64
from tensor_cores import TensorCores, quintic, relative, spectra

SHAPES = [(128, 384), (384, 128), (128, 256), (40, 160), (96, 128), (128, 96), (128, 128)]
"""On the Gram matrix in both orders, and twice as long as the other side, which is the least; then small, not as long,
and square."""
NAMES = list(spectra(4, 8))
MOST_ERROR: dict[str, float] = {"rank one": 0.2, "one and noise": 0.2, "low rank and noise": 0.2}
"""Else 0.04. Here nearly all singular values are at or below the rounding of the matrix itself, and a step multiplies
them by up to a⁵ = 485; in bfloat16 the error is about 1."""


drawn = cache(spectra)


def turned(X: Tensor, shape: tuple[int, int]) -> Tensor:
    return X if shape[0] <= shape[1] else X.mT.contiguous()


def on_a_gpu(X: Tensor, dtype: torch.dtype, **options: object) -> Tensor:
    """As Muon calls it there; bfloat16 as it was before: what it is given is rounded before its norm is known."""
    with TensorCores():
        given = X.bfloat16() if dtype == torch.bfloat16 else X
        squares = X.square().sum((-2, -1))
        return newton_schulz(given, dtype=dtype, squares=squares, keep_dtype=False, **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("steps", range(1, 9))
@pytest.mark.parametrize("limits", [(8, 8), (1, 1), (3, 3), (2, 1), FP16_LIMITS])
def test_the_gram_matrix_gives_the_same_iteration(limits: tuple[int, int], steps: int):
    """Well-conditioned, float64: however often the Gram matrix is computed, and whatever unit Y has."""
    X = randn64(2, 6, 20)
    X = X / X.norm(dim=(-2, -1), keepdim=True)
    exact = 0.7 * quintic(X, steps, COEFFICIENTS)
    assert relative(module._on_gram(8.0 * X, steps, COEFFICIENTS, 0.7, 8.0, limits), exact) < 1e-9
    assert relative(module._on_matrix(8.0 * X, steps, COEFFICIENTS, 0.7, 8.0), exact) < 1e-9


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (6, 9), (6, 8), (8, 8)])
def test_float64(shape: tuple[int, int]):
    X = randn64(3, *shape)
    exact = quintic(X, 5, COEFFICIENTS)
    assert relative(newton_schulz(X, dtype=torch.float64), exact) < 1e-9
    assert relative(newton_schulz(X, dtype=torch.float64, factor=0.3), 0.3 * exact) < 1e-9


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_fp16_is_nearer_than_bfloat16(shape: tuple[int, int], name: str):
    X = drawn(min(shape), max(shape))[name]
    exact = turned(quintic(X, 5, COEFFICIENTS), shape)
    X = turned(X, shape).unsqueeze(0)
    found, before = (on_a_gpu(X, dtype)[0] for dtype in (torch.float16, torch.bfloat16))
    assert found.dtype == torch.float16
    assert relative(found, exact) < min(relative(before, exact), MOST_ERROR.get(name, 0.04))
    values, former, expected = (torch.linalg.svdvals(each.double()) for each in (found, before, exact))
    assert (values - expected).abs().max() < max(5e-3, float((former - expected).abs().max()))
    assert values.max() < 1.22


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_more_steps_on_one_gram_matrix_would_be_worse_than_bfloat16(monkeypatch: pytest.MonkeyPatch):
    X = drawn(128, 384)["1/i²"].unsqueeze(0)
    exact = quintic(X, 5, COEFFICIENTS)
    limited, bfloat16 = (relative(on_a_gpu(X, dtype), exact) for dtype in (torch.float16, torch.bfloat16))
    monkeypatch.setattr(module, "FP16_LIMITS", (5, 5))
    assert 3 * limited < bfloat16 < relative(on_a_gpu(X, torch.float16), exact)


@pytest.mark.parametrize("shape", [(128, 256), (256, 128), (16, 16)])
@pytest.mark.parametrize("steps", range(9))
def test_any_number_of_steps(steps: int, shape: tuple[int, int]):
    X = randn(2, *shape)
    assert relative(on_a_gpu(X, torch.float16, steps=steps), quintic(X, steps, COEFFICIENTS)) < 1e-2


@pytest.mark.parametrize("shape", [(128, 256), (16, 20)])
@pytest.mark.parametrize("exponent", [-40, 40])
def test_fp16_does_not_depend_on_the_scale(exponent: int, shape: tuple[int, int]):
    """The norm is divided out before entries are rounded: a power of two changes nothing."""
    X = randn(2, *shape)
    assert torch.equal(on_a_gpu(X, torch.float16, eps=0.0), on_a_gpu(X * 2.0**exponent, torch.float16, eps=0.0))


@pytest.mark.parametrize("shape", [(128, 256), (256, 128), (16, 16)])
def test_zeros_stay_zeros(shape: tuple[int, int]):
    X = torch.cat([torch.zeros(1, *shape), randn(1, *shape)])
    found = on_a_gpu(X, torch.float16)
    assert (found[0] == 0).all()
    assert relative(found[1], quintic(X[1], 5, COEFFICIENTS)) < 1e-2


@pytest.mark.parametrize("shape", [(128, 256), (256, 128), (20, 16), (16, 20)])
def test_results_are_laid_out_as_what_is_given(shape: tuple[int, int]):
    """Those of a tall matrix, too: the passes behind need no copy. Strided stacks and transposed views are taken."""
    X = randn(4, *shape)
    assert on_a_gpu(X, torch.float16).is_contiguous()
    assert on_a_gpu(X.mT.contiguous().mT, torch.float16).mT.is_contiguous()
    assert torch.equal(on_a_gpu(X[::2], torch.float16), on_a_gpu(X[::2].clone(), torch.float16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_norm_is_found_where_it_is_not_given(dtype: torch.dtype):
    X = randn(2, 128, 256).to(dtype)
    with TensorCores():
        found = newton_schulz(X, dtype=torch.float16, factor=3.0)
    assert found.dtype == dtype
    assert relative(found, 3.0 * quintic(X, 5, COEFFICIENTS)) < 1e-2


def test_where_the_gram_matrix_pays():
    assert module._gram_pays(128, 256, torch.float16)
    assert not module._gram_pays(127, 1024, torch.float16)
    assert not module._gram_pays(768, 1535, torch.float16)
    assert not module._gram_pays(768, 3072, torch.bfloat16)
    for dtype in (torch.float32, torch.float64):
        assert module._gram_pays(4, 6, dtype)
        assert not module._gram_pays(4, 5, dtype)


def test_which_type_a_device_computes_in(monkeypatch: pytest.MonkeyPatch):
    assert dtype_of_products(torch.device("cuda", 0)) == torch.float16
    for fast, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(module, "fast_bfloat16", lambda device, fast=fast: fast)
        assert dtype_of_products(torch.device("cpu")) == expected
