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


class Silent:
    """Shows nothing."""

    def track(self, items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
        """Yield the items."""
        yield from items


class Bar:
    """A bar on standard error that appears only if the work lasts longer than `delay` seconds."""

    def __init__(self, delay: float = 2.0) -> None:
        self.delay = delay

    def track(self, items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
        """Yield the items, showing a bar once `delay` has passed."""
        start, shown = time.monotonic(), False
        for done, item in enumerate(items, start=1):
            yield item
            elapsed = time.monotonic() - start
            if elapsed > self.delay:
                shown = True
                print(f"\r{self._line(description, done, total, elapsed)}", end="", file=sys.stderr)
        if shown:
            print(file=sys.stderr)

    @staticmethod
    def _line(description: str, done: int, total: int | None, elapsed: float) -> str:
        if not total:
            return f"{description}: {done} batches, {elapsed:.0f} s"
        filled = int(24 * min(done / total, 1.0))
        left = elapsed / done * max(total - done, 0)
        return f"{description} [{'█' * filled}{' ' * (24 - filled)}] {done}/{total}, {left:.0f} s left "


class RichBar:
    """The same with `rich`."""

    def __init__(self, delay: float = 2.0) -> None:
        self.delay = delay

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
                bar.advance(task)
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
