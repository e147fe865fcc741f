"""Kernels that Triton compiles, or loads from its cache, while something else is going on."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Compilations:
    """Names of kernels with the step at which each was first wanted in this process."""

    step: int = 0
    compiled: list[tuple[int, str]] = field(default_factory=list)
    loaded: list[tuple[int, str]] = field(default_factory=list)
    """Compiled by an earlier process, or by one of those that compile for this one (`compile_processes`)."""

    def take(self, name: str, from_cache: bool) -> None:
        (self.loaded if from_cache else self.compiled).append((self.step, name))

    def summary(self, first: int) -> dict:
        """All of them, and those from a step on."""
        late = [(step, name) for step, name in self.compiled if step >= first]
        return {
            "compiled": len(self.compiled),
            "loaded": len(self.loaded),
            "compiled_late": len(late),
            "loaded_late": sum(step >= first for step, _ in self.loaded),
            "late": late[:20],
        }


@contextlib.contextmanager
def compilations() -> Iterator[Compilations | None]:
    """Counted for a while; None where Triton is absent or cannot tell."""
    try:
        from triton import knobs

        previous = knobs.compilation.listener
    except (ImportError, AttributeError):
        yield None
        return
    found = Compilations()

    def listener(**event: Any) -> None:
        found.take(str(getattr(event.get("src"), "name", "?")), bool(event.get("cache_hit")))
        if previous is not None:
            previous(**event)

    knobs.compilation.listener = listener
    try:
        yield found
    finally:
        knobs.compilation.listener = previous
