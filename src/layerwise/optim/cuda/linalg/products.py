"""Matrix products as the functions of this folder ask for them: precise or rough, with what is added to them.

A product ``identity·I + add + alpha·A B`` is one kernel where pairs of float16 are multiplied on a GPU by Triton
(`HalfPairProducts`), and a few calls of torch elsewhere.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.optim.cuda.linalg import split_fp16
from layerwise.optim.cuda.linalg.fp16 import Half, HalfPair
from layerwise.optim.cuda.triton import products as triton_products

Product = Callable[[Tensor, Tensor], Tensor]
Operand = Tensor | HalfPair | Half


@runtime_checkable
class Products(Protocol):
    """How matrices are multiplied. A result said to be `symmetric` is exactly that; `add` is symmetric then."""

    def prepared(self, X: Tensor | HalfPair, *, definite: bool = False) -> Any:
        """X as an operand of many products; `definite`: no entry is larger than the largest of the diagonal."""
        ...

    def precise(
        self,
        A: Any,
        B: Any,
        *,
        add: Tensor | None = None,
        alpha: int | float = 1,
        identity: int | float = 0,
        symmetric: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """``identity·I + add + alpha·A B``; written into `out`, which may be `add`, where that is given."""
        ...

    def rough(
        self, A: Any, B: Any, *, add: Tensor | None = None, alpha: int | float = 1, symmetric: bool = False
    ) -> Tensor:
        """The same for a product that only corrects, and need not be as precise."""
        ...


@dataclass(frozen=True)
class TorchProducts:
    """By `torch.matmul`, or whatever two functions are given.

    >>> A = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> TorchProducts().precise(A, A.mT, alpha=-1, identity=1).tolist()
    [[-4.0, -11.0], [-11.0, -24.0]]
    """

    matmul: Product = torch.matmul
    roughly: Product | None = None

    def prepared(self, X: Tensor | HalfPair, *, definite: bool = False) -> Tensor:
        """X as it is, a pair as its value."""
        return X.value() if isinstance(X, HalfPair) else X

    def precise(
        self,
        A: Float[Tensor, "..."],
        B: Float[Tensor, "..."],
        *,
        add: Float[Tensor, "..."] | None = None,
        alpha: int | float = 1,
        identity: int | float = 0,
        symmetric: bool = False,
        out: Float[Tensor, "..."] | None = None,
    ) -> Tensor:
        """``identity·I + add + alpha·A B``."""
        C = finished(self.matmul(A, B), add, alpha, identity, symmetric)
        return C if out is None else out.copy_(C)

    def rough(
        self,
        A: Float[Tensor, "..."],
        B: Float[Tensor, "..."],
        *,
        add: Float[Tensor, "..."] | None = None,
        alpha: int | float = 1,
        symmetric: bool = False,
    ) -> Tensor:
        """``add + alpha·A B`` by the rough product, if there is one."""
        return finished((self.roughly or self.matmul)(A, B), add, alpha, 0, symmetric)


@dataclass(frozen=True)
class HalfPairProducts:
    """Of pairs of float16 with 22 bits, and of halves with 11; operands that are not split are split first.

    >>> products = HalfPairProducts()
    >>> A = products.prepared(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> products.precise(A, A.mT, alpha=-1, identity=1, symmetric=True).tolist()
    [[-4.0, -11.0], [-11.0, -24.0]]
    """

    def prepared(self, X: Float[Tensor, "..."] | HalfPair, *, definite: bool = False) -> HalfPair:
        """X as a pair. The largest entry is torch's to find: a kernel for that is compiled for many sizes."""
        if isinstance(X, HalfPair):
            return X
        if not split_fp16.on_kernels(X):
            return split_fp16.split(X)
        diagonal = X.diagonal(dim1=-2, dim2=-1)
        amax = diagonal.amax(-1) if definite else torch.linalg.vector_norm(X, torch.inf, dim=(-2, -1))
        return triton_products.split(X, amax=amax)

    def precise(
        self,
        A: Float[Tensor, "..."] | HalfPair,
        B: Float[Tensor, "..."] | HalfPair,
        *,
        add: Float[Tensor, "..."] | None = None,
        alpha: int | float = 1,
        identity: int | float = 0,
        symmetric: bool = False,
        out: Float[Tensor, "..."] | None = None,
    ) -> Tensor:
        """``identity·I + add + alpha·A B``."""
        left, right = self.prepared(A), self.prepared(B)
        if _fused(left, right, add):
            return triton_products.pair_product(
                left, right, add=add, alpha=alpha, identity=identity, symmetric=symmetric, out=out
            )
        C = finished(split_fp16.product(left, right), add, alpha, identity, symmetric)
        return C if out is None else out.copy_(C)

    def rough(
        self,
        A: Float[Tensor, "..."] | HalfPair | Half,
        B: Float[Tensor, "..."] | HalfPair | Half,
        *,
        add: Float[Tensor, "..."] | None = None,
        alpha: int | float = 1,
        symmetric: bool = False,
    ) -> Tensor:
        """``add + alpha·A B`` of first halves."""
        left, right = split_fp16.halved(A), split_fp16.halved(B)
        if _fused(left, right, add):
            return triton_products.pair_product(left, right, add=add, alpha=alpha, symmetric=symmetric)
        return finished(split_fp16.rough_product(left, right), add, alpha, 0, symmetric)


TORCH = TorchProducts()
HALF_PAIRS = HalfPairProducts()


def finished(
    C: Float[Tensor, "*batch m n"],
    add: Float[Tensor, "..."] | None = None,
    alpha: int | float = 1,
    identity: int | float = 0,
    symmetric: bool = False,
) -> Float[Tensor, "*batch m n"]:
    """``identity·I + add + alpha·C``, made exactly symmetric on demand, by torch.

    >>> finished(torch.ones(2, 2), torch.tensor([[0.0, 1.0], [1.0, 0.0]]), alpha=2, identity=3).tolist()
    [[5.0, 3.0], [3.0, 5.0]]
    """
    if add is not None:
        C = torch.add(add, C, alpha=alpha)
    elif alpha != 1:
        C = C * alpha
    if identity != 0:
        C = C + identity * torch.eye(C.shape[-1], dtype=C.dtype, device=C.device)
    return (C + C.mT) / 2 if symmetric else C


def _fused(A: HalfPair | Half, B: HalfPair | Half, add: Tensor | None) -> bool:
    return triton_products.takes(A, B) and (add is None or (add.stride(-1) == 1 and add.shape[:-2] == A.shape[:-2]))
