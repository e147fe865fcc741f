"""`DeviceStep`: what only the device knows of a step, where the host does not wait for it."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from layerwise.optim.rule import Context


@dataclass
class DeviceStep:
    """Of one stack."""

    all_finite: Bool[Tensor, ""]
    """Whether all gradients are finite; the opposite of what `torch.amp` calls found_inf. Where it is false the step is
    left out: kernels write nothing, and what is added elsewhere has the weight 0."""
    gradient: Any = None
    """The step's own, where it is split into fp16: the only tensor that `largest` is about."""
    largest: Float[Tensor, "K"] | None = None
    """What none of its entries exceeds, one number a group, where that is known."""
    replay: Callable[..., bool] | None = None
    """Makes a call as a CUDA graph, or captures it; None: calls of this step are only made."""
    scale: float = 1.0
    """What gradients are multiplied by when they are read; gathered ones have been."""
    read: list[bool] = field(default_factory=list)
    """`all_finite`, once the host has asked: each time it would wait for all that it has launched."""
    _m: tuple[Tensor, Tensor] | None = None
    """The averaged gradient of AdamW, and what none of its entries exceeds."""

    def is_taken(self) -> bool:
        """What the host has to wait for, the first time that any stack of the step asks."""
        if not self.read:
            self.read.append(bool(self.all_finite))
        return self.read[0]

    def bound_m(self, m: Tensor, largest: Float[Tensor, "K"]) -> None:
        """What a pass has found of the averaged gradient."""
        self._m = (m, largest)

    def largest_of(self, X: Any) -> Tensor | None:
        """`largest`, if this is the step's gradient, or its average, and not another tensor."""
        if self._m is not None and X is self._m[0]:
            return self._m[1]
        return self.largest if X is self.gradient else None


def all_finite(context: Context) -> Tensor | None:
    """Whether the step is taken, where only the device knows; None: it is."""
    return None if context.device_step is None else context.device_step.all_finite


def taken(weight: float, like: Tensor, context: Context) -> float | Tensor:
    """The weight of something new in an average: as it is given, or 0 in a step that is left out."""
    finite = all_finite(context)
    return weight if finite is None else finite.to(like) * weight


def largest_of(X: Any, context: Context | None) -> Tensor | None:
    """What no entry of each group exceeds, where that is known of X."""
    step: Any = None if context is None else context.device_step
    return None if step is None else step.largest_of(X)


def run(key: Hashable, call: Callable[[], None], context: Context, kind: str = "") -> None:
    """Make a call: as a CUDA graph where the step can be captured."""
    replay = None if context.device_step is None else context.device_step.replay
    if replay is None:
        call()
    else:
        replay(key, call, kind=kind)
