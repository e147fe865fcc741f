"""Progress of a run: bars with the time left on a terminal, plain lines in a log."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from layerwise.foundations.progress import Bar, Pace, Progress

T = TypeVar("T")


class Lines:
    """A line on standard error when something is finished, at most one in `every` seconds, and for the last."""

    def __init__(self, every: float | int = 5.0) -> None:
        self.every = every

    def track(self, items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
        """Yield the items, saying what is finished and how long the rest will take."""
        start = said = time.monotonic()
        pace = Pace()
        for done, item in enumerate(items, start=1):
            yield item
            now = time.monotonic()
            pace.add(done)
            if done == 1 or done == total or now - said >= self.every:
                said, left = now, pace.left(total)
                ahead = f"{now - start:.0f} s so far" if left is None else f"{left:.0f} s left"
                print(f"{description}: {done} of {total}, {item}, {ahead}", file=sys.stderr, flush=True)


class RunBar:
    """A bar of rich for the run and, below it, one for what a cell is doing (`inner`)."""

    def __init__(self) -> None:
        self.inner = _InnerBar()

    def track(self, items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
        """Yield the items under a bar with the time left."""
        from rich.console import Console
        from rich.progress import Progress as RichProgress

        console, pace = Console(stderr=True), Pace()
        with RichProgress(*_columns(console.width), console=console, transient=True, expand=True) as bars:
            self.inner.bars = bars
            task = bars.add_task(description, total=total, left=UNKNOWN)
            try:
                for done, item in enumerate(items, start=1):
                    yield item
                    pace.add(done)
                    shown = f"{description}: {item}"
                    bars.update(task, advance=1, description=shown, left=_clock(pace.left(total)))
            finally:
                self.inner.bars = None


UNKNOWN = "-:--:--"


def _columns(width: int) -> list[Any]:
    """What a line of progress has. The numbers keep their place: on a narrow terminal, the words give way."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    def fixed(least: int) -> Column:
        return Column(no_wrap=True, min_width=least)

    columns: list[Any] = [
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
    ]
    if width >= 70:
        columns.append(BarColumn(bar_width=min(40, width // 4)))
    columns.append(MofNCompleteColumn(table_column=fixed(5)))
    if width >= 55:
        columns.append(TextColumn("elapsed", table_column=fixed(7)))
    columns.append(TimeElapsedColumn(table_column=fixed(7)))
    return [*columns, TextColumn("left {task.fields[left]}", table_column=fixed(12))]


def _clock(seconds: float | None) -> str:
    """Hours, minutes and seconds.

    >>> _clock(75.0), _clock(None)
    ('0:01:15', '-:--:--')
    """
    if seconds is None:
        return UNKNOWN
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


class _InnerBar:
    """Bars below that of the run, for as long as it is shown."""

    def __init__(self) -> None:
        self.bars: Any = None

    def track(self, items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
        """Yield the items under a bar of their own, which disappears with the last of them."""
        if self.bars is None:
            yield from items
            return
        task, pace = self.bars.add_task(f"  {description}", total=total, left=UNKNOWN), Pace()
        try:
            for done, item in enumerate(items, start=1):
                yield item
                pace.add(done)
                self.bars.update(task, advance=1, left=_clock(pace.left(total)))
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
