"""Times by turns and peak memory, for calls that may fail."""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

Call = Callable[[], object]


@dataclass(frozen=True)
class Seconds:
    """Wall and CPU time. CPU time says more where other processes take turns on the cores."""

    wall: float
    cpu: float

    @classmethod
    def median(cls, samples: list["Seconds"]) -> "Seconds":
        return cls(statistics.median(s.wall for s in samples), statistics.median(s.cpu for s in samples))

    @classmethod
    def weighted(cls, terms: list[tuple["Seconds", float]]) -> "Seconds":
        return cls(sum(w * s.wall for s, w in terms), sum(w * s.cpu for s, w in terms))

    def over(self, other: "Seconds") -> "Seconds":
        """Ratios, not seconds any more."""
        return Seconds(self.wall / max(other.wall, 1e-9), self.cpu / max(other.cpu, 1e-9))


@dataclass
class Row:
    """Something to time. `prepare` is not timed and returns the call that is."""

    name: str
    prepare: Callable[[], Call]
    fresh: bool = False  # prepare anew before every call, for calls that cache their result
    samples: list[Seconds] = field(default_factory=list)
    note: str = ""
    peak_mb: float | None = None
    _call: Call | None = None

    def seconds(self) -> Seconds:
        return Seconds.median(self.samples)

    def once(self, device: str) -> Seconds:
        if self._call is None or self.fresh:
            self._call = None  # free the last one first
            self._call = self.prepare()
        return clock(self._call, device)

    def release(self) -> None:
        self._call = None


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def clock(call: Call, device: str) -> Seconds:
    """One call; freeing its result is not counted."""
    gc.collect()
    synchronize(device)
    cpu, wall = time.process_time(), time.perf_counter()
    result = call()
    synchronize(device)
    seconds = Seconds(time.perf_counter() - wall, time.process_time() - cpu)
    del result
    return seconds


def reason(error: BaseException) -> str:
    """One short line out of an exception."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:88]


def by_turns(rows: list[Row], repeats: int, patience: float, device: str) -> None:
    """Warm every row up once, then time all rows in turn, `repeats` times.

    A row gets fewer turns where its calls would together take more than `patience` seconds, but at least one.
    The warm-up never counts: what happens only once (an examination, a compilation) is lost in it.
    """
    turns = {id(row): _warm_up(row, repeats, patience, device) for row in rows if not row.note}
    for turn in range(repeats):
        for row in rows:
            if turn < turns.get(id(row), 0):
                row.samples.append(row.once(device))
    for row in rows:
        row.release()


def _warm_up(row: Row, repeats: int, patience: float, device: str) -> int:
    """The number of turns the row is to get; 0 with a note if it fails."""
    try:
        seconds = row.once(device)
    except Exception as error:  # a peer may fail in any way at all; the table says how
        row.note = f"fails: {reason(error)}"
        return 0
    return max(1, min(repeats, int(patience / max(seconds.wall, 1e-9))))


def peak_bytes(call: Call, device: str) -> int:
    """Peak memory of one call above the level just before it."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    _return_free_memory()
    before = _status_bytes("VmRSS") if _reset_high_water_mark() else _status_bytes("VmHWM")
    result = call()  # held until the mark is read
    peak = _status_bytes("VmHWM")
    del result
    return peak - before


def _return_free_memory() -> None:
    """Give freed pages back to the system; kept, they would hide what the call needs."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # not glibc
        return


def _reset_high_water_mark() -> bool:
    """Where the kernel does not allow it, the difference of two marks is a lower bound of the peak."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}: peak memory on the CPU is measured on Linux only")
