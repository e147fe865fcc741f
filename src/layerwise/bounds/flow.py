"""`FlowComplexity`: the complexity measure (6.4.11) along a training, C = Σ_t |δw_t| √Tr K_t."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.modes import evaluating
from layerwise.foundations.types import trainable
from layerwise.kernel.ntk import ntk


class FlowComplexity:
    """C = Σ_t |δw_t|₂ |Φ_t|_F of a training, (6.4.11): the length of the path, weighed by the tangent features.

    Make it before the first step and call it after each one. |Φ_t|_F = √Tr K_t is computed now and then, on a fixed
    probe, and holds until it is computed anew; the length of the path is that of every single step. `displacement`
    has the distance between the ends of such an interval instead of the path between them, as the thesis's released
    code does. Both are comparable between runs only with the same probe and the same rule for when to stop.

    The model may be any that `lw.ntk` takes; it is looked at in eval mode. Its weights, gradients, modes and torch's
    random state are left as they are: a training with it gives the same weights, bit by bit.

    >>> import torch, layerwise as lw
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> x, y = torch.randn(32, 4), torch.randint(3, (32,))
    >>> opt = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> path = lw.bounds.FlowComplexity(model, x, every=5)
    >>> for _ in range(10):
    ...     opt.zero_grad()
    ...     torch.nn.functional.cross_entropy(model(x), y).backward()
    ...     opt.step()
    ...     path()
    >>> path.value >= path.displacement > 0, path.steps
    (True, 10)

    Args:
        model: whose trainable parameters w are.
        probe: inputs, as `lw.ntk` takes them; the thesis has 100 training examples.
        every: steps between two looks at the kernel; or a collection of the steps after which it is looked at.
        outputs: which functions the kernel is of, see `lw.ntk`.
    """

    def __init__(self, model: nn.Module, probe: Any, *, every: int | Collection[int] = 1, outputs: Any = "all") -> None:
        whole = isinstance(every, int) and not isinstance(every, bool) and every >= 1
        if not whole and (isinstance(every, int | str) or any(step < 1 for step in every)):
            raise InputError(describe(f"every={every!r}", "a number ≥ 1, or a collection of steps", "take e.g. 10"))
        self.model, self.probe, self.outputs = model, probe, outputs
        self.every = every if isinstance(every, int) else frozenset(every)
        self.steps = 0
        """Steps taken."""
        self.traces: list[tuple[int, float]] = [(0, self.trace())]
        """Steps after which the kernel was looked at, and its trace there."""
        self._last = self._from = self._weights()
        self._value = self._displacement = self._length = self._since = _distance(self._last, self._from)

    @property
    def length(self) -> float:
        """Σ_t |δw_t|, the length of the path."""
        return float(self._length)

    @property
    def value(self) -> float:
        """Σ_t |δw_t| √Tr K_t."""
        return float(self._weighed()[0])

    @property
    def displacement(self) -> float:
        """The same with distances between the steps at which the kernel was looked at: never above `value`."""
        return float(self._weighed()[1])

    def __call__(self) -> None:
        """After a step of the optimizer."""
        now = self._weights()
        length = _distance(now, self._last)
        self._length = self._length + length
        self._since = self._since + length
        self._last = now
        self.steps += 1
        if self.steps % self.every == 0 if isinstance(self.every, int) else self.steps in self.every:
            self._value, self._displacement = self._weighed()
            self._from, self._since = now, torch.zeros_like(self._since)
            self.traces.append((self.steps, self.trace()))

    def trace(self) -> float:
        """Tr K of the model as it is, without forming K."""
        check = "never" if self.steps else "first"  # what is recorded of the model was right before
        with evaluating(self.model):
            return float(ntk(self.model, self.probe, outputs=self.outputs, progress=False, check=check).trace())

    def _weighed(self) -> tuple[Tensor, Tensor]:
        """Both sums until now, with what came after the last look at the kernel."""
        features = self.traces[-1][1] ** 0.5
        straight = _distance(self._last, self._from)
        return self._value + self._since * features, self._displacement + straight * features

    def _weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in trainable(self.model).values()]

    def __repr__(self) -> str:
        return f"FlowComplexity({self.value:.4g} after {self.steps} steps, path of length {self.length:.4g})"


def _distance(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """The Euclidean norm of a − b, on its device: no synchronization in a step of the training."""
    return torch.stack([torch.linalg.vector_norm((x - y).double()) for x, y in zip(a, b, strict=True)]).norm()
