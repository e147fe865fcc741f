"""Measures: what is recorded on the way. A measure reads the state of a training and returns named numbers.

Measures leave the model as it was (train or eval mode of every module, gradients) and torch's random state too, so
that a training does not depend on what is measured.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from layerwise.curvature.build import fisher
from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.modes import evaluating
from layerwise.kernel.alignment import alignment
from layerwise.kernel.ntk import ntk
from layerwise.training.problem import Problem


@dataclass(frozen=True, kw_only=True)
class State:
    """A training at one moment."""

    step: int
    epoch: int
    seconds: float
    """Spent on training so far, measuring not counted."""
    model: nn.Module
    optimizer: Optimizer
    problem: Problem
    seed: int
    device: torch.device


Measure = Callable[[State], Mapping[str, float]]


def accuracy(f: Tensor, y: Tensor) -> Tensor:
    """Share of examples whose largest output is that of their label.

    >>> float(accuracy(torch.tensor([[2.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 0])))
    0.5
    """
    return (f.argmax(-1) == y).to(torch.float64).mean()


@dataclass(frozen=True)
class Evaluation:
    """Loss and metrics of the problem on a split, in eval mode, averaged over its examples."""

    split: str = "test"

    def __call__(self, state: State) -> dict[str, float]:
        """``{"test/loss": …, "test/accuracy": …}``."""
        totals: dict[str, Tensor] = {}
        count = 0
        with evaluating(state.model), torch.no_grad():
            for x, y in state.problem.batches(self.split, state.seed):
                x, y = moved(x, state.device), moved(y, state.device)
                f = state.model(x)
                found = {"loss": state.problem.loss(f, y)}
                found |= {name: torch.as_tensor(metric(f, y)) for name, metric in state.problem.metrics.items()}
                for name, value in found.items():
                    totals[name] = totals.get(name, torch.zeros((), dtype=torch.float64)) + value.double().cpu() * len(
                        f
                    )
                count += len(f)
        if not count:
            raise InputError(
                describe(
                    f"split {self.split!r} of {state.problem.name!r} without batches", "some data", "check `batches`"
                )
            )
        return {f"{self.split}/{name}": float(total / count) for name, total in totals.items()}


class DistanceFromStart:
    """``‖θ − θ₀‖``, where θ₀ is what the parameters were at the first measurement."""

    def __init__(self) -> None:
        self._start: dict[str, Tensor] = {}

    def __call__(self, state: State) -> dict[str, float]:
        """``{"distance": …}``."""
        now = {name: p.detach() for name, p in state.model.named_parameters()}
        if state.step == 0 or not self._start:
            self._start = {name: p.clone() for name, p in now.items()}
        squares = [(p - self._start[name]).double().square().sum() for name, p in now.items()]
        return {"distance": float(torch.stack(squares).sum().sqrt())}


@dataclass(frozen=True)
class FisherTrace:
    """The trace of the Fisher matrix on a fixed batch."""

    batch: tuple[Any, Any]
    structure: str = "diag"

    def __call__(self, state: State) -> dict[str, float]:
        """``{"fisher/trace": …}``."""
        with evaluating(state.model):
            matrix = fisher(
                state.model,
                moved(self.batch, state.device),
                likelihood=state.problem.likelihood,
                structure=self.structure,
                estimator="exact",
            )
        return {"fisher/trace": float(matrix.trace())}


@dataclass(frozen=True)
class KernelAlignment:
    """Alignment of the tangent kernel on a fixed batch with a target."""

    x: Tensor
    target: Tensor

    def __call__(self, state: State) -> dict[str, float]:
        """``{"kernel/alignment": …}``."""
        with evaluating(state.model):
            kernel = ntk(state.model, self.x.to(state.device))
            return {"kernel/alignment": float(alignment(kernel, self.target.to(state.device)))}


def moved(value: Any, device: torch.device) -> Any:
    """A batch (a tensor, or a tuple, list or dictionary of them) on a device."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {name: moved(item, device) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(moved(item, device) for item in value)
    return value
