"""The command that makes a run again, letter by letter."""

import dataclasses
import shlex
from collections.abc import Iterator
from typing import Any

from layerwise.experiments.experiment import Experiment


def run_command(
    experiment: Experiment,
    preset: str,
    config: Any,
    *,
    source: str | None = None,
    engine: str = "batched",
    first: int = 0,
) -> str:
    """``layerwise run`` with the preset and every field that differs from it; `first` is the first seed.

    `source` is where an experiment outside the catalog is found, as ``module:ATTRIBUTE``.
    """
    words = ["layerwise", "run", source or experiment.name, "--preset", preset]
    if engine != "batched":
        words += ["--engine", engine]
    if first:
        words += ["--first-seed", str(first)]
    return shlex.join([*words, *_options(experiment.preset(preset), config)])


def _options(standard: Any, config: Any) -> Iterator[str]:
    for entry in dataclasses.fields(config):
        before, now = getattr(standard, entry.name), getattr(config, entry.name)
        name = entry.name.replace("_", "-")
        if dataclasses.is_dataclass(now) and type(now) is type(before):
            yield from _options(before, now)
        elif isinstance(now, bool) and now != before:
            yield f"--{name}" if now else f"--no-{name}"
        elif now != before:
            yield f"--{name}"
            yield from map(str, now) if isinstance(now, list | tuple) else [str(now)]
