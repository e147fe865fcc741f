"""LocoProp: layers fitted to local targets."""

from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from layerwise.optim.backend import Backend
from layerwise.optim.engine import Layerwise
from layerwise.optim.kronecker import FactorPair, factor_conditions, formula_words
from layerwise.optim.options import LOSS_AVERAGE, Overrides
from layerwise.optim.rule import Context, Observation, Requirements, Shape, State, UpdateRule


def _one(mean_P: Tensor | None, mean_Q: Tensor | None) -> tuple[None, Tensor | None]:
    """The I of ``I + ηQ``."""
    return None, None if mean_Q is None else torch.ones_like(mean_Q)


@final
@dataclass
class LocalStep(UpdateRule):
    """``∇L (I + η Q)⁻¹``."""

    max_factor: int = 8192
    name = "locoprop"
    formula = "∇L (I + ηQ)⁻¹"

    def __post_init__(self) -> None:
        self.pair = FactorPair("identity", "inputs", self.max_factor)

    def requirements(self, shape: Shape | None = None) -> Requirements:
        """Inputs."""
        return self.pair.requirements(shape, (1.0, 1.0), factors={"Q": "inputs", "power": "1, 1"}, capturable=False)

    def init(self, shape: Shape, backend: Backend) -> State:
        """Q and its inverse."""
        state = self.pair.init(shape, backend, (1.0, 1.0))
        if state:
            state["roots"] = backend.inverse_roots(None, state["Q"], (1.0, 1.0), shape)
        return state

    def observe(self, state: State, seen: Observation, context: Context) -> None:
        """Inputs."""
        self.pair.observe(state, seen, context)

    def refresh(self, state: State, groups: slice, context: Context) -> None:
        """The inverse of ``I + η Q``; η may have changed since."""
        if "roots" in state:
            state["roots"].refresh_(None, state["Q"], _one, groups, context, scale=context.lr)
            context.health.refreshes += 1

    def direction(self, state: State, grad: Float[Tensor, "K O I"], context: Context) -> Any:
        """``∇L (I + η Q)⁻¹``."""
        return state["roots"].direction(grad, context, _one) if "roots" in state else grad

    def conditions(self, state: State, context: Context) -> tuple[Tensor, Tensor] | None:
        """As if Q were damped."""
        return factor_conditions(state, self.pair.shifts(context))

    def describe(self, shape: Shape) -> str:
        """Of what Q is."""
        _, Q, missing = self.pair.words(shape)
        return formula_words(None, "∇L", Q, (1.0, 1.0)) + missing


class LocoProp(Layerwise):
    """Layers fitted to local targets: ``W ← W − η ∇L (I + η Q)⁻¹``, the minimiser of

        ½ E‖W a − (h − ∂ℓ/∂h)‖² + ‖W − W_t‖² / (2η)

    for the square loss; FOOF with a step of 1 and a damping of 1/η.

    Reference: Amid, Anil and Warmuth 2022.

    >>> import torch, layerwise as lw
    >>> opt = lw.optim.LocoProp(torch.nn.Linear(4, 3), lr=1.0)
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1.0,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        max_factor: int = 8192,
        loss_average: str | None = LOSS_AVERAGE,
        overrides: Overrides | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            model,
            rule=LocalStep(max_factor=max_factor),
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            loss_average=loss_average,
            overrides=overrides,
            **options,
        )
