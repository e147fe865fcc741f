"""Muon: the orthogonal factor of the momentum."""

import math
from dataclasses import dataclass
from typing import Any, final

from jaxtyping import Float
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from layerwise.optim.backend import Backend
from layerwise.optim.engine import Layerwise
from layerwise.optim.kronecker import check_choice
from layerwise.optim.newton_schulz import COEFFICIENTS, newton_schulz, polar
from layerwise.optim.options import Overrides
from layerwise.optim.rule import Context, Requirements, Shape, State, UpdateRule


@final
@dataclass
class Orthogonalized(UpdateRule):
    """``c · U Vᵀ`` with ``U S Vᵀ`` the momentum, c a number that depends on the matrix's shape."""

    momentum: float = 0.95
    nesterov: bool = True
    orthogonalize: str = "newton_schulz"
    steps: int = 5
    coefficients: tuple[float, float, float] = COEFFICIENTS
    eps: float = 1e-7
    adjust: str = "original"
    name = "muon"
    formula = "orth(momentum)"

    def requirements(self, shape: Shape | None = None) -> Requirements:
        """Gradients of matrices. Steps by singular values cannot be captured: the host waits for them."""
        captured = self.orthogonalize == "newton_schulz"
        return Requirements(own_momentum="momentum", capturable=captured, flat_spectrum=True)

    def init(self, shape: Shape, backend: Backend) -> State:
        """The momentum."""
        return {"M": shape.zeros(shape.outputs, shape.inputs)}

    def direction(self, state: State, grad: Float[Tensor, "K O I"], context: Context) -> Any:
        """``c · U Vᵀ``."""
        O, I = grad.shape[-2:]
        ratio = math.sqrt(max(1.0, O / I)) if self.adjust == "original" else 0.2 * math.sqrt(max(O, I))
        eps, by_products = self.eps * context.unit, self.orthogonalize == "newton_schulz"

        def orthogonal(X: Tensor, squares: Tensor | None = None, divide: Any = None) -> Tensor:
            if not by_products:
                return ratio * polar(X)
            if squares is None:
                return ratio * newton_schulz(X, self.steps, self.coefficients, eps)
            return newton_schulz(
                X, self.steps, self.coefficients, eps, None, squares, ratio, keep_dtype=False, divide=divide
            )

        mu, nesterov = context.option("momentum", self.momentum), context.option("nesterov", self.nesterov)
        return context.backend.orthogonalized_momentum_(
            state["M"], grad, mu, nesterov, orthogonal, context, fused=by_products
        )

    def describe(self, shape: Shape) -> str:
        """The method."""
        return f"orth(momentum) by {self.orthogonalize}"


class Muon(Layerwise):
    """The momentum's orthogonal factor: ``W ← W − η c · U Vᵀ``, ``U S Vᵀ`` the momentum.

    Convolutions are matrices of output channels × the rest; vectors and embeddings get the fallback.

    Args:
        model: the module that is trained, or parameters (or groups of them) as torch's optimizers take them: among
            these an embedding looks like a matrix; give it a group with ``"update": "fallback"``.
        lr: η.
        momentum: of the gradient, as an average.
        nesterov: look ahead.
        weight_decay: decoupled.
        scale: "adam": the update has the norm of AdamW's, at AdamW's rate; "formula": c is `adjust`.
        orthogonalize: "newton_schulz" (five steps, in fp16 on a GPU), or "polar" (exact, by singular values).
        adjust: c: "original" (``√max(1, O/I)``) or "match_rms_adamw" (``0.2 √max(O, I)``).
        overrides: options for layers or parameters by pattern, ``{"*.bias": {"weight_decay": 0.0}}``.
        options: all others of `Layerwise`.

    Reference: Jordan et al. 2024.

    >>> import torch, layerwise as lw
    >>> opt = lw.optim.Muon(torch.nn.Linear(4, 3), lr=1e-3)
    """

    fixed = ("separate_bias",)

    def __init__(
        self,
        model: nn.Module | ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        *,
        scale: str = "adam",
        orthogonalize: str = "newton_schulz",
        steps: int = 5,
        coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        adjust: str = "original",
        overrides: Overrides | None = None,
        **options: Any,
    ) -> None:
        check_choice("orthogonalize", orthogonalize, ("newton_schulz", "polar"))
        check_choice("adjust", adjust, ("original", "match_rms_adamw"))
        rule = Orthogonalized(momentum, nesterov, orthogonalize, steps, coefficients, eps, adjust)
        super().__init__(
            model,
            rule=rule,
            scale=scale,
            lr=lr,
            weight_decay=weight_decay,
            separate_bias=True,
            overrides=overrides,
            **options,
        )
