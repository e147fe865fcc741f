"""Stacks of more matrices than one launch takes: torch treats them, on any device."""

import pytest
import torch
from torch import Tensor

from layerwise.optim.cuda import rows, storage
from layerwise.optim.cuda.linalg import jacobi, moments_in_new_basis, packed, split_fp16
from layerwise.optim.cuda.linalg.orthogonal import basis_half
from layerwise.optim.cuda.rows import Rows, average_rows_, together
from layerwise.optim.cuda.triton import products as triton_products
from layerwise.optim.rule import Context
from random_tensors import randn as normal

K, N = 3, 64
MODULES = (split_fp16, moments_in_new_basis, packed, jacobi, triton_products, storage, rows)


def definite() -> Tensor:
    X = normal(K, N, 2 * N)
    return X @ X.mT / N


def turns() -> list[Tensor]:
    U = basis_half(torch.linalg.qr(normal(K, N, N))[0])
    M, V, out = normal(K, N, 8), normal(K, N, 8).square(), torch.zeros(K, N, N).half()
    moments_in_new_basis.rotate_moments_(
        M, V, moments_in_new_basis.rotation_between(U, basis_half(torch.eye(N).repeat(K, 1, 1))), "left"
    )
    moments_in_new_basis.put_(out, U.hi, torch.tensor([True, False, True]))
    return [M, V, out, moments_in_new_basis.squared_rows(U).hi]


def tiles() -> list[Tensor]:
    P, weight = packed.pack(definite()), torch.tensor([0.5, 0.0, 1.0])
    packed.ema_(P, definite().mul(2), weight)
    pair = packed.split(P)
    return [P, packed.unpack(P), packed.diagonal(P), pair.hi, pair.scale]


def sweeps() -> list[Tensor]:
    U, values, couplings = jacobi.tracked_basis(definite(), basis_half(torch.linalg.eigh(definite())[1]))
    return [U.hi, values, couplings]


def kept() -> list[Tensor]:
    matrix = storage.StoredMatrix.keep(torch.eye(N).repeat(K, 1, 1), 2)
    matrix.write(slice(0, K), definite(), torch.tensor([True, False, True]))
    pair = storage.operand_of(definite(), definite().flatten(1).amax(1))
    return [*matrix.tensors("P_root").values(), pair.value()]


def means() -> list[Tensor]:
    mean, count = definite(), torch.ones(K)
    found = together([Rows(normal(5, N, seed=k).bfloat16(), torch.bfloat16) for k in range(K)], [5] * K)
    assert found is not None
    average_rows_(mean, count, found, 0.9, Context(1, 0.0, 0.0, False, {}))
    return [mean, count]


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("call", [turns, tiles, sweeps, kept, means], ids=lambda call: call.__name__)
def test_more_than_a_launch_takes(call, monkeypatch: pytest.MonkeyPatch):
    """Where kernels could run: none does."""
    expected = call()
    for module in MODULES:
        if "available" in vars(module):
            monkeypatch.setattr(module, "available", lambda device: True)
        if "MOST_MATRICES" in vars(module):
            monkeypatch.setattr(module, "MOST_MATRICES", K - 1)
    for found, same in zip(call(), expected, strict=True):
        torch.testing.assert_close(found, same, rtol=1e-6, atol=1e-7)
