"""`LayerOperator`: a symmetric matrix on the weight of one layer, by its products."""

from abc import abstractmethod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.arithmetic import OwnArithmetic
from layerwise.foundations.errors import InputError, describe, not_one_of
from layerwise.foundations.linalg import Estimate, frobenius_squared, squared_norm
from layerwise.foundations.random import stream
from layerwise.layers.capture.model_call import in_own_arithmetic
from layerwise.structure.eigenpairs import DENSE, Eigenpairs, check_count, dense_pairs, lanczos_pairs
from layerwise.structure.one_layer import OneLayer


class LayerOperator(OwnArithmetic, guard=in_own_arithmetic):
    """A symmetric matrix on the weight ``W [m, n]`` of one layer, in the order of ``W.flatten()``.

    Rows of W are outputs, as `Linear` and convolutions store it (`Embedding` stores the transpose). Where the bias
    takes part it is the last column.
    """

    layer: OneLayer
    dtype: torch.dtype
    name: str
    """Which matrix it is."""

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(m, n) of the layer's weight; outputs of all groups together."""
        k, o, i = self.layer.shape
        return k * o, i

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix itself, (mn, mn)."""
        d = self.numel()
        return d, d

    def numel(self) -> int:
        """mn."""
        m, n = self.matrix_shape
        return m * n

    @property
    def device(self) -> torch.device:
        """Of the model."""
        return self.layer.device

    @abstractmethod
    def _times(self, X: Float[Tensor, "d b"]) -> Float[Tensor, "d b"]:
        """Product with a block of columns."""

    @abstractmethod
    def dense(self) -> Float[Tensor, "d d"]:
        """The matrix itself, in float64."""

    @abstractmethod
    def trace(self) -> Tensor:
        """Sum of the eigenvalues."""

    def __matmul__(self, X: Tensor) -> Tensor:
        """``H X`` for a vector [mn], columns [mn, b] or a matrix [m, n]."""
        d = self.numel()
        if not isinstance(X, Tensor) or not (X.shape == self.matrix_shape or (X.ndim in (1, 2) and X.shape[0] == d)):
            given = f"shape {tuple(X.shape)}" if isinstance(X, Tensor) else type(X).__name__
            raise InputError(
                describe(f"a right-hand side of {given}", f"[{d}], [{d}, b] or {list(self.matrix_shape)}", "reshape it")
            )
        return self._times(X.reshape(d, -1).to(self.device)).reshape(X.shape)

    def eigenpairs(
        self, k: int, *, method: str | None = None, tol: float = 1e-6, max_steps: int = 500, seed: int = 0
    ) -> Eigenpairs:
        """The k largest eigenvalues, descending, their vectors ``[mn, k]`` and residuals ``‖H h − λ h‖``.

        Args:
            k: how many.
            method: "dense" (float64), "gram" (through the Gram matrix of rows), "lanczos" (full reorthogonalisation),
                or None: the first that suits the sizes.
            tol: Lanczos stops when residuals are ``≤ tol λ_1``, or at the precision of the products.
            max_steps: Lanczos stops after so many products with blocks of 16 columns; residuals tell.
            seed: of Lanczos' first columns.
        """
        check_count(k, self.numel())
        method = method or self._method(k)
        if method == "dense":
            return dense_pairs(self.dense(), k)
        if method == "gram":
            return self._gram_pairs(k)
        if method != "lanczos":
            raise InputError(not_one_of("method", method, ("dense", "gram", "lanczos")))
        options: dict[str, Any] = {"tol": tol, "max_steps": max_steps, "seed": seed}
        return lanczos_pairs(self._times, self.numel(), k, dtype=self.dtype, device=self.device, **options)

    def _method(self, k: int) -> str:
        return "dense" if self._fits_dense() else "lanczos"

    def _fits_dense(self) -> bool:
        return self.numel() <= DENSE and 16 * self.numel() ** 2 <= self.layer.sweep.memory

    def _gram_pairs(self, k: int) -> Eigenpairs:
        raise InputError(describe('method="gram" of a Hessian by autograd', '"dense" or "lanczos"', "choose one"))

    def frobenius(self, samples: int = 64, seed: int = 0) -> Tensor:
        """``‖H‖_F``: exact for up to 3000 entries, else an estimate with its standard error."""
        if self.numel() <= DENSE:
            return squared_norm(self.dense()).sqrt()
        found = frobenius_squared(
            self._times, self.numel(), samples, stream(seed, "frobenius"), self.dtype, self.device, chunk=16
        )
        return root(found)

    def norm(self) -> Float[Tensor, ""]:
        """The spectral norm, which is the largest eigenvalue where there are no negative ones."""
        return self.eigenpairs(1).values[0]

    def __repr__(self) -> str:
        m, n = self.matrix_shape
        return f"{self.name} of layer {self.layer.spec.name!r}, a {m} × {n} weight"


def root(square: Estimate) -> Estimate:
    """The square root of an estimate, its error by the slope."""
    value = float(square) ** 0.5
    error = square.standard_error / (2 * value) if value else 0.0
    return Estimate(torch.tensor(value, dtype=torch.float64), standard_error=error, samples=square.samples)
