"""Objects of the `cuda` backend on a CPU, by themselves: contexts of asynchronous steps, matrices."""

from typing import Any

import torch
from torch import Tensor

from layerwise.optim.cuda.backend import CudaBackend
from layerwise.optim.cuda.basis import TrackedBasis, TrackedSide
from layerwise.optim.cuda.device_step import DeviceStep
from layerwise.optim.cuda.inverse import DeviceInverse, DeviceRoots
from layerwise.optim.rule import Context, Shape, State, UpdateRule, kept

NEWTON = CudaBackend("products")


def device_step(all_finite: Tensor | None, G: Tensor | None = None) -> DeviceStep | None:
    """Of a step whose gradient is G, if it is given; None: the host may look at values."""
    if all_finite is None:
        return None
    return DeviceStep(all_finite, G, None if G is None else G.abs().amax((1, 2)))


def context_at(step: int, damping: float, shape: Shape, **options: Any) -> Context:
    """Relative damping, factors refined by products."""
    return Context(step, 0.0, damping, True, {}, **{"backend": NEWTON, "shape": shape, **options})


def initial_state(rule: UpdateRule, shape: Shape, backend: CudaBackend = NEWTON) -> State:
    """A rule's state with factors that are refined by products."""
    return rule.init(shape, backend)


def refined(state: State) -> dict[str, DeviceInverse | TrackedSide]:
    """The sides of roots or bases that are refined by products, by name."""
    found: dict[str, DeviceInverse | TrackedSide] = {}
    for entry in kept(state):
        if isinstance(entry, TrackedBasis):
            found |= {side.side: side for side in entry.sides}
        elif isinstance(entry, DeviceRoots):
            found |= {name: side for name, side in entry.sides.items() if not isinstance(side, Tensor)}
    return found


def matrix(state: State, side: str) -> Tensor:
    """An inverse or a basis in float32 (or float64)."""
    return refined(state)[side].matrix.value()


def set_factors(state: State, **factors: Tensor) -> None:
    """Replace P and Q; all groups of them have statistics then."""
    for name, M in factors.items():
        factor = state[name]
        factor.mean.copy_(M)
        factor.count.fill_(1.0)


TRUE, FALSE = torch.tensor(True), torch.tensor(False)
