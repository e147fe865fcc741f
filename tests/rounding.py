"""Another processor's rounding, on any machine: the same products, sums and decompositions, in another order.

BLAS and LAPACK differ from one processor to the next in the order of their sums, and in what they return where a
problem has many answers: signs of vectors, bases of an eigenspace. `OtherOrder` makes such answers here. Every one of
them is as good as torch's own: contractions and sums run over a permuted axis (a product with an identity stays
exact), decompositions are those of a permuted matrix, and eigenvectors whose eigenvalues agree to rounding are rotated.
`LAYERWISE_ROUNDING=<seed>` runs the tests under it, see `conftest.py` and `variants.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

VARIABLE = "LAYERWISE_ROUNDING"
aten = torch.ops.aten


class OtherOrder(TorchDispatchMode):
    """Under this mode torch rounds as another machine might; a seed is a machine.

    >>> A, B = torch.rand(2, 9, 1000).unbind()
    >>> with OtherOrder(1):
    ...     C = A @ B.T
    >>> bool((C != A @ B.T).any()), torch.allclose(C, A @ B.T)
    (True, True)
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = _OTHERS.get(func)
        return func(*args, **(kwargs or {})) if made is None else made(self, func, *args, **(kwargs or {}))

    def order(self, size: int, device: Any = None) -> Tensor:
        """A permutation that a machine always uses for this size."""
        g = torch.Generator().manual_seed(1000 * self.seed + size)
        return torch.randperm(size, generator=g).to(device)

    def rotation(self, size: int, like: Tensor) -> Tensor:
        """An orthogonal matrix, likewise."""
        g = torch.Generator().manual_seed(1000 * self.seed + size)
        return torch.linalg.qr(torch.randn(size, size, generator=g, dtype=torch.float64))[0].to(like)


_OTHERS: dict[Any, Callable[..., Any]] = {}


def _instead_of(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def enter(made: Callable[..., Any]) -> Callable[..., Any]:
        _OTHERS.update(dict.fromkeys(ops, made))
        return made

    return enter


@_instead_of(aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default)
def _product(mode: OtherOrder, func: Any, A: Tensor, B: Tensor) -> Tensor:
    p = mode.order(A.shape[-1], A.device)
    return func(A.index_select(-1, p), B.index_select(-2 if B.ndim > 1 else -1, p))


@_instead_of(aten.addmm.default, aten.baddbmm.default)
def _added(mode: OtherOrder, func: Any, C: Tensor, A: Tensor, B: Tensor, **scalars: Any) -> Tensor:
    p = mode.order(A.shape[-1], A.device)
    return func(C, A.index_select(-1, p), B.index_select(-2, p), **scalars)


@_instead_of(aten.mm.out, aten.bmm.out)
def _product_out(mode: OtherOrder, func: Any, A: Tensor, B: Tensor, *, out: Tensor) -> Tensor:
    p = mode.order(A.shape[-1], A.device)
    return func(A.index_select(-1, p), B.index_select(-2, p), out=out)


@_instead_of(aten.sum.dim_IntList, aten.mean.dim)
def _summed(mode: OtherOrder, func: Any, X: Tensor, dims: Any, *rest: Any, **named: Any) -> Tensor:
    for dim in dims or range(X.ndim):
        X = X.index_select(dim, mode.order(X.shape[dim], X.device)) if X.ndim else X
    return func(X, dims, *rest, **named)


@_instead_of(aten.sum.default, aten.mean.default)
def _total(mode: OtherOrder, func: Any, X: Tensor, **named: Any) -> Tensor:
    return func(X.reshape(-1)[mode.order(X.numel(), X.device)], **named)


@_instead_of(aten.convolution.default)
def _convolution(mode: OtherOrder, func: Any, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    transposed, groups = rest[4], rest[6]
    if groups == 1:
        p = mode.order(x.shape[1], x.device)
        x, weight = x.index_select(1, p), weight.index_select(0 if transposed else 1, p)
    return func(x, weight, *rest)


@_instead_of(aten.convolution_backward.default)
def _convolution_backward(mode: OtherOrder, func: Any, dy: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
    p = mode.order(len(x), x.device)
    dx, *others = func(dy[p], x[p], weight, *rest)
    return (dx if dx is None else dx[p.argsort()], *others)


@_instead_of(aten._linalg_eigh.default)
def _eigh(mode: OtherOrder, func: Any, M: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
    n = M.shape[-1]
    if M.numel() == 0 or not bool(torch.isfinite(M).all()):
        return func(M, *rest, **named)
    p = mode.order(n, M.device)
    values, vectors = func(M.index_select(-1, p).index_select(-2, p), *rest, **named)
    if vectors.numel() == 0:
        return values, vectors
    vectors = vectors.index_select(-2, p.argsort())
    for s, U in zip(values.reshape(-1, n), vectors.reshape(-1, n, n), strict=True):
        near = 4 * torch.finfo(s.dtype).eps * s.abs().max()  # a rotation within so much is no more than LAPACK's error
        start = 0
        for stop in range(1, n + 1):
            if stop == n or s[stop] - s[start] > near:
                U[:, start:stop] = U[:, start:stop] @ mode.rotation(stop - start, U)
                start = stop
    return values, vectors


@_instead_of(aten.linalg_qr.default)
def _qr(mode: OtherOrder, func: Any, A: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    p = mode.order(A.shape[-2], A.device)
    Q, R = func(A.index_select(-2, p), *rest)
    return Q.index_select(-2, p.argsort()), R


@_instead_of(aten.linalg_cholesky_ex.default)
def _cholesky(mode: OtherOrder, func: Any, M: Tensor, **named: Any) -> Any:
    """Cholesky's has one answer, but for rounding: that of a matrix which differs by less than an entry's last bit."""
    g = torch.Generator().manual_seed(1000 * mode.seed + M.shape[-1])
    signs = torch.randint(-1, 2, M.shape[-2:], generator=g).to(M)
    signs = signs.tril() + signs.tril(-1).mT
    return func(M * (1 + torch.finfo(M.dtype).eps / 2 * signs), **named)
