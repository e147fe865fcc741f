"""The host and its devices: values read back without a synchronization, and how many bytes a call may use.

``float(tensor)`` synchronizes: it waits until the device has done all that was queued. `Readback` copies a few values
to pinned memory and records an event in the stream: reading them waits for what was queued before it alone. `Checks`
collects conditions on tensors and reads all of them back together.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from layerwise.foundations.errors import InputError, MemoryBudgetError, describe


class Readback:
    """A small tensor on its way to the host: an asynchronous copy, and the event to wait for.

    >>> Readback(torch.tensor([3, 5])).read()
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
        """The values, once all that was queued before the copy is done."""
        return self._arrived().tolist()

    def array(self) -> np.ndarray:
        """The same as an array, for many values."""
        return self._arrived().numpy()

    def _arrived(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._values


def sent(t: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on a device, without a synchronization: pinned memory is copied in stream order.

    >>> sent(torch.ones(2), "cpu").tolist()
    [1.0, 1.0]
    """
    if torch.device(device).type == "cuda" and t.device.type == "cpu":
        return t.pin_memory().to(device, non_blocking=True)
    return t.to(device)


def drawn(
    draw: Callable[..., Tensor], like: Tensor, generator: torch.Generator, part: tuple[int, int] | None = None
) -> Tensor:
    """Random numbers of a tensor's shape by ``torch.rand`` or ``torch.randn``, the same whatever device it is on.

    `part` is the first example and the number of examples of the whole batch that `like` is cut from: a part gets what
    it would get in the whole. In float32 or better.
    """
    start, total = part or (0, like.shape[0])
    whole = draw((total, *like.shape[1:]), generator=generator, device=generator.device, dtype=torch.float32)
    numbers = whole[start : start + like.shape[0]]
    return sent(numbers, like.device).to(torch.promote_types(like.dtype, torch.float32))


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
    _sent: list[tuple[Readback, list[Callable[[], Exception]]]] = field(default_factory=list)

    def add(self, bad: Tensor, error: Callable[[], Exception]) -> None:
        """One more; `error` may look at tensors closely, since it is called only where `bad` is true."""
        self._new.append((bad, error))

    def send(self) -> None:
        """Begin to read back all that is new."""
        by_device: dict[torch.device, list[tuple[Tensor, Callable[[], Exception]]]] = {}
        for bad, error in self._new:
            by_device.setdefault(bad.device, []).append((bad, error))
        self._new = []
        for found in by_device.values():
            self._sent.append((Readback(torch.stack([bad for bad, _ in found])), [error for _, error in found]))

    def read(self) -> None:
        """Raise the error of the first that is bad among those sent."""
        sent, self._sent = self._sent, []
        for flags, errors in sent:
            for bad, error in zip(flags.read(), errors, strict=True):
                if bad:
                    self._new = []
                    raise error()

    def settle(self) -> None:
        """Send and read: a synchronization."""
        self.send()
        self.read()


# --- memory ----------------------------------------------------------------------------------------------------------


def default_budget(device: torch.device) -> int:
    """Half of what is free on the device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024 // 2
    except (OSError, KeyError, ValueError):
        if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
        return 4 * 2**30


def budget(memory: int | float | None, device: torch.device) -> int:
    """The bytes a caller allows, or the default for the device."""
    if memory is None:
        return default_budget(device)
    if not 0 < memory < float("inf"):
        raise InputError(describe(f"memory={memory}", "a positive number of bytes", "pass e.g. memory=2**30"))
    return int(memory)


def readable(size: int | float) -> str:
    """A size with its unit.

    >>> readable(3_500_000_000)
    '3.3 GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def require(needed: int, allowed: int, what: str, instead: str) -> None:
    """Refuse before allocating, with the size and what to use instead."""
    if needed > allowed:
        raise MemoryBudgetError(
            describe(
                f"{what}, which needs {readable(needed)}",
                f"at most {readable(allowed)} (memory={allowed})",
                instead,
            )
        )
