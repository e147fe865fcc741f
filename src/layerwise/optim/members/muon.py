"""Muon, and steepest descent in an induced Mahalanobis norm."""

from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.likelihoods import Likelihood
from layerwise.optim.engine import Layerwise
from layerwise.optim.options import LIKELIHOOD, LOSS_AVERAGE, Overrides, by_scale, clip_by_scale, statistics_options
from layerwise.optim.spectral import COEFFICIENTS, InducedMahalanobis, Orthogonalized


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
        orthogonalize: "newton_schulz" (five steps in bfloat16), or "polar" (exact, by singular values).
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
        _check_known("orthogonalize", orthogonalize, ("newton_schulz", "polar"))
        _check_known("adjust", adjust, ("original", "match_rms_adamw"))
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


class MahalanobisSpectral(Layerwise):
    """Steepest descent in the norm induced by K-FAC's factors, ``‖P^½ M Q^½‖_op``.

    ``W ← W − η tr(S) P^-½ U Vᵀ Q^-½`` with ``U S Vᵀ = P^-½ ∇L Q^-½``.

    Args:
        model: the module that is trained; or its parameters, where left and right are both "gradient".
        lr: η; by default 1e-3, and 1e-2 for the bare formula.
        damping: added to each factor; by default 1, and 1e-1 for the bare formula.
        momentum: of the gradient, as an average; by default 0.9, and none for the bare formula.
        scale: "adam": updates of AdamW's size, for AdamW's rate; "formula": the bare formula, momentum being a sum of
            directions.
        ideal: scale the step by ``tr S``.
        orthogonalize: how ``U Vᵀ`` is found: "newton_schulz" (nearly, as Muon does) or "polar" (exactly, by singular
            values, which a GPU is slow at). By default the first, and the second for the bare formula.
        left: statistic of P.
        right: statistic of Q.
        clip: bound on the step's predicted change ``η²⟨D, ∇L⟩``, or None. "auto": none, and 1e-3 for the bare formula.
        likelihood: that of the model's output, for labels drawn from it; see `Layerwise`.
        loss_average: how the loss in your loop is reduced: over "examples", over "tokens", or None for a sum.
        overrides: options for layers or parameters by pattern, ``{"*.bias": {"weight_decay": 0.0}}``.
        options: all others of `Layerwise`.

    >>> import torch, layerwise as lw
    >>> opt = lw.optim.MahalanobisSpectral(torch.nn.Linear(4, 3), lr=1e-3)
    """

    def __init__(
        self,
        model: nn.Module | ParamsT,
        lr: float | Tensor | None = None,
        damping: Any = None,
        momentum: float | None = None,
        weight_decay: float = 0.0,
        *,
        scale: str = "adam",
        clip: float | tuple[str, float] | str | None = "auto",
        ideal: bool = True,
        orthogonalize: str | None = None,
        left: str = "outgrads",
        right: str = "inputs",
        refresh_every: int = 10,
        max_factor: int = 8192,
        likelihood: str | Likelihood | None = LIKELIHOOD,
        loss_average: str | None = LOSS_AVERAGE,
        overrides: Overrides | None = None,
        **options: Any,
    ) -> None:
        way: str = by_scale(scale, orthogonalize, "newton_schulz", "polar")
        _check_known("orthogonalize", way, ("newton_schulz", "polar"))
        rule = InducedMahalanobis(left, right, max_factor=max_factor, ideal=ideal, orthogonalize=way)
        super().__init__(
            model,
            rule=rule,
            scale=scale,
            lr=by_scale(scale, lr, 1e-3, 1e-2),
            damping=by_scale(scale, damping, 1.0, 1e-1),
            momentum=by_scale(scale, momentum, 0.9, 0.0),
            weight_decay=weight_decay,
            clip=clip_by_scale(scale, clip),
            refresh_every=refresh_every,
            loss_average=loss_average,
            overrides=overrides,
            **statistics_options(scale, likelihood, options),
        )


def _check_known(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InputError(describe(f"{name}={value!r}", " or ".join(f'"{k}"' for k in known), "choose one of them"))
