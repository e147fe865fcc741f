"""An experiment that says in a folder who is at work on it: for tests that kill those, or ask what GPU they see."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import toy_descent

from layerwise.experiments.experiment import Cell, Row


@dataclass(frozen=True, kw_only=True)
class Config(toy_descent.Config):
    """Settings of the descent that is followed."""

    folder: str = ""
    """Where every attempt has a file of its own, ``<cell>-<seed>-<process>``."""
    device: str = field(default="cpu")
    wait_for: int = 0
    """A seed takes no less than its pause, nor does it end before so many attempts have begun."""


def attempts(folder: Path | str) -> list[tuple[str, int, int]]:
    """Cell, seed and process of each, in the order that they began."""
    begun = sorted(Path(folder).glob("*-*-*"), key=lambda path: path.stat().st_mtime_ns)
    named = (path.name.split("-") for path in begun)
    return [(cell, int(seed), int(process)) for cell, seed, process in named]


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    for seed in seeds:
        file = Path(config.folder) / f"{cell.key.replace('/', '_')}-{seed}-{os.getpid()}"
        file.write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
        deadline = time.monotonic() + 120
        while len(attempts(config.folder)) < config.wait_for and time.monotonic() < deadline:
            time.sleep(0.01)
        yield from toy_descent.run(config, cell, [seed])


EXPERIMENT = replace(
    toy_descent.EXPERIMENT,
    name="followed-descent",
    presets={name: Config() for name in ("smoke", "laptop", "paper")},
    run=run,
)
