"""SIGTERM, which clusters and `kill` send, ends a run like Ctrl-C: what is finished is kept, workers are ended."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def stopped_by_sigterm() -> Iterator[list[int]]:
    """While this lasts, SIGTERM raises KeyboardInterrupt; the list holds the signals that came.

    >>> with stopped_by_sigterm() as came:
    ...     len(came)
    0
    """
    came: list[int] = []

    def stop(number: int, frame: Any) -> None:
        came.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # Python lets no other thread answer signals
        yield came
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
