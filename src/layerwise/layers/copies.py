"""One copy of a bare parameter for each example, where the model's own broadcasting allows it.

``x + self.position`` works as well with ``position [N, T, D]`` as with ``[T, D]``, and the gradient of the copies
is the per-example gradient, in the same backward as everything else. Which shape fits is found by trying, and
kept only if the output stays the same and the gradients are autograd's.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from layerwise.foundations.types import Tree
from layerwise.layers.calling import call, substituted

MOST_AXES = 3
"""Axes that may lie between the examples and the parameter's own (time, height, width)."""


@dataclass(frozen=True)
class Copies:
    """How parameters are copied: the axes inserted after the examples; −1: along its own first axis, of size 1."""

    axes: Mapping[str, int] = field(default_factory=dict)

    def make(self, model: nn.Module, examples: int) -> dict[str, Tensor]:
        """The copies, as leaves that share the parameter's memory."""
        parameters = dict(model.named_parameters())
        return {name: spread(parameters[name], self.axes[name], examples) for name in self.axes}

    @staticmethod
    def rows(grad: Tensor, shape: tuple[int, ...]) -> Tensor:
        """``[V, N, *shape]`` from the gradients of the copies."""
        return grad.reshape(*grad.shape[:2], *shape)


def spread(parameter: Tensor, axes: int, examples: int) -> Tensor:
    """``[N, 1, …, *shape]``, or ``[N, *shape[1:]]``."""
    source = parameter.detach()
    if axes < 0:
        copies = source.expand(examples, *source.shape[1:])
    else:
        copies = source.reshape(1, *[1] * axes, *source.shape).expand(examples, *[1] * axes, *source.shape)
    return copies.requires_grad_()


def find_copies(
    model: nn.Module, names: Iterable[str], x: Tree, n: int, f: Tensor, v: Tensor, truth: Mapping[str, Tensor | None]
) -> Copies:
    """Try each parameter on n examples; `v` is a cotangent of the last one, `truth` autograd's gradients for it."""
    parameters = dict(model.named_parameters())
    found: dict[str, int] = {}
    for name in names:
        expected = truth.get(name)
        if expected is None or n < 2:
            continue
        for axes in _ways(parameters[name]):
            if _fits(model, name, spread(parameters[name], axes, n), x, f, v, expected):
                found[name] = axes
                break
    return Copies(found)


def _ways(parameter: Tensor) -> Iterator[int]:
    if parameter.ndim and parameter.shape[0] == 1:
        yield -1
    yield from range(MOST_AXES + 1)


def _fits(model: nn.Module, name: str, copies: Tensor, x: Tree, f: Tensor, v: Tensor, expected: Tensor) -> bool:
    try:
        with torch.enable_grad(), substituted(model, {name: copies}):
            again = call(model, x)
        if again.shape != f.shape or not torch.allclose(again, f, rtol=1e-4, atol=1e-6):
            return False
        (grad,) = torch.autograd.grad(again, copies, v, allow_unused=True)
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
        return False
    if grad is None:
        return False
    others, own = grad[:-1], grad[-1].reshape(expected.shape)
    gap = float((own - expected).double().norm())
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-2}.get(f.dtype, 0.2)
    return not bool(others.any()) and gap <= tolerance * float(expected.double().norm())
