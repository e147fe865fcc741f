"""Shampoo: factors of the gradient itself."""

from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from layerwise.optim.engine import Layerwise
from layerwise.optim.kronecker import KroneckerRoots
from layerwise.optim.options import Overrides, by_scale


class Shampoo(Layerwise):
    """``W ← W − η P⁻ᵖ ∇L Q⁻ᵖ`` with P and Q the averages of ``∇L ∇Lᵀ`` and ``∇Lᵀ ∇L``.

    p = ¼ is the paper's (``scale="formula"``); on a single gradient without average the step is then ``U Vᵀ``. With
    updates of AdamW's size p = ½ (Morwani et al. 2024) is the default. Convolutions are matrices
    of output channels × the rest; biases and other vectors get the fallback.

    Args:
        model: the module that is trained, or parameters (or groups of them) as torch's optimizers take them: among
            these an embedding looks like a matrix; give it a group with ``"update": "fallback"``.
        lr: η; by default 1e-3, and 1e-2 for the bare formula.
        power: p of both sides, or one for each; ``(0.5, 0)`` is one-sided.
        damping: added to each factor; by default 1e-2, and 1e-4 for the bare formula.
        momentum: of the gradient, as an average (AdamW's β₁).
        weight_decay: decoupled.
        scale: "adam": updates of AdamW's size, for AdamW's rate; "formula": the bare formula, momentum being a sum of
            directions.
        factor_decay: ρ of the averages.
        accumulate_factors: sum instead of averaging, as in the first paper.
        overrides: options for layers or parameters by pattern, ``{"*.bias": {"weight_decay": 0.0}}``.
        options: all others of `Layerwise`.

    Reference: Gupta, Koren and Singer 2018; Shi et al. 2023.

    >>> import torch, layerwise as lw
    >>> opt = lw.optim.Shampoo(torch.nn.Linear(4, 3), lr=1e-3)
    """

    fixed = ("separate_bias",)

    def __init__(
        self,
        model: nn.Module | ParamsT,
        lr: float | Tensor | None = None,
        power: float | tuple[float, float] | None = None,
        damping: Any = None,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        scale: str = "adam",
        factor_decay: float = 0.95,
        accumulate_factors: bool = False,
        refresh_every: int = 10,
        max_factor: int = 8192,
        overrides: Overrides | None = None,
        **options: Any,
    ) -> None:
        powers = by_scale(scale, power, 0.5, 0.25)
        p, q = powers if isinstance(powers, tuple) else (powers, powers)
        rule = KroneckerRoots(
            "gradient" if p else "identity",
            "gradient" if q else "identity",
            (float(p), float(q)),
            max_factor=max_factor,
            accumulate=accumulate_factors,
        )
        super().__init__(
            model,
            rule=rule,
            scale=scale,
            lr=by_scale(scale, lr, 1e-3, 1e-2),
            damping=by_scale(scale, damping, 1e-2, 1e-4),
            momentum=momentum,
            weight_decay=weight_decay,
            factor_decay=factor_decay,
            refresh_every=refresh_every,
            separate_bias=True,
            overrides=overrides,
            **options,
        )
