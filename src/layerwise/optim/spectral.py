"""Rules that step along an orthogonal factor: Muon, and steepest descent in an induced Mahalanobis norm."""

import math
import warnings
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.optim.factors import Factors
from layerwise.optim.rule import Context, Health, Shape, State, UpdateRule

COEFFICIENTS = (3.4445, -4.775, 2.0315)


def newton_schulz(
    X: Float[Tensor, "K O I"],
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
) -> Float[Tensor, "K O I"]:
    """Nearly ``U Vᵀ`` of each ``X = U S Vᵀ``: singular values end between about 0.7 and 1.2.

    A quintic iteration, ``X ← a X + (b X Xᵀ + c (X Xᵀ)²) X``, in low precision (Jordan et al. 2024).
    """
    a, b, c = coefficients
    tall = X.shape[-2] > X.shape[-1]
    Y = (X.mT if tall else X).to(dtype)
    Y = Y / Y.flatten(1).norm(dim=1).clamp_min(eps).view(-1, 1, 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # a CPU without bfloat16: torch goes on
        for _ in range(steps):
            S = Y @ Y.mT
            Y = torch.baddbmm(Y, torch.baddbmm(S, S, S, beta=b, alpha=c), Y, beta=a)
    return (Y.mT if tall else Y).to(X.dtype)


def polar(X: Float[Tensor, "K O I"]) -> Float[Tensor, "K O I"]:
    """``U Vᵀ`` of each ``X = U S Vᵀ``; directions whose singular value is zero are left out."""
    U, S, Vh = torch.linalg.svd(X.double() if X.dtype == torch.float64 else X.float(), full_matrices=False)
    kept = S.amax(-1, keepdim=True) * max(X.shape[-2:]) * torch.finfo(S.dtype).eps < S
    return ((U * kept.unsqueeze(-2)) @ Vh).to(X.dtype)


@dataclass
class Orthogonalized(UpdateRule):
    """Muon: the momentum's orthogonal factor, times a number that depends on the matrix's shape."""

    momentum: float = 0.95
    nesterov: bool = True
    orthogonalize: str = "newton_schulz"
    steps: int = 5
    coefficients: tuple[float, float, float] = COEFFICIENTS
    eps: float = 1e-7
    adjust: str = "original"
    name = "muon"
    formula = "orth(momentum)"

    def init(self, shape: Shape) -> State:
        """The momentum."""
        return {"M": shape.zeros(shape.outputs, shape.inputs)}

    def direction(
        self, state: State, grad: Float[Tensor, "K O I"], context: Context, health: Health
    ) -> Float[Tensor, "K O I"]:
        """``c · U Vᵀ``."""
        state["M"].lerp_(grad, 1 - self.momentum)
        update = grad.lerp(state["M"], self.momentum) if self.nesterov else state["M"]
        if self.orthogonalize == "polar":
            return self._ratio(grad) * polar(update)
        return self._ratio(grad) * newton_schulz(update, self.steps, self.coefficients, self.eps)

    def _ratio(self, grad: Tensor) -> float:
        O, I = grad.shape[-2:]
        return math.sqrt(max(1.0, O / I)) if self.adjust == "original" else 0.2 * math.sqrt(max(O, I))

    def describe(self, shape: Shape) -> str:
        """The method."""
        return f"orth(momentum) by {self.orthogonalize}"


@dataclass
class InducedMahalanobis(Factors):
    """Steepest descent in ``‖P^½ M Q^½‖_op``: ``tr(S) P^-½ U Vᵀ Q^-½`` with ``U S Vᵀ = P^-½ ∇L Q^-½``."""

    power: tuple[float, float] = (0.5, 0.5)
    ideal: bool = True
    """Whether the step is scaled by ``tr S``, as steepest descent has it."""
    name = "mahalanobis_spectral"
    formula = "tr(S) P^-½ UVᵀ Q^-½"

    def direction(
        self, state: State, grad: Float[Tensor, "K O I"], context: Context, health: Health
    ) -> Float[Tensor, "K O I"]:
        """Whiten, orthogonalize, whiten again."""
        whitened = super().direction(state, grad, context, health)
        U, S, Vh = torch.linalg.svd(whitened, full_matrices=False)
        kept = S.amax(-1, keepdim=True) * max(grad.shape[-2:]) * torch.finfo(S.dtype).eps < S
        step = super().direction(state, (U * kept.unsqueeze(-2)) @ Vh, context, health)
        return S.sum(-1).view(-1, 1, 1) * step if self.ideal else step
