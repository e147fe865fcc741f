"""Points in time that do not wait for the device."""

import time

import torch


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


class Marks:
    """CUDA events, read when all work is over, or the clock on a CPU.

    An event that is recorded while the device is idle has the time of its recording: differences then hold what the
    device waited for, a compilation or a slow launch, too.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._points: list = []

    def mark(self) -> None:
        if not self.device.startswith("cuda"):
            self._points.append(time.perf_counter())
            return
        self._points.append(torch.cuda.Event(enable_timing=True))
        self._points[-1].record()

    def milliseconds(self) -> list[float]:
        """Between each mark and the next."""
        synchronize(self.device)
        pairs = zip(self._points, self._points[1:], strict=False)
        if not self.device.startswith("cuda"):
            return [1e3 * (b - a) for a, b in pairs]
        return [a.elapsed_time(b) for a, b in pairs]
