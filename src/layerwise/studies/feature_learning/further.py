"""Further members of the family, for comparison: FOOF, LocoProp, EKFAC, Shampoo, other norms (Appendix D)."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.studies.feature_learning.algorithms import Algorithm, Alternating, Weights
from layerwise.studies.feature_learning.batch import Batch, solve_right
from layerwise.studies.feature_learning.covariance import power
from layerwise.studies.feature_learning.two_layer import grad_F, grad_G, times_moment


@dataclass(frozen=True, kw_only=True)
class BothLayers(Algorithm):
    """Eq. (5) without Ortho: one rule for both layers, G on the first batch, F on the second at the new G."""

    @abstractmethod
    def direction(
        self, g: Float[Tensor, "*r m d"], S: Float[Tensor, "*s d d"], lr: Float[Tensor, "*q 1 1"]
    ) -> Float[Tensor, "*r m d"]:
        """From a layer's gradient and its inputs' second moment to what is subtracted, times η."""

    def step(self, w: Weights, lr: Float[Tensor, "*r 1 1"], first: Batch, second: Batch) -> Weights:
        """One iteration."""
        G = w.G - lr * self.direction(grad_G(w.F, w.G, first), first.Sx, lr)
        Sz = times_moment(G, second.Sx) @ G.mT
        return Weights(w.F - lr * self.direction(grad_F(w.F, G, second), Sz, lr), G)


@dataclass(frozen=True, kw_only=True)
class FOOF(BothLayers):
    """g (S + λI)⁻¹. (The objective printed for it has this minimiser with λ/2; the update is the definition here.)"""

    ridge: float | int = 1e-3

    def direction(
        self, g: Float[Tensor, "*r m d"], S: Float[Tensor, "*s d d"], lr: Float[Tensor, "*q 1 1"]
    ) -> Float[Tensor, "*r m d"]:
        """g (S + λI)⁻¹."""
        return solve_right(S + self.ridge * _eye(S), g)


@dataclass(frozen=True, kw_only=True)
class LocoProp(BothLayers):
    """g (I + ηS)⁻¹, which is FOOF with rate 1 and λ = 1/η."""

    def direction(
        self, g: Float[Tensor, "*r m d"], S: Float[Tensor, "*s d d"], lr: Float[Tensor, "*q 1 1"]
    ) -> Float[Tensor, "*r m d"]:
        """g (I + ηS)⁻¹."""
        return solve_right(_eye(S) + lr * S, g)


@dataclass(frozen=True, kw_only=True)
class Shampoo(BothLayers):
    """(ggᵀ)^-¼ g (gᵀg)^-¼ of the batch's gradient, with eigenvalues of ggᵀ and gᵀg no smaller than `floor`."""

    floor: float | int = 1e-12

    def direction(
        self, g: Float[Tensor, "*r m d"], S: Float[Tensor, "*s d d"], lr: Float[Tensor, "*q 1 1"]
    ) -> Float[Tensor, "*r m d"]:
        """U diag(s / max(s², floor)^½) Vᵀ."""
        U, s, Vh = _svd(g)
        return (U * (s / s.square().clamp(min=self.floor).sqrt()).unsqueeze(-2)) @ Vh


@dataclass(frozen=True, kw_only=True)
class Sign(BothLayers):
    """sign(g); `ideal`, that is steepest descent in the largest entry, times Σ|g|."""

    ideal: bool = False

    def direction(
        self, g: Float[Tensor, "*r m d"], S: Float[Tensor, "*s d d"], lr: Float[Tensor, "*q 1 1"]
    ) -> Float[Tensor, "*r m d"]:
        """sign(g), or ‖g‖₁ sign(g)."""
        return g.sign() * (g.abs().sum((-2, -1), keepdim=True) if self.ideal else 1.0)


@dataclass(frozen=True, kw_only=True)
class Spectral(BothLayers):
    """UVᵀ of g = USVᵀ, as Muon; `ideal`, that is steepest descent in the operator norm, times tr S."""

    ideal: bool = False

    def direction(
        self, g: Float[Tensor, "*r m d"], S: Float[Tensor, "*s d d"], lr: Float[Tensor, "*q 1 1"]
    ) -> Float[Tensor, "*r m d"]:
        """UVᵀ, or ‖g‖⋆ UVᵀ."""
        U, s, Vh = _svd(g)
        return U @ Vh * (s.sum(-1)[..., None, None] if self.ideal else 1.0)


@dataclass(frozen=True, kw_only=True)
class MahalanobisSpectral(Alternating):
    """Steepest descent in ‖P^½ M Q^½‖: tr(S) P^-½ UVᵀ Q^-½ with USVᵀ = P^-½ ∇_G Q^-½, P = FᵀF, Q = Sx."""

    @property
    def inverts_inputs(self) -> bool:
        """Always."""
        return True

    def direction(
        self, F: Float[Tensor, "*r dy k"], G: Float[Tensor, "*r k dx"], batch: Batch
    ) -> Float[Tensor, "*r k dx"]:
        """tr(S) P^-½ UVᵀ Q^-½."""
        P, Q = _inverse_root(F.mT @ F), power(batch.Sx, -0.5)
        U, s, Vh = _svd(times_moment(P @ grad_G(F, G, batch), Q))
        return s.sum(-1)[..., None, None] * times_moment(P @ U @ Vh, Q)


@dataclass(frozen=True, kw_only=True)
class EKFAC(Alternating):
    """KFAC's eigenbasis with the Fisher's own variances: U [(Uᵀ ∇_G V) / s] Vᵀ, FᵀF = U·Uᵀ and Sx = V·Vᵀ.

    s_ij = E[(u_iᵀFᵀε)² (v_jᵀx)²], with ε ~ N(0, I) the model's residual. In a linear network the output gradient Fᵀε
    does not depend on x, so that s_ij = |Fu_i|² · v_jᵀSx v_j: the products of the factors' eigenvalues, and EKFAC is
    KFAC. They differ where the network is not linear.
    """

    @property
    def inverts_inputs(self) -> bool:
        """Always."""
        return True

    def direction(
        self, F: Float[Tensor, "*r dy k"], G: Float[Tensor, "*r k dx"], batch: Batch
    ) -> Float[Tensor, "*r k dx"]:
        """U [(Uᵀ ∇_G V) / s] Vᵀ."""
        U, V = _eigenvectors(F.mT @ F), _eigenvectors(batch.Sx)
        outputs, inputs = (F @ U).square().sum(-2), (V * (batch.Sx @ V)).sum(-2)
        rotated = U.mT @ times_moment(grad_G(F, G, batch), V)
        return times_moment(U @ (rotated / (outputs.unsqueeze(-1) * inputs.unsqueeze(-2))), V.mT)


def _svd(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Thin SVD; not a number for a run that is not finite, where LAPACK would refuse the whole batch."""
    finite = g.isfinite().all(-1).all(-1)
    U, s, Vh = torch.linalg.svd(torch.where(finite[..., None, None], g, 0.0), full_matrices=False)
    return U, s.masked_fill(~finite[..., None], torch.nan), Vh.masked_fill(~finite[..., None, None], torch.nan)


def _inverse_root(P: Tensor) -> Tensor:
    finite = P.isfinite().all(-1).all(-1)[..., None, None]
    return power(torch.where(finite, P, _eye(P)), -0.5).masked_fill(~finite, torch.nan)


def _eigenvectors(P: Tensor) -> Tensor:
    finite = P.isfinite().all(-1).all(-1)[..., None, None]
    return torch.linalg.eigh(torch.where(finite, P, _eye(P)))[1].masked_fill(~finite, torch.nan)


def _eye(S: Tensor) -> Tensor:
    return torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)
