"""One copy of a bare parameter for each example, where the model's own broadcasting allows it.

``x + self.position`` works as well with ``position [N, T, D]`` as with ``[T, D]``, and the gradient of the copies
is the per-example gradient, in the same backward as everything else. Which shape fits is found by trying, and
kept only if the output stays the same and the gradients are autograd's.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from layerwise.foundations.types import Tree
from layerwise.layers.capture.model_call import call, substituted, undisturbed

MOST_AXES = 3
"""Axes that may lie between the examples and the parameter's own (time, height, width)."""


@dataclass(frozen=True)
class Copies:
    """How parameters are copied: the axes inserted after the examples; −1: along its own first axis, of size 1."""

    axes: Mapping[str, int] = field(default_factory=dict)

    def make(self, model: nn.Module, examples: int) -> dict[str, Tensor]:
        """The copies, as leaves that share the parameter's memory; of one example the parameter as it is.

        Further axes of size 1 change which kernels torch takes: a linear map refuses a bias of ``[1, 1, O]``.
        """
        if not self.axes:
            return {}
        parameters = dict(model.named_parameters())
        if examples == 1:
            return {name: parameters[name].detach().requires_grad_() for name in self.axes}
        return {name: spread(parameters[name], self.axes[name], examples) for name in self.axes}

    @staticmethod
    def rows(grad: Tensor, shape: tuple[int, ...]) -> Tensor:
        """``[V, N, *shape]`` from the gradients of the copies; of one example they may have no axis for it."""
        if grad.shape[1:] == shape:
            return grad.unsqueeze(1)
        return grad.reshape(*grad.shape[:2], *shape)


def spread(parameter: Tensor, axes: int, examples: int) -> Tensor:
    """``[N, 1, …, *shape]``, or ``[N, *shape[1:]]``."""
    source = parameter.detach()
    if axes < 0:
        copies = source.expand(examples, *source.shape[1:])
    else:
        copies = source.reshape(1, *[1] * axes, *source.shape).expand(examples, *[1] * axes, *source.shape)
    return copies.requires_grad_()


@dataclass(frozen=True)
class Trial:
    """A few examples as the model runs them: what a run with copies must agree with."""

    model: nn.Module
    x: Tree
    examples: int
    f: Tensor
    last: Tensor
    """A cotangent on the last example."""
    first: Tensor
    """One on the first: an axis of N positions, of which only the last is used, is not the examples."""
    fewer: Tree
    """The input without an example: a shape may fit N by chance, but not N − 1 too."""

    @cached_property
    def f_fewer(self) -> Tensor | None:
        """Its output; None where the model insists on its batch size."""
        try:
            return self.run(self.fewer, {})
        except (RuntimeError, ValueError, IndexError):
            return None

    def run(self, x: Tree, copies: Mapping[str, Tensor]) -> Tensor:
        """The output with copies in the place of parameters."""
        with undisturbed(self.model), torch.enable_grad(), substituted(self.model, copies):
            return call(self.model, x)


def find_copies(trial: Trial, names: Iterable[str], truth: Mapping[str, Tensor | None]) -> Copies:
    """Try each parameter; `truth` holds autograd's gradients for the last example."""
    parameters = dict(trial.model.named_parameters())
    found: dict[str, int] = {}
    for name in names:
        expected = truth.get(name)
        if expected is None or trial.examples < 2 or not bool(expected.any()):
            continue
        for axes in _ways(parameters[name]):
            if _fits(trial, name, parameters[name], axes, expected):
                found[name] = axes
                break
    return Copies(found)


def _ways(parameter: Tensor) -> Iterator[int]:
    if parameter.ndim and parameter.shape[0] == 1:
        yield -1
    yield from range(MOST_AXES + 1)


def _fits(trial: Trial, name: str, parameter: Tensor, axes: int, expected: Tensor) -> bool:
    copies = spread(parameter, axes, trial.examples)
    try:
        again = trial.run(trial.x, {name: copies})
        if not _equal(again, trial.f):
            return False
        if trial.f_fewer is not None:
            fewer = spread(parameter, axes, trial.examples - 1)
            if not _equal(trial.run(trial.fewer, {name: fewer}), trial.f_fewer):
                return False
        (last,) = torch.autograd.grad(again, copies, trial.last, retain_graph=True, allow_unused=True)
        (first,) = torch.autograd.grad(again, copies, trial.first, allow_unused=True)
    except Exception:  # a model may do anything with a parameter of another shape
        return False
    if last is None or first is None or bool(first[1:].any()) or bool(last[:-1].any()):
        return False
    gap = float((last[-1].reshape(expected.shape) - expected).double().norm())
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-2}.get(trial.f.dtype, 0.2)
    return gap <= tolerance * float(expected.double().norm())


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-6)
