"""Where Triton's kernels can run, and how they are launched."""

import importlib
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from layerwise.foundations.errors import InputError, describe
from layerwise.optim.cuda.triton import ahead

LEAST_CAPABILITY = (8, 0)  # asynchronous copies and bfloat16 in the tensor cores
MOST_MATRICES = 65535  # of a stack: programs along the second axis of a launch
H200_PROCESSORS = 132


def on_gpu(device: torch.device) -> bool:
    """Whether tensors there are treated as a GPU's: those without data are, which stand for them (`rehearsal`).

    >>> on_gpu(torch.device("cpu"))
    False
    """
    return device.type in ("cuda", "meta")


@cache
def available(device: torch.device) -> bool:
    """Whether the kernels run on this device: Triton can be imported, and the GPU has capability 8.0 or more.

    >>> available(torch.device("cpu"))
    False
    """
    device = torch.device("cuda") if device.type == "meta" else device
    if device.type != "cuda" or torch.version.cuda is None or not _has_triton():
        return False
    return torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; as many as an H200 has, where there is none.

    >>> processors(torch.device("cpu"))
    132
    """
    if not torch.cuda.is_available() or device.type == "cpu":
        return H200_PROCESSORS
    device = torch.device("cuda") if device.type == "meta" else device
    return torch.cuda.get_device_properties(device).multi_processor_count


def _has_triton() -> bool:
    """By importing it, whole and in this thread: two that import parts of it may each get half of it."""
    try:
        importlib.import_module("triton")
    except Exception:  # absent, or not made for this machine
        return False
    return True


def prepare(device: torch.device) -> None:
    """Begin what takes time before any kernel can be compiled, where there will be some.

    >>> prepare(torch.device("cpu"))
    """
    if available(device):
        ahead.prepare(device)


def kernels(module: str = "product_kernels") -> Any:
    """A module of kernels, to launch them.

    >>> kernels.__name__
    'kernels'
    """
    return ahead.launched(_imported(module))


@cache
def _imported(module: str) -> Any:
    """At the first use."""
    found = importlib.import_module(f"layerwise.optim.cuda.triton.{module}")
    if found.triton is None:
        raise InputError(describe("no Triton", "Triton, for these kernels", "ask `available(device)` first"))
    return found


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of the tensors.

    >>> with on(torch.device("cpu")):
    ...     pass
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def ceil(a: int, b: int) -> int:
    """a/b rounded up.

    >>> ceil(7, 3)
    3
    """
    return -(-a // b)
