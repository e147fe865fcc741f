"""`HeldTogether`: a setting of the whole process that several callers need at once."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any


class HeldTogether:
    """A process-wide setting that several callers, also in several threads, hold at once; the last one restores it."""

    def __init__(self, change: Callable[[], AbstractContextManager[Any]]) -> None:
        self._change, self._lock, self._holders, self._held = change, threading.Lock(), 0, ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Hold it for a while."""
        with self._lock:
            if not self._holders:
                self._held.enter_context(self._change())
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if not self._holders:
                    self._held.close()
