"""Steepest descent in an induced Mahalanobis norm."""

from dataclasses import dataclass
from typing import Any, final

from jaxtyping import Float
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from layerwise.foundations.likelihoods import Likelihood
from layerwise.optim.backend import Backend
from layerwise.optim.engine import Layerwise
from layerwise.optim.kronecker import FactorPair, check_choice, factor_conditions, formula_words
from layerwise.optim.newton_schulz import newton_schulz, polar
from layerwise.optim.options import LIKELIHOOD, LOSS_AVERAGE, Overrides, by_scale, clip_by_scale, statistics_options
from layerwise.optim.rule import Context, Observation, Requirements, Shape, State, UpdateRule


@final
@dataclass
class InducedMahalanobis(UpdateRule):
    """``tr(S) P^-½ U Vᵀ Q^-½`` with ``U S Vᵀ = P^-½ ∇L Q^-½``: steepest descent in ``‖P^½ M Q^½‖_op``."""

    left: str = "outgrads"
    right: str = "inputs"
    max_factor: int = 8192
    ideal: bool = True
    """Whether the step is scaled by ``tr S``, as steepest descent has it."""
    orthogonalize: str = "polar"
    name = "mahalanobis_spectral"
    formula = "tr(S) P^-½ UVᵀ Q^-½"

    def __post_init__(self) -> None:
        self.pair = FactorPair(self.left, self.right, self.max_factor)

    def requirements(self, shape: Shape | None = None) -> Requirements:
        """Statistics of both sides."""
        names = {side: of for side, of in (("P", self.left), ("Q", self.right)) if of != "identity"}
        return self.pair.requirements(shape, (0.5, 0.5), factors={**names, "power": "0.5, 0.5"})

    def init(self, shape: Shape, backend: Backend) -> State:
        """Factors, and identities in place of their roots."""
        state = self.pair.init(shape, backend, (0.5, 0.5))
        if state:
            state["roots"] = backend.inverse_roots(state.get("P"), state.get("Q"), (0.5, 0.5), shape)
        return state

    def observe(self, state: State, seen: Observation, context: Context) -> None:
        """Running means of second moments."""
        self.pair.observe(state, seen, context)

    def refresh(self, state: State, groups: slice, context: Context) -> None:
        """Inverse square roots."""
        if "roots" in state:
            shifts = self.pair.shifts(context)
            state["roots"].refresh_(state.get("P"), state.get("Q"), shifts, groups, context)
            context.health.refreshes += 1

    def direction(self, state: State, grad: Float[Tensor, "K O I"], context: Context) -> Float[Tensor, "K O I"]:
        """Whiten, orthogonalize, whiten again."""
        whitened = self._whitened(state, grad, context)
        iterated = self.orthogonalize == "newton_schulz"
        orthogonal = newton_schulz(whitened, eps=1e-7 * context.unit) if iterated else polar(whitened)
        step = self._whitened(state, orthogonal, context)
        if not self.ideal:
            return step
        return (whitened * orthogonal).sum((-2, -1), keepdim=True) * step  # ⟨U S Vᵀ, U Vᵀ⟩ = tr S

    def _whitened(self, state: State, X: Tensor, context: Context) -> Tensor:
        """``P^-½ X Q^-½``."""
        if "roots" not in state:
            return X
        return context.backend.tensor(state["roots"].direction(X, context, self.pair.shifts(context)))

    def conditions(self, state: State, context: Context) -> tuple[Tensor, Tensor] | None:
        """Bounds on condition numbers, and the damping added, per group."""
        return factor_conditions(state, self.pair.shifts(context))

    def quadratic(self, state: State, D: Float[Tensor, "K O I"]) -> Tensor | None:
        """``⟨D, P D Q⟩``."""
        return self.pair.quadratic(state, D)

    def describe(self, shape: Shape) -> str:
        """The orthogonal factor of what the factors whiten, whitened once more."""
        P, Q, missing = self.pair.words(shape)
        return formula_words(P, "UVᵀ", Q, (0.5, 0.5)) + missing


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
        check_choice("orthogonalize", way, ("newton_schulz", "polar"))
        rule = InducedMahalanobis(left, right, max_factor, ideal=ideal, orthogonalize=way)
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
