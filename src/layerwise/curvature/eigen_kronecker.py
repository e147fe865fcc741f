"""EKFAC: the eigenbasis of K-FAC, with each eigenvalue replaced by the mean square of gradients along it.

``s = Σ_n (U_Gᵀ (Σ_s g aᵀ) U_A)² / N``: the best diagonal in that basis, so that the trace is exact and the
Frobenius error never above K-FAC's (George et al. 2018). Two passes: factors first, then scalings.
"""

import torch
from torch import Tensor

from layerwise.curvature.kronecker import KroneckerApproximation
from layerwise.foundations.errors import NumericalError
from layerwise.foundations.kronecker import EigenKronecker
from layerwise.foundations.linalg import guarded_eigh
from layerwise.foundations.operators import BlockOperator
from layerwise.layers.io.layer_io import LayerIO
from layerwise.layers.io.standard import Standard
from layerwise.layers.table import LayerSpec


class EigenKroneckerApproximation(KroneckerApproximation):
    """K-FAC's factors, then scalings in their basis."""

    name = "ekfac"
    passes = 2

    def refresh(self) -> None:
        """Decompose the factors (their scale does not matter to the basis)."""
        A, G = self.factors(1.0)
        name = f"layer {self.spec.name!r}"
        self.s_G, self.U_G = guarded_eigh(G, name=f"{name}, output factor G")
        try:
            self.s_A, self.basis = A.eigh
        except NumericalError as error:
            raise NumericalError(f"Layer {self.spec.name!r}: {error}") from error
        vectors = self.basis.vectors
        if vectors is not None and self.basis.taps > 1:
            eye = torch.eye(self.basis.taps, dtype=vectors.dtype, device=vectors.device)
            vectors = torch.stack([torch.kron(u.contiguous(), eye) for u in vectors])
        self.U_A = vectors
        self.scalings = self.zeros(*self.spec.form.shape)

    def correct(self, io: LayerIO) -> None:
        """Add squared gradients in the basis."""
        for chunk in io.chunks():
            assert isinstance(chunk, Standard)
            self.scalings += chunk.rotated_squared_sum(self.U_A, self.U_G)

    def sums(self, count: float) -> list[tuple[Tensor, float]]:
        """None: the factors were used up by `refresh`."""
        return []

    def finish(self, count: float) -> BlockOperator:
        """``Q diag(s) Qᵀ``."""
        split = self.options.damping_split or "exact"
        return EigenKronecker(self.basis, self.U_G, self.scalings / count, self.s_A, self.s_G / count, split)

    def diagonals(self) -> list[Tensor] | None:
        """None: bases and scalings are no second moments."""
        return None

    @classmethod
    def bytes_needed(cls, spec: LayerSpec, itemsize: int) -> int:
        """Factors, bases and scalings."""
        return 2 * super().bytes_needed(spec, itemsize) + 2 * spec.form.numel() * itemsize
