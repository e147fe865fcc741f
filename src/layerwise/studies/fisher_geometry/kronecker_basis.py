"""The Kronecker-factored eigenbasis of a layer, and how near matrices are that are diagonal in it.

With factors ``A = U_A S_A U_Aᵀ`` of the inputs and ``G = U_G S_G U_Gᵀ`` of the gradients at the outputs, K-FAC is
``Q (S_G ⊗ S_A) Qᵀ`` with ``Q = U_G ⊗ U_A``, and EKFAC is ``Q diag(QᵀFQ) Qᵀ``: the diagonal that is nearest to F in this
basis (Theorem 1), whatever the age of the basis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from layerwise.curvature.build import fisher
from layerwise.foundations.kronecker import Kronecker
from layerwise.foundations.operators import Block

Matrix = Float[Tensor, "d d"]


def empirical_fisher(model: nn.Module, layer: str, x: Tensor, y: Tensor) -> Matrix:
    """The second moment of the gradients of one layer over examples, rows of its weight (with the bias) in order."""
    found = fisher(model, (x, y), "categorical", "block", "empirical", select=layer)
    return cast(Block, found.operators[layer]).as_matrix()  # type: ignore[attr-defined]


@dataclass(frozen=True)
class KroneckerBasis:
    """K-FAC of one layer, at the time at which its factors were taken."""

    Q: Matrix
    spectrum: Float[Tensor, "d"]
    """Products of the factors' eigenvalues."""

    @classmethod
    def of(cls, model: nn.Module, layer: str, x: Tensor, y: Tensor) -> KroneckerBasis:
        """From the empirical factors of a batch."""
        found = fisher(model, (x, y), "categorical", "kfac", "empirical", select=layer)
        operator = cast(Kronecker, found.operators[layer])  # type: ignore[attr-defined]
        d = operator.spectrum.numel()
        eye = torch.eye(d, dtype=operator.spectrum.dtype).reshape(d, *operator.shape)
        return cls(operator.rotate(eye).reshape(d, d), operator.spectrum.flatten())

    def kfac(self) -> Matrix:
        """The product of the factors."""
        return (self.Q * self.spectrum) @ self.Q.T

    def rotated(self, F: Matrix) -> Matrix:
        """``QᵀFQ``."""
        return self.Q.T @ F @ self.Q

    def scalings(self, F: Matrix) -> Float[Tensor, "d"]:
        """Mean squares of gradients along the basis."""
        return self.rotated(F).diagonal()

    def ekfac(self, F: Matrix) -> Matrix:
        """The basis with the scalings of F."""
        return (self.Q * self.scalings(F)) @ self.Q.T


def mean_correlation(M: Matrix) -> float:
    """The mean of ``|M_ij| / √(M_ii M_jj)`` over i ≠ j; entries that never have a gradient are left out.

    >>> mean_correlation(torch.tensor([[1.0, -0.5], [-0.5, 1.0]]))
    0.5
    """
    scale = M.diagonal().clamp_min(0).sqrt()
    kept = scale > 1e-12 * scale.max()
    C = (M[kept][:, kept] / scale[kept].outer(scale[kept])).abs()
    n = len(C)
    return float((C.sum() - C.diagonal().sum()) / (n * (n - 1)))


def relative_error(M: Matrix, F: Matrix) -> float:
    """``|M − F| / |F|``, in Frobenius norm."""
    return float((M - F).norm() / F.norm())


def spectral_distance(spectrum: Float[Tensor, "d"], F: Matrix) -> float:
    """The distance of sorted eigenvalues, relative to the size of those of F."""
    eigenvalues = torch.linalg.eigvalsh(F)
    return float((spectrum.sort().values - eigenvalues).norm() / eigenvalues.norm())
