"""The Gauss–Newton matrix of one layer, ``H = E[M_x ⊗ x xᵀ]``, from rows of its Jacobian."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.device import require
from layerwise.foundations.errors import InputError, describe
from layerwise.structure.eigenpairs import Eigenpairs, dense_pairs
from layerwise.structure.one_layer import OneLayer
from layerwise.structure.operator import LayerOperator
from layerwise.structure.pieces import Factored, Piece
from layerwise.structure.rows import LayerRows

GRAM = 6000
"""Up to so many rows, their Gram matrix is decomposed instead of a larger Hessian."""


@dataclass(eq=False, repr=False)
class GaussNewton(LayerOperator):
    """``1/N Σ_n J_nᵀ A_n J_n`` restricted to one layer, from rows ``√A J``."""

    rows: LayerRows
    agreement: float | None = None
    """Largest relative difference to the Hessian on a few examples, where that was looked at."""

    @property
    def layer(self) -> OneLayer:  # type: ignore[override]
        """Its layer."""
        return self.rows.layer

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """What products are made in."""
        return self.rows.dtype

    @property
    def name(self) -> str:  # type: ignore[override]
        """Which matrix it is."""
        return "Gauss–Newton matrix" if self.agreement is None else "Hessian (= Gauss–Newton matrix)"

    @property
    def examples(self) -> int:
        """N."""
        return self.rows.examples

    @property
    def stored(self) -> bool:
        """Whether rows are kept; if not, every product goes over the data."""
        return self.rows.pieces is not None

    def _times(self, X: Float[Tensor, "d b"]) -> Float[Tensor, "d b"]:
        return self.rows.times(X)

    def trace(self) -> Float[Tensor, ""]:
        """Exact: squared norms of rows."""
        return torch.tensor(self.rows.square / self.rows.count, dtype=torch.float64)

    def dense(self) -> Float[Tensor, "d d"]:
        """The matrix itself, in float64."""
        d = self.numel()
        require(
            16 * d * d,
            self.layer.sweep.memory,
            f"the dense Hessian of {d} entries",
            "use products and eigenpairs, or allow more with memory=",
        )
        return self._dense.clone()

    @cached_property
    def _dense(self) -> Tensor:
        d = self.numel()
        total = torch.zeros(d, d, dtype=torch.float64, device=self.device)
        self.rows.each(lambda part: part.add_outer_(total), "dense")
        return total / self.rows.count

    def _method(self, k: int) -> str:
        if self._fits_dense():
            return "dense"
        return "gram" if k <= self.rows.total <= GRAM and self._pieces_for_gram() else "lanczos"

    def _pieces_for_gram(self) -> list[Piece] | None:
        """One piece whose Gram matrix has a closed form."""
        pieces = self.rows.pieces
        if pieces is None or len(pieces) != 1:
            return None
        only = pieces[0]
        return pieces if not isinstance(only, Factored) or only.positions == 1 else None

    def gram(self) -> Float[Tensor, "M M"]:
        """``F Fᵀ`` with ``H = Fᵀ F``: rows against rows, in float64; M = examples · cotangents."""
        pieces = self._pieces_for_gram()
        if pieces is None or self.rows.total > 4 * GRAM:
            raise InputError(
                describe(
                    f"the Gram matrix of {self.rows.total} rows",
                    f"up to {4 * GRAM} rows that are kept, of a layer with one position",
                    'use method="lanczos", or fewer examples',
                )
            )
        only = pieces[0]
        if isinstance(only, Factored) and isinstance(only.a, Tensor):
            n, v = only.examples, only.vectors
            k, o, i = only.shape
            a, g = only.a.reshape(n, k, i).double(), only.g.reshape(n * v, k, o).double()
            found = torch.zeros(n * v, n * v, dtype=torch.float64, device=a.device)
            for group in range(k):
                inputs = a[:, group] @ a[:, group].mT
                of_group = (g[:, group] @ g[:, group].mT).view(n, v, n, v)
                found += (of_group * inputs.view(n, 1, n, 1)).view(n * v, n * v)
        else:
            R = only.written().double()
            found = R @ R.mT
        return found / self.rows.count

    def _gram_pairs(self, k: int) -> Eigenpairs:
        values, vectors, _ = dense_pairs(self.gram(), min(k, self.rows.total))
        if k > len(values) or float(values[-1]) <= 1e-12 * float(values[0]):
            return self.eigenpairs(k, method="lanczos")  # some of them are in the null space, which rows do not span
        assert self.rows.pieces is not None
        only = self.rows.pieces[0]
        C = vectors.view(only.examples, only.vectors, k) / (values * self.rows.count).sqrt()
        H = only.pull(C.to(self.dtype)).reshape(self.numel(), k).double()
        H = H / torch.linalg.vector_norm(H, dim=0)
        residuals = torch.linalg.vector_norm(self._times(H) - H * values, dim=0)
        return Eigenpairs(values, H, residuals)
