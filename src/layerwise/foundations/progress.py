"""A progress bar on long work: `rich` where it is installed, a plain line otherwise, silence off a terminal."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar, runtime_checkable

T = TypeVar("T")


@runtime_checkable
class Progress(Protocol):
    """Anything that can wrap an iterable and show how far it is."""

    def track(self, items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
        """Yield the items, showing progress on the way."""
        ...


class Pace:
    """How long the rest will take, from how fast things came lately.

    What comes first also pays for the start, so it says nothing about the rest; and results may come in bursts, as the
    seeds of a cell that are run as one tensor program do. Hence only waits between whole bursts count, from the end of
    the first burst on.
    """

    def __init__(self, start: float | int | None = None) -> None:
        self._bursts: list[tuple[float | int, float | int, int]] = []  # first moment, last moment, items until then
        self._start = time.monotonic() if start is None else start
        self._first_wait: float | int = 0.0
        self._longest_wait: float | int = 0.0  # after the first

    def add(self, done: int, now: float | int | None = None) -> None:
        """Say that so many items are done."""
        now = time.monotonic() if now is None else now
        if not self._bursts:
            self._first_wait = now - self._start
            self._bursts = [(now, now, done)]
            return
        self._bursts = [*self._bursts[-20:], (now, now, done)]  # what came long ago may have been of another kind
        wait = now - self._bursts[-2][1]
        if wait > self._longest_wait:  # what seemed to be waits before may have been within a burst
            self._longest_wait = wait
            self._bursts = self._joined(self._bursts)
        elif wait < 0.2 * self._longest_wait:
            self._bursts = [*self._bursts[:-2], *self._joined(self._bursts[-2:])]

    def _joined(self, bursts: list[tuple[float | int, float | int, int]]) -> list[tuple[float | int, float | int, int]]:
        joined = bursts[:1]
        for begin, end, done in bursts[1:]:
            if begin - joined[-1][1] < 0.2 * self._longest_wait:
                joined[-1] = (joined[-1][0], end, done)
            else:
                joined.append((begin, end, done))
        return joined

    def left(self, total: int | None, now: float | int | None = None) -> float | None:
        """Seconds, or None while nothing can be said.

        >>> pace = Pace(start=0)
        >>> pace.add(1, now=3)
        >>> pace.left(5, now=3) is None  # most of it may have been the start
        True
        >>> for second, done in ((5, 2), (7, 3)):
        ...     pace.add(done, now=second)
        >>> pace.left(5, now=7)
        4.0
        """
        if total is None or not self._bursts:
            return None
        if self._bursts[-1][2] >= total:
            return 0.0
        counts = [0, *(count for _, _, count in self._bursts)]
        still_coming = counts[-1] - counts[-2] < (counts[-2] - counts[-3] if len(counts) > 2 else 0)
        whole = self._bursts[:-1] if still_coming else self._bursts
        if len(whole) < 2 or whole[-1][1] - whole[0][1] < 0.2 * self._first_wait:
            return None
        (_, first, begun), (_, last, done) = whole[0], whole[-1]
        now = time.monotonic() if now is None else now
        return float(max(0.0, (last - first) / (done - begun) * (total - done) - (now - last)))


class Silent:
    """Shows nothing."""

    def track(self, items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
        """Yield the items."""
        yield from items


class Bar:
    """A bar on standard error that appears only if the work lasts longer than `delay` seconds."""

    def __init__(self, delay: float = 2.0) -> None:
        self.delay = delay
        self._note = ""

    def note(self, text: str) -> None:
        """Show this beside the description from now on, such as a loss."""
        self._note = f", {text}"

    def track(self, items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
        """Yield the items, showing a bar once `delay` has passed."""
        start, shown, pace = time.monotonic(), False, Pace()
        for done, item in enumerate(items, start=1):
            yield item
            pace.add(done)
            elapsed = time.monotonic() - start
            if elapsed > self.delay:
                shown = True
                line = self._line(description + self._note, done, total, elapsed, pace.left(total))
                print(f"\r{line}", end="", file=sys.stderr)
        if shown:
            print(file=sys.stderr)

    @staticmethod
    def _line(description: str, done: int, total: int | None, elapsed: float, left: float | None) -> str:
        if not total:
            return f"{description}: {done} batches, {elapsed:.0f} s"
        filled = int(24 * min(done / total, 1.0))
        ahead = f"{elapsed:.0f} s so far" if left is None else f"{left:.0f} s left"
        return f"{description} [{'█' * filled}{' ' * (24 - filled)}] {done}/{total}, {ahead} "


class RichBar:
    """The same with `rich`."""

    def __init__(self, delay: float = 2.0) -> None:
        self.delay = delay
        self._note = ""

    def note(self, text: str) -> None:
        """Show this beside the description from now on, such as a loss."""
        self._note = f", {text}"

    def track(self, items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
        """Yield the items under a rich progress bar, once `delay` has passed."""
        from rich.console import Console
        from rich.progress import Progress as RichProgress

        start = time.monotonic()
        bar = RichProgress(console=Console(stderr=True), transient=True)
        task = bar.add_task(description, total=total)
        try:
            for item in items:
                yield item
                bar.update(task, advance=1, description=description + self._note)
                if not bar.live.is_started and time.monotonic() - start > self.delay:
                    bar.start()
        finally:
            if bar.live.is_started:
                bar.stop()


def resolve(progress: bool | Progress | None) -> Progress:
    """What a `progress=` argument means: None shows a bar on a terminal only; True, always; False, never."""
    if progress is False or (progress is None and not sys.stderr.isatty()):
        return Silent()
    if progress is None or progress is True:
        try:
            import rich  # noqa: F401
        except ImportError:
            return Bar()
        return RichBar()
    return progress
