"""Whether a step, or a kernel, waits for the GPU."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def nothing_waits() -> Iterator[None]:
    """torch raises where the host would wait for the device."""
    _set_mode("error")
    try:
        yield
    finally:
        _set_mode("default")


def _set_mode(mode: str) -> None:
    with warnings.catch_warnings():  # torch says that this mode is a prototype, and does not see everything
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)
