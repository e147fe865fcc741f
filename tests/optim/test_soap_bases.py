"""SOAP's orthogonal iteration where factors are singular: what is decomposed, and how often."""

import pytest
import torch
from torch import Tensor

from layerwise.optim.reference import DEPENDENT, orthogonal_columns

F32 = torch.float32
SIZE = 12


def rotation(seed: int, n: int = SIZE) -> Tensor:
    return torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))[0]


def columns(values: list[float], near: float) -> tuple[Tensor, Tensor]:
    """``M U`` with the eigenvalues of M, and U: its eigenvectors, turned by a little; in float32."""
    turn = rotation(1)
    V = rotation(0)
    U = torch.linalg.qr(V + near * V @ turn)[0]
    M = V * torch.tensor(values, dtype=torch.float64) @ V.T
    return (M @ U).to(F32).unsqueeze(0), U.to(F32).unsqueeze(0)


def reference(MU: Tensor, U: Tensor, null: list[int]) -> Tensor:
    """One QR in float64 of the columns that are not null, and then those of U."""
    good = [i for i in range(SIZE) if i not in null]
    return torch.linalg.qr(torch.cat([MU[0][:, good], U[0][:, null]], -1).double())[0]


@pytest.mark.parametrize(
    ("values", "near", "null", "sizes"),
    [
        ([2.0**-i for i in range(12)], 1e-2, [], [12]),
        ([1.0] * 4 + [0.0] * 8, 0.0, [4, 5, 6, 7, 8, 9, 10, 11], [12]),  # small columns: known before
        ([1.0] * 9 + [0.0] * 3, 1e-2, [9, 10, 11], [12, 3]),  # dependent columns: found by QR, and few
        ([1.0] * 4 + [0.0] * 8, 1e-2, [4, 5, 6, 7, 8, 9, 10, 11], [12, 12]),
    ],
)
def test_a_basis_with_null_vectors_takes_no_more_work_than_it_needs(
    values: list[float], near: float, null: list[int], sizes: list[int], monkeypatch: pytest.MonkeyPatch
):
    MU, U = columns(values, near)
    qr, taken = torch.linalg.qr, list[int]()

    def counted(Z: Tensor) -> tuple[Tensor, Tensor]:
        taken.append(Z.shape[-1])
        return qr(Z)

    with monkeypatch.context() as patched:
        patched.setattr(torch.linalg, "qr", counted)
        Q, order = orthogonal_columns(MU, U, torch.arange(SIZE).unsqueeze(0), host_may_sync=True)
    assert taken == sizes
    assert order.tolist() == [list(range(SIZE))]
    torch.testing.assert_close(Q[0].T @ Q[0], torch.eye(SIZE), atol=2e-6, rtol=0)
    same = (Q[0].double() * reference(MU, U, null)).sum(0).abs()  # columns are known up to sign
    torch.testing.assert_close(same, torch.ones_like(same), atol=1e-4, rtol=0)


def test_null_vectors_are_put_last():
    MU, U = columns([1.0, 0.5, 0.0, 0.25] + [2.0**-i for i in range(3, 11)], 0.0)
    Q, order = orthogonal_columns(MU, U, torch.arange(SIZE).unsqueeze(0), host_may_sync=True)
    assert order.tolist() == [[0, 1, *range(3, SIZE), 2]]
    assert float((Q[0, :, -1] * U[0, :, 2]).sum().abs()) > 1 - 1e-5
    assert DEPENDENT * torch.finfo(F32).eps < 1e-4
