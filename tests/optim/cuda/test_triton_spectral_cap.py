"""The bound on singular values by Triton's kernels, in its interpreter on the CPU, against torch in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from interpreter import INTERPRETED, only_interpreted
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


@pytest.fixture
def products_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies the bits of such numbers as integers: as what they stand for, it does here."""
    if not INTERPRETED:
        return
    from triton.language import bfloat16, float32  # pyright: ignore[reportMissingImports]
    from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

    multiply = interpreter.InterpreterBuilder.create_dot

    def single(x: Any) -> Any:
        if x.dtype.scalar != bfloat16:
            return x
        values = torch.from_numpy(x.data.astype("int16")).view(torch.bfloat16).float()
        return interpreter.TensorHandle(values.numpy(), float32)

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return multiply(self, single(a), single(b), *others)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


CASES = [
    (torch.float16, 1e3),
    (torch.float16, 2e5),  # products with ±1 are larger than float16 holds
    (torch.bfloat16, 1e-8),
    (torch.bfloat16, 1e8),
    (torch.float32, 1e-8),
    (torch.float32, 1e8),
]


@only_interpreted
@pytest.mark.usefixtures("products_in_bfloat16")
@pytest.mark.parametrize(("O", "I"), [(96, 70), (64, 130), (200, 64)])
@pytest.mark.parametrize(("dtype", "size"), CASES)
def test_as_torch_cuts(O: int, I: int, dtype: torch.dtype, size: float):
    D = peaked(O, I, size, dtype)
    expected, found = capped(D.double(), norms(D), (O, I)), D.clone()
    before = cap_(found, most_of_norm((O, I)))
    torch.testing.assert_close(before.double(), norms(D), rtol=1e-5, atol=0)
    bound = 5e-3 if dtype == torch.bfloat16 else 5e-4  # what rounding leaves of D itself
    assert bool((norms(found.double() - expected) < bound * norms(expected)).all())
    assert bool((norms(expected)[[0, 2]] < 0.9 * norms(D)[[0, 2]]).all())
    assert torch.equal(found[1], D[1])


@only_interpreted
@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_zeros_and_what_is_not_finite(value: float, dtype: torch.dtype):
    """It stays, and the others are cut."""
    D = peaked(64, 64, 1.0, dtype)
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


@only_interpreted
def test_an_entry_that_grows_by_the_cut_stays_finite():
    """Where a strong row and a strong column cross."""
    D = torch.zeros(1, 256, 256)
    D[:, 5], D[:, :, 9], D[:, 5, 9] = 6e4, 6e4, -6e4
    expected = capped(D.double(), norms(D), (256, 256))
    assert float(expected.abs().max()) > 65504
    found = D.half()
    cap_(found, most_of_norm((256, 256)))
    assert bool(torch.isfinite(found).all())
    torch.testing.assert_close(found.double(), expected.clamp(-65504, 65504), rtol=2e-3, atol=64.0)
