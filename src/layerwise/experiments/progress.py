"""Progress within a cell: a long cell can show how far it is below the bar of the whole run.

The function `run` of an experiment hands ``progress=within_cell()`` to what it calls; where nobody watches (a log, a
worker process) that is silent.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from layerwise.foundations.progress import Progress, Silent

_INNER: ContextVar[Progress | None] = ContextVar("progress within a cell", default=None)


def within_cell() -> Progress:
    """What shows the progress of the cell that is being run.

    >>> list(within_cell().track([1, 2], "steps", 2))
    [1, 2]
    """
    return _INNER.get() or Silent()


@contextmanager
def shown_within(progress: Progress) -> Iterator[None]:
    """While this lasts, `within_cell` is the `inner` of a progress that has one, and silent otherwise."""
    inner = getattr(progress, "inner", None)
    token = _INNER.set(inner if isinstance(inner, Progress) else None)
    try:
        yield
    finally:
        _INNER.reset(token)
