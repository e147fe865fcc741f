"""How many bytes a call may use, and the error when a result would need more."""

import os

import torch

from layerwise.foundations.errors import InputError, MemoryBudgetError, describe


def default_budget(device: torch.device) -> int:
    """Half of what is free on the device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024 // 2
    except (OSError, KeyError, ValueError):
        if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
        return 4 * 2**30


def budget(memory: int | float | None, device: torch.device) -> int:
    """The bytes a caller allows, or the default for the device."""
    if memory is None:
        return default_budget(device)
    if not 0 < memory < float("inf"):
        raise InputError(describe(f"memory={memory}", "a positive number of bytes", "pass e.g. memory=2**30"))
    return int(memory)


def readable(size: int | float) -> str:
    """A size with its unit.

    >>> readable(3_500_000_000)
    '3.3 GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def require(needed: int, allowed: int, what: str, instead: str) -> None:
    """Refuse before allocating, with the size and what to use instead."""
    if needed > allowed:
        raise MemoryBudgetError(
            describe(
                f"{what}, which needs {readable(needed)}",
                f"at most {readable(allowed)} (memory={allowed})",
                instead,
            )
        )
