"""Products ``XᵀX`` that compute one triangle and mirror it.

On a CPU the product of a wide matrix with itself is done by row panels of the upper triangle, about half of
the arithmetic. Panels of 128 rows were as fast as any other width or a recursive halving, and panels pay
above about 256 columns. A transposed X is copied first: panels of its columns, each packed anew by BLAS, took as long
as the whole product. On CUDA one large product is faster than many small ones.

K-FAC's factors are such products: second moments of rows, with what a bias adds to them.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe

PANEL_ROWS = 128
PLAIN_COLUMNS = 256
FEW_ROWS = 1024  # so few rows are multiplied as fast as panels are started, up to twice as many columns
CAST_ENTRIES = 1 << 22  # half-precision input is cast by chunks of rows of at most this many entries


def gram(X: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch n n"]:
    """The symmetric product ``XᵀX``, in float32 or better; on a CPU exactly symmetric, on CUDA to rounding.

    >>> gram(torch.tensor([[1.0, 2.0]])).tolist()
    [[1.0, 2.0], [2.0, 4.0]]
    """
    n = X.shape[-1]
    if X.device.type != "cpu" and X.dtype == _result_dtype(X.dtype):
        return X.mT @ X  # symmetric to rounding: mirroring would cost more launches than the product
    if X.device.type == "cuda" and X.ndim in (2, 3):
        return cross_product(X, X)
    total = torch.empty(*X.shape[:-2], n, n, dtype=_result_dtype(X.dtype), device=X.device)
    return mirror_(accumulate_gram(total, X, beta=0.0))


def cross_product(X: Float[Tensor, "*batch m n"], Y: Float[Tensor, "*batch m p"]) -> Float[Tensor, "*batch n p"]:
    """``XᵀY``, in float32 or better.

    >>> cross_product(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])).tolist()
    [[3.0], [6.0]]
    """
    single = _result_dtype(X.dtype)
    if X.dtype == single:
        return X.mT @ Y
    if X.device.type == "cuda" and X.ndim in (2, 3):  # half types: their products are exact in float32
        return (torch.mm if X.ndim == 2 else torch.bmm)(X.mT, Y, out_dtype=single)
    return X.mT.to(single) @ Y.to(single)


def accumulate_gram(
    total: Float[Tensor, "*batch n n"],
    X: Float[Tensor, "*batch m n"],
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Float[Tensor, "*batch n n"]:
    """Update the upper triangle of a running sum in place, and return it.

        total ← β total + α XᵀX

    Below the diagonal ``total`` is left undefined until `mirror_` is called, once, after the last batch.
    With β = 0 the former content is ignored, even if it is not finite.

    >>> total = torch.zeros(2, 2)
    >>> for row in ([1.0, 0.0], [1.0, 1.0]):
    ...     _ = accumulate_gram(total, torch.tensor([row]))
    >>> mirror_(total).tolist()
    [[2.0, 1.0], [1.0, 1.0]]
    """
    if total.dtype != _result_dtype(X.dtype) and total.dtype != torch.float64:
        raise InputError(
            describe(
                f"a total of {total.dtype} for X of {X.dtype}",
                "a total of float32 (float64 for X of float64) or better",
                "allocate the total in that type",
            )
        )
    rows = X.shape[-2]
    chunk = rows if X.dtype == total.dtype else max(1, CAST_ENTRIES * rows // max(1, X.numel()))
    if rows <= chunk:
        _add_product(total, X.to(total.dtype), alpha, beta)
        return total
    for start in range(0, rows, chunk):
        part = X[..., start : start + chunk, :].to(total.dtype)
        _add_product(total, part, alpha, beta if start == 0 else 1.0)
    return total


def mirror_(total: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """Copy the upper triangle onto the lower one in place, and return the matrix.

    >>> mirror_(torch.tensor([[1.0, 2.0], [9.0, 3.0]])).tolist()
    [[1.0, 2.0], [2.0, 3.0]]
    """
    n = total.shape[-1]
    width = PANEL_ROWS if total.device.type == "cpu" and n > 2 * PANEL_ROWS else max(n, 1)
    for i in range(0, n, width):
        j = min(n, i + width)
        corner = total[..., i:j, i:j]
        corner.copy_(corner.triu() + corner.triu(1).mT)
        total[..., j:, i:j] = total[..., i:j, j:].mT
    return total


def _add_product(total: Tensor, X: Tensor, alpha: float, beta: float) -> None:
    if X.ndim > 2 and X.shape[0] == 0:
        return
    if X.ndim == 2:
        n = X.shape[-1]
        plain = n <= (PLAIN_COLUMNS if len(X) > FEW_ROWS else 2 * PLAIN_COLUMNS)
        rows = PANEL_ROWS if X.device.type == "cpu" and not plain else max(n, 1)
        X = X if rows >= n else X.contiguous()
        for i in range(0, n, rows):
            j = min(n, i + rows)
            total[i:j, i:].addmm_(X[:, i:j].T, X[:, i:], alpha=alpha, beta=beta)
    elif X.ndim == 3 and (X.device.type != "cpu" or X.shape[-1] <= PLAIN_COLUMNS):
        total.baddbmm_(X.mT, X, alpha=alpha, beta=beta)
    else:
        for part, matrix in zip(total, X, strict=True):
            _add_product(part, matrix, alpha, beta)


def _result_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


# --- second moments of rows ------------------------------------------------------------------------------------------


def row_gram(x: Float[Tensor, "*lead P"]) -> Float[Tensor, "1 P P"]:
    """``Σ x xᵀ`` over all leading axes, in whatever order they are."""
    return gram(x.reshape(-1, x.shape[-1])).unsqueeze(0)


def grouped_gram(rows: Float[Tensor, "M K P"]) -> Float[Tensor, "K P P"]:
    """``Σ_m x xᵀ``, a group at a time."""
    return row_gram(rows[:, 0]) if rows.shape[1] == 1 else gram(rows.movedim(1, 0))


def linear_moment(x: Float[Tensor, "*lead I"], bias: bool) -> tuple[Float[Tensor, "1 J J"], int]:
    """``Σ x xᵀ`` and the number of rows; with a bias, x has a one as its last entry.

    >>> linear_moment(torch.tensor([[2.0], [3.0]]), True)
    (tensor([[[13.,  5.],
             [ 5.,  2.]]]), 2)
    """
    X = x.reshape(-1, x.shape[-1])
    if not bias:
        return gram(X).unsqueeze(0), len(X)
    n, w = X.shape[1], X.shape[1] + 1
    whole = torch.empty(1, w, w, dtype=_result_dtype(X.dtype), device=X.device)
    inner = whole.as_strided((n, n), (w, 1))  # one view each: slices of slices cost the host more than the device
    row = whole.as_strided((n,), (1,), n * w)
    if X.device.type == "cpu":
        mirror_(accumulate_gram(inner, X, beta=0.0))  # where it belongs at once: a copy is a tenth of the product
    else:
        inner.copy_(gram(X))
    torch.sum(X, 0, dtype=whole.dtype, out=row)
    whole.as_strided((n,), (w,), n).copy_(row)
    whole.as_strided((1,), (1,), n * w + n).fill_(len(X))
    return whole, len(X)


def bordered(total: Float[Tensor, "K I I"], sums: Float[Tensor, "K I"], count: int) -> Float[Tensor, "K J J"]:
    """The moment with the bias column: ``[[Σ aaᵀ, Σ a], [Σ aᵀ, n]]``."""
    k, i = sums.shape
    whole = total.new_empty(k, i + 1, i + 1)
    whole[:, :i, :i] = total
    whole[:, :i, i] = sums
    whole[:, i, :i] = sums
    whole[:, i, i] = count
    return whole
