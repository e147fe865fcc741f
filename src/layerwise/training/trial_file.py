"""`TrialFile`: trials of a search on disk, one line each, so that a search goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerwise.foundations.errors import FileFormatError, describe
from layerwise.training.trials import Run, Trial


class TrialFile:
    """Finished trials in a file of JSON lines; what a kill cut short is run again.

    The first line says of which search they are: those of others are refused, since scores would be mixed. (Changes of
    the code are not seen.)
    """

    def __init__(self, path: Path | str | os.PathLike[str], about: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._found: dict[str, Trial] = {}
        first = json.dumps(dict(about), sort_keys=True)
        text = self.path.read_bytes() if self.path.exists() else b""
        lines = text.splitlines() if b"\n" in text else []  # a first line that was cut short is no beginning
        if lines and lines[0].decode(errors="replace") != first:
            given = f"{self.path}, which holds trials of another search ({lines[0].decode(errors='replace')[:200]})"
            raise FileFormatError(describe(given, f"trials of {first}", "give another file, or delete it"))
        for line in lines[1:]:
            try:
                trial = Trial(**json.loads(line))
            except (ValueError, TypeError):
                continue
            self._found[_key((trial.options, trial.seed))] = trial
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w" if not lines else "a") as file:
            file.write("\n" if lines else first + "\n")  # behind a line that was cut short, a new one

    def get(self, run: Run) -> Trial | None:
        """The trial of these options and this seed, if it is there."""
        return self._found.get(_key(run))

    def add(self, trial: Trial) -> Trial:
        """Write a trial; it is on the disk when this returns."""
        fields = {name: getattr(trial, name) for name in ("seed", "score", "diverged")}
        series = {name: list(column) for name, column in trial.series.items()}
        line = json.dumps({"options": dict(trial.options), "series": series, **fields})
        with self.path.open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._found[_key((trial.options, trial.seed))] = trial
        return trial


def _key(run: Run) -> str:
    options, seed = run
    return json.dumps([sorted(options.items()), seed])
