"""EKFAC: K-FAC's eigenbasis with corrected eigenvalues."""

from typing import Any

from torch import Tensor, nn

from layerwise.foundations.likelihoods import Likelihood
from layerwise.optim.eigenbasis import CorrectedEigenvalues
from layerwise.optim.engine import Layerwise
from layerwise.optim.options import LIKELIHOOD, LOSS_AVERAGE, Overrides, by_scale, clip_by_scale, statistics_options


class EKFAC(Layerwise):
    """Eigenvalue-corrected K-FAC: ``W ← W − η U_P [(U_Pᵀ ∇L U_Q) / (s + λ)] U_Qᵀ``.

    ``U_P ⊗ U_Q`` is the eigenbasis of K-FAC's factors. ``s`` are second moments of gradients in it: of the last
    batch's examples (``scaling="batch"``), or a running average of the batch gradient's squares times the batch
    size (``scaling="running"``, cheaper: EKFAC-ra).

    Args:
        model: the module that is trained.
        lr: η; by default 1e-3, and 3e-2 for the bare formula.
        damping: λ.
        momentum: of the gradient, as an average (AdamW's β₁).
        weight_decay: decoupled.
        scaling: "batch" or "running".
        scaling_decay: ρ of the running scalings; beyond 0.8 a GPU keeps them in float32, else in bfloat16.
        damping_split: "trace" or "equal" (factored: ``s + λ + √λ(π s_P + s_Q/π)``), or "exact" (``s + λ``).
        sua: convolutions take activations at different kernel offsets to be uncorrelated: U_Q is a basis of the
            channels, alike at each offset, the bias a block of its own; s keeps a number for every weight. Cheaper;
            layers with one offset are unchanged.
        examples_over: steps over which the examples of ``scaling="batch"`` are looked at, at most `factor_every`:
            layers take turns, so that no step is slow, and their inputs and output gradients are kept until then. None:
            1 on a CPU, where the step looks at its own batch; on a GPU as many as there are between statistics.
        scale: "adam": updates of AdamW's size, for AdamW's rate; "formula": the bare formula, momentum being a sum of
            directions.
        clip: bound on the step's predicted change ``η²⟨D, ∇L⟩``, or None. "auto": none, and 1e-3 for the bare formula.
        likelihood: that of the model's output, for labels drawn from it; see `Layerwise`.
        loss_average: how the loss in your loop is reduced: over "examples", over "tokens", or None for a sum.
        overrides: options for layers or parameters by pattern, ``{"*.bias": {"weight_decay": 0.0}}``.
        options: all others of `Layerwise`.

    Reference: George, Laurent, Bouthillier, Ballas and Vincent 2018.

    >>> import torch, layerwise as lw
    >>> opt = lw.optim.EKFAC(torch.nn.Linear(4, 3), scaling="running")
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
        scaling: str = "batch",
        scaling_decay: float = 0.75,
        damping_split: str = "trace",
        sua: bool = False,
        examples_over: int | None = None,
        clip: float | tuple[str, float] | str | None = "auto",
        refresh_every: int = 10,
        max_factor: int = 8192,
        likelihood: str | Likelihood | None = LIKELIHOOD,
        loss_average: str | None = LOSS_AVERAGE,
        overrides: Overrides | None = None,
        **options: Any,
    ) -> None:
        rule = CorrectedEigenvalues(
            split=damping_split,
            max_factor=max_factor,
            scaling=scaling,
            scaling_decay=scaling_decay,
            sua=sua,
            examples_over=examples_over,
        )
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
