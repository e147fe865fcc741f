"""Rules that step along an orthogonal factor: Muon, and steepest descent in an induced Mahalanobis norm."""

import math
import re
import warnings
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.linalg import gram
from layerwise.optim.cuda.elementwise import momentum_half_
from layerwise.optim.factors import Factors
from layerwise.optim.rule import Context, Health, Shape, State, UpdateRule

COEFFICIENTS = (3.4445, -4.775, 2.0315)


def newton_schulz(
    X: Float[Tensor, "K O I"],
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "K O I"]:
    """Nearly ``U Vᵀ`` of each ``X = U S Vᵀ``: singular values end between about 0.7 and 1.2.

    A quintic iteration, ``X ← a X + (b X Xᵀ + c (X Xᵀ)²) X`` (Jordan et al. 2024), in bfloat16; on a CPU without
    instructions for it, where its products are some hundred times slower, in float32.
    """
    tall = X.shape[-2] > X.shape[-1]
    Y = X.mT if tall else X
    if dtype is None:
        dtype = torch.bfloat16 if fast_bfloat16(X.device) else torch.float32
    Y = Y.to(dtype)
    Y = Y / Y.flatten(1).norm(dim=1).clamp_min(eps).view(-1, 1, 1)
    wide = Y.shape[-1] >= 1.5 * Y.shape[-2]
    iterate = _on_gram if wide and dtype != torch.bfloat16 else _on_matrix
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # a CPU without bfloat16: torch goes on
        Y = iterate(Y, steps, coefficients)
    return (Y.mT if tall else Y).to(X.dtype)


def _on_matrix(Y: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    """The iteration as it is written."""
    a, b, c = coefficients
    for _ in range(steps):
        S = _product(Y)
        Y = torch.baddbmm(Y, torch.baddbmm(S, S, S, beta=b, alpha=c), Y, beta=a)
    return Y


def _on_gram(Y: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    """The same on ``S = Y Yᵀ`` alone, which is smaller than a wide Y: ``p = a + bS + cS²``, ``Z ← pZ``, ``S ← p²S``.

    Small singular values are below the rounding of S, but there p is a to the same rounding. Not for bfloat16.
    """
    a, b, c = coefficients
    S, Z = _product(Y), None
    for left in reversed(range(steps)):
        p = torch.baddbmm(S, S, S, beta=b, alpha=c)
        p.diagonal(dim1=-2, dim2=-1).add_(a)
        Z = p if Z is None else p @ Z
        if left:
            S = p @ (p @ S)
    return Y if Z is None else Z @ Y


def _product(Y: Tensor) -> Tensor:
    """``Y Yᵀ``, by one triangle where that pays."""
    return Y @ Y.mT if Y.dtype == torch.bfloat16 else gram(Y.mT)


@cache
def fast_bfloat16(device: torch.device) -> bool:
    """Whether the device has instructions for products in bfloat16; what cannot be found out counts as no."""
    if device.type != "cpu":
        return True
    with suppress(AttributeError):
        if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
            return True
    with suppress(OSError):  # torch has no such question for ARM
        flags = re.search(r"^Features\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        return flags is not None and "bf16" in flags[1].split()
    return False


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
    own_momentum = "momentum"
    formula = "orth(momentum)"

    @property
    def recordable(self) -> bool:  # type: ignore[override]
        """Not singular values: they are waited for."""
        return self.orthogonalize == "newton_schulz"

    def init(self, shape: Shape) -> State:
        """The momentum."""
        return {"M": shape.zeros(shape.outputs, shape.inputs)}

    def direction(
        self, state: State, grad: Float[Tensor, "K O I"], context: Context, health: Health
    ) -> Float[Tensor, "K O I"]:
        """``c · U Vᵀ``."""
        momentum, nesterov = context.option("momentum", self.momentum), context.option("nesterov", self.nesterov)
        by_kernel = self.orthogonalize == "newton_schulz" and grad.device.type == "cuda"
        if health.gate is not None and grad.dtype == torch.float32 and by_kernel:
            half, squares = momentum_half_(state["M"], grad, momentum, nesterov, health.gate)
            return self._iterated(half, squares, self.eps * context.unit)
        state["M"].lerp_(grad, health.taken(1 - momentum, grad))
        update = grad.lerp(state["M"], momentum) if nesterov else state["M"]
        if self.orthogonalize == "polar":
            return self._ratio(grad) * polar(update)
        return self._ratio(grad) * newton_schulz(update, self.steps, self.coefficients, self.eps * context.unit)

    def _iterated(self, Y: Tensor, squares: Tensor, eps: float) -> Tensor:
        """`newton_schulz` of what is in bfloat16 and measured already; the ratio is part of the last step."""
        ratio, tall = self._ratio(Y), Y.shape[-2] > Y.shape[-1]
        Y = Y.mT if tall else Y
        a, b, c = self.coefficients
        norm = squares.sqrt().clamp_min(eps).view(-1, 1, 1)
        Y = Y / norm.to(Y.dtype)
        for left in reversed(range(self.steps)):
            S, last = Y @ Y.mT, ratio if left == 0 else 1.0
            Y = torch.baddbmm(Y, torch.baddbmm(S, S, S, beta=b, alpha=c), Y, beta=a * last, alpha=last)
        return Y.mT if tall else Y

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
    orthogonalize: str = "polar"
    name = "mahalanobis_spectral"
    formula = "tr(S) P^-½ UVᵀ Q^-½"

    def _words(self, P: str | None, Q: str | None) -> str:
        """The orthogonal factor of what the factors whiten, whitened once more."""
        return super()._words(P, Q).replace("∇L", "UVᵀ")

    def direction(
        self, state: State, grad: Float[Tensor, "K O I"], context: Context, health: Health
    ) -> Float[Tensor, "K O I"]:
        """Whiten, orthogonalize, whiten again."""
        whitened = super().direction(state, grad, context, health)
        iterated = self.orthogonalize == "newton_schulz"
        orthogonal = newton_schulz(whitened, eps=1e-7 * context.unit) if iterated else polar(whitened)
        step = super().direction(state, orthogonal, context, health)
        if not self.ideal:
            return step
        return (whitened * orthogonal).sum((-2, -1), keepdim=True) * step  # ⟨U S Vᵀ, U Vᵀ⟩ = tr S
