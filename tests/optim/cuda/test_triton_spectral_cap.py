"""The bound on singular values by Triton's kernels, in its interpreter on the CPU, against torch in float64."""

import pytest
import torch
from torch import Tensor

from interpreter import only_interpreted
from layerwise.optim.cuda.triton.spectral_cap import cap_, fits
from layerwise.optim.step.spectral_cap import capped, most_of_norm
from random_tensors import randn

pytestmark = pytest.mark.interpreted


def norms(D: Tensor) -> Tensor:
    return torch.linalg.vector_norm(D.double().flatten(1), dim=1)


def peaked(O: int, I: int, size: float, dtype: torch.dtype) -> Tensor:
    """Noise of norm 1, and one direction besides, in the first and the last of three matrices; times a number."""
    D, u, v = (randn(3, *shape, seed=seed).double() for seed, shape in enumerate(((O, I), (O, 1), (1, I))))
    D, R = (X / norms(X).view(-1, 1, 1) for X in (D, u @ v))
    return (size * (D + torch.tensor([2.0, 0.0, 1.0]).view(-1, 1, 1) * R)).to(dtype)


@only_interpreted
@pytest.mark.parametrize(("O", "I"), [(96, 70), (64, 130), (200, 64)])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 1e3), (torch.float32, 1e-8), (torch.float32, 1e8)])
def test_as_torch_cuts(O: int, I: int, dtype: torch.dtype, size: float):
    D = peaked(O, I, size, dtype)
    expected, found = capped(D.double(), norms(D), (O, I)), D.clone()
    before = cap_(found, most_of_norm((O, I)))
    torch.testing.assert_close(before.double(), norms(D), rtol=1e-5, atol=0)
    assert bool((norms(found.double() - expected) < 5e-4 * norms(expected)).all())
    assert bool((norms(expected)[[0, 2]] < 0.9 * norms(D)[[0, 2]]).all())
    assert torch.equal(found[1], D[1])


@only_interpreted
@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_zeros_and_what_is_not_finite(value: float):
    """It stays, and the others are cut."""
    D = peaked(64, 64, 1.0, torch.float32)
    D[2] = value
    found = D.clone()
    cap_(found, most_of_norm((64, 64)))
    assert float(norms(found)[0]) < 0.9 * float(norms(D)[0])
    torch.testing.assert_close(found[1:], D[1:], rtol=0, atol=0, equal_nan=True)


def test_what_the_kernels_take():
    assert fits(torch.zeros(2, 64, 100))
    assert not fits(torch.zeros(2, 63, 100))
    assert not fits(torch.zeros(2, 64, 100, dtype=torch.float64))
    assert not fits(torch.zeros(2, 100, 64).mT)
