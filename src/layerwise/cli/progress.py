"""Progress of a run: bars with the time left on a terminal, plain lines in a log."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from layerwise.foundations.progress import Bar, Progress

T = TypeVar("T")


class Lines:
    """A line on standard error when something is finished, at most one in `every` seconds, and for the last."""

    def __init__(self, every: float | int = 5.0) -> None:
        self.every = every

    def track(self, items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
        """Yield the items, saying what is finished and how long the rest will take."""
        start = said = time.monotonic()
        for done, item in enumerate(items, start=1):
            yield item
            now = time.monotonic()
            if done == 1 or done == total or now - said >= self.every:
                said = now
                left = (now - start) / done * max((total or done) - done, 0)
                print(f"{description}: {done} of {total}, {item}, {left:.0f} s left", file=sys.stderr, flush=True)


class RunBar:
    """A bar of rich for the run and, below it, one for what a cell is doing (`inner`)."""

    def __init__(self) -> None:
        self.inner = _InnerBar()

    def track(self, items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
        """Yield the items under a bar with the time left."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("elapsed"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with RichProgress(*columns, console=Console(stderr=True), transient=True) as bars:
            self.inner.bars = bars
            task = bars.add_task(description, total=total)
            try:
                for item in items:
                    yield item
                    bars.update(task, advance=1, description=f"{description}: {item}")
            finally:
                self.inner.bars = None


class _InnerBar:
    """Bars below that of the run, for as long as it is shown."""

    def __init__(self) -> None:
        self.bars: Any = None

    def track(self, items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
        """Yield the items under a bar of their own, which disappears with the last of them."""
        if self.bars is None:
            yield from items
            return
        task = self.bars.add_task(f"  {description}", total=total)
        try:
            for item in items:
                yield item
                self.bars.advance(task)
        finally:
            if self.bars is not None:
                self.bars.remove_task(task)


def chosen() -> Progress:
    """Bars on a terminal, lines elsewhere."""
    if not sys.stderr.isatty():
        return Lines()
    try:
        import rich  # noqa: F401
    except ImportError:
        return Bar(delay=0.0)
    return RunBar()
