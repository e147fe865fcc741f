"""K-FAC: ``P = E[g gᵀ]``, ``Q = E[a aᵀ]``, both inverted."""

from typing import Any

from torch import Tensor, nn

from layerwise.foundations.likelihoods import Likelihood
from layerwise.optim.engine import Layerwise
from layerwise.optim.kronecker import KroneckerRoots
from layerwise.optim.members.ekfac import CorrectedEigenvalues
from layerwise.optim.options import LIKELIHOOD, LOSS_AVERAGE, Overrides, by_scale, clip_by_scale, statistics_options


class KFAC(Layerwise):
    """Kronecker-factored approximate curvature: ``W ← W − η P⁻¹ ∇L Q⁻¹``.

    ``Q`` is the second moment of the layer's inputs (bias column included), ``P`` that of its output gradients: of
    labels drawn from the model ("sampled", "exact"), or of the loss ("empirical"). By default the likelihood is
    recognised by the gradient at the model's output; with ``scale="formula"`` statistics are empirical unless
    `likelihood` is given.

    Args:
        model: the module that is trained.
        lr: η; by default 1e-3, and 3e-2 for the bare formula.
        damping: λ; see `damping_split` and `damping_scale` of `Layerwise`.
        momentum: of the gradient, as an average (AdamW's β₁).
        weight_decay: decoupled.
        damping_split: "exact" (λ is added to the product of both factors), or divided between them: of an absolute
            damping by "trace" (with π) or "equal" (π = 1); relative damping goes by the factors' mean eigenvalues.
        sua: convolutions take activations at different kernel offsets to be uncorrelated: Q is that of the channels,
            alike at each offset, the bias a block of its own. Cheaper; layers with one offset are unchanged.
        scale: "adam": updates of AdamW's size, for AdamW's rate; "formula": the bare formula, momentum being a sum of
            directions.
        clip: bound on the step's predicted change ``η²⟨D, ∇L⟩``, or None. "auto": none, and 1e-3 for the bare formula.
        likelihood: that of the model's output, for labels drawn from it; see `Layerwise`.
        loss_average: how the loss in your loop is reduced: over "examples", over "tokens", or None for a sum.
        overrides: options for layers or parameters by pattern, ``{"*.bias": {"weight_decay": 0.0}}``.
        options: all others of `Layerwise`.

    Reference: Martens and Grosse 2015; Grosse and Martens 2016 for convolutions.

    >>> import torch, layerwise as lw
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> opt = lw.optim.KFAC(model, lr=1e-3, weight_decay=0.1)
    >>> of_the_paper = lw.optim.KFAC(model, lr=3e-2, damping=1e-3, likelihood="categorical", scale="formula")
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor | None = None,
        damping: Any = 1e-1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        scale: str = "adam",
        damping_split: str = "trace",
        sua: bool = False,
        clip: float | tuple[str, float] | str | None = "auto",
        refresh_every: int = 10,
        max_factor: int = 8192,
        likelihood: str | Likelihood | None = LIKELIHOOD,
        loss_average: str | None = LOSS_AVERAGE,
        overrides: Overrides | None = None,
        **options: Any,
    ) -> None:
        if damping_split == "exact":
            rule = CorrectedEigenvalues(scaling="none", max_factor=max_factor, sua=sua)
        else:
            rule = KroneckerRoots("outgrads", "inputs", (1.0, 1.0), damping_split, max_factor, sua=sua)
        super().__init__(
            model,
            rule=rule,
            scale=scale,
            lr=by_scale(scale, lr, 1e-3, 3e-2),
            damping=damping,
            momentum=momentum,
            weight_decay=weight_decay,
            clip=clip_by_scale(scale, clip),
            refresh_every=refresh_every,
            loss_average=loss_average,
            overrides=overrides,
            **statistics_options(scale, likelihood, options),
        )
