"""Numbers that go between host and device without either waiting: asked for now and read later, or sent.

``float(tensor)`` waits until the device has done all that was queued. `Asked` copies a few numbers to pinned memory
and marks that point of the stream: reading them waits for what came before it alone. `Checks` collects conditions on
tensors and looks at all of them together.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor


class Asked:
    """A small tensor on its way to the host.

    >>> Asked(torch.tensor([3, 5])).read()
    [3, 5]
    """

    def __init__(self, values: Shaped[Tensor, "*n"]) -> None:
        self._values, self._event = values.detach(), None
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            self._values.copy_(values.detach(), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(values.device))

    def read(self) -> Any:
        """The numbers, when all that was queued before they were asked for is done."""
        return self._arrived().tolist()

    def array(self) -> np.ndarray:
        """The same, where they are many."""
        return self._arrived().numpy()

    def _arrived(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._values


def sent(t: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on a device, without waiting for what is queued there: pinned memory is copied in its turn.

    >>> sent(torch.ones(2), "cpu").tolist()
    [1.0, 1.0]
    """
    if torch.device(device).type == "cuda" and t.device.type == "cpu":
        return t.pin_memory().to(device, non_blocking=True)
    return t.to(device)


def not_finite(t: Tensor) -> Tensor:
    """Whether some entry is NaN or infinite, as a tensor: one pass over the entries, and nothing of their size is made.

    >>> bool(not_finite(torch.tensor([1.0, float("nan")]))), bool(not_finite(torch.ones(2)))
    (True, False)
    """
    t = t.detach()
    if not t.numel():
        return torch.zeros((), dtype=torch.bool, device=t.device)
    largest = torch.linalg.vector_norm(t, torch.inf) if t.is_floating_point() else t.abs().amax()
    return ~(largest < torch.inf)  # of NaN, too; `isfinite` would be four operations on a GPU


@dataclass
class Checks:
    """Conditions on the device that must not hold, with the error of each.

    >>> checks = Checks()
    >>> checks.add(torch.tensor(False), lambda: ValueError("bad"))
    >>> checks.settle()
    """

    _new: list[tuple[Tensor, Callable[[], Exception]]] = field(default_factory=list)
    _asked: list[tuple[Asked, list[Callable[[], Exception]]]] = field(default_factory=list)

    def add(self, bad: Tensor, error: Callable[[], Exception]) -> None:
        """One more; `error` may look at tensors closely, since it is called only where `bad` is true."""
        self._new.append((bad, error))

    def ask(self) -> None:
        """Ask the devices about all that is new."""
        by_device: dict[torch.device, list[tuple[Tensor, Callable[[], Exception]]]] = {}
        for bad, error in self._new:
            by_device.setdefault(bad.device, []).append((bad, error))
        self._new = []
        for found in by_device.values():
            self._asked.append((Asked(torch.stack([bad for bad, _ in found])), [error for _, error in found]))

    def read(self) -> None:
        """Raise the error of the first that is bad among those asked about."""
        asked, self._asked = self._asked, []
        for flags, errors in asked:
            for bad, error in zip(flags.read(), errors, strict=True):
                if bad:
                    self._new = []
                    raise error()

    def settle(self) -> None:
        """Ask and read."""
        self.ask()
        self.read()
