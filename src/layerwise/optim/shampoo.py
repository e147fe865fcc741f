"""Shampoo and SOAP: factors of the gradient itself."""

from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from layerwise.optim.engine import Layerwise
from layerwise.optim.factors import Factors
from layerwise.optim.options import Overrides
from layerwise.optim.rotated_adam import RotatedAdam


class Shampoo(Layerwise):
    """``W ← W − η P⁻ᵖ ∇L Q⁻ᵖ`` with P and Q the averages of ``∇L ∇Lᵀ`` and ``∇Lᵀ ∇L``.

    p = ¼ is the paper's; on a single gradient without average the step is then ``U Vᵀ``. Convolutions are matrices
    of output channels × the rest; biases and other vectors get the fallback.

    Args:
        model: the module that is trained, or parameters (or groups of them) as torch's optimizers take them: among
            these an embedding looks like a matrix; give it a group with ``"update": "fallback"``.
        lr: η.
        power: p of both sides, or one for each; ``(0.5, 0)`` is one-sided.
        damping: added to each factor.
        momentum: of the preconditioned direction.
        weight_decay: decoupled.
        factor_decay: ρ of the averages.
        accumulate_factors: sum instead of averaging, as in the first paper.
        overrides: options for layers or parameters by pattern, ``{"*.bias": {"weight_decay": 0.0}}``.
        options: all others of `Layerwise`.

    Reference: Gupta, Koren and Singer 2018; Shi et al. 2023.

    >>> import torch, layerwise as lw
    >>> opt = lw.optim.Shampoo(torch.nn.Linear(4, 3), lr=1e-2, graft="adam")
    """

    fixed = ("separate_bias",)

    def __init__(
        self,
        model: nn.Module | ParamsT,
        lr: float | Tensor = 1e-2,
        power: float | tuple[float, float] = 0.25,
        damping: Any = 1e-4,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        factor_decay: float = 0.95,
        accumulate_factors: bool = False,
        refresh_every: int = 10,
        max_factor: int = 8192,
        overrides: Overrides | None = None,
        **options: Any,
    ) -> None:
        p, q = power if isinstance(power, tuple) else (power, power)
        rule = Factors(
            "gradient" if p else "identity",
            "gradient" if q else "identity",
            (float(p), float(q)),
            max_factor=max_factor,
            accumulate=accumulate_factors,
        )
        super().__init__(
            model,
            rule=rule,
            lr=lr,
            damping=damping,
            momentum=momentum,
            weight_decay=weight_decay,
            factor_decay=factor_decay,
            refresh_every=refresh_every,
            separate_bias=True,
            overrides=overrides,
            **options,
        )


class SOAP(Layerwise):
    """Adam in the eigenbasis of Shampoo's factors.

    ``W ← W − η U_P [M′ / (√V + ε)] U_Qᵀ`` with ``M′ = U_Pᵀ M U_Q``; the basis is renewed every `refresh_every` steps by
    one orthogonal iteration.

    Args:
        model: the module that is trained, or parameters (or groups of them) as torch's optimizers take them: among
            these an embedding looks like a matrix; give it a group with ``"update": "fallback"``.
        lr: η.
        betas: of the momentum, and of V and the factors.
        eps: ε.
        weight_decay: decoupled.
        skip_first: the first step only sets the basis, as in the authors' code.
        overrides: options for layers or parameters by pattern, ``{"*.bias": {"weight_decay": 0.0}}``.
        options: all others of `Layerwise`.

    Reference: Vyas et al. 2024.

    >>> import torch, layerwise as lw
    >>> opt = lw.optim.SOAP(torch.nn.Linear(4, 3), lr=3e-3)
    """

    fixed = ("separate_bias",)

    def __init__(
        self,
        model: nn.Module | ParamsT,
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        skip_first: bool = True,
        refresh_every: int = 10,
        max_factor: int = 8192,
        overrides: Overrides | None = None,
        **options: Any,
    ) -> None:
        rule = RotatedAdam(max_factor=max_factor, betas=betas, eps=eps, skip_first=skip_first)
        super().__init__(
            model,
            rule=rule,
            lr=lr,
            weight_decay=weight_decay,
            refresh_every=refresh_every,
            separate_bias=True,
            overrides=overrides,
            **options,
        )
