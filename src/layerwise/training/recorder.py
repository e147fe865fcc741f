"""`Recorder`: what was measured at which step, as columns; and where else it is sent."""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class Sink(Protocol):
    """Somewhere that measurements are sent as they come, such as TensorBoard."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Take what was measured at a step."""
        ...


class Recorder:
    """Columns of equal length; what was not measured at a step is NaN.

    >>> recorder = Recorder()
    >>> recorder.add(0, {"loss": 2.0})
    >>> recorder.add(5, {"loss": 1.0, "trace": 3.0})
    >>> recorder.series()
    {'step': [0, 5], 'loss': [2.0, 1.0], 'trace': [nan, 3.0]}
    """

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self.steps: list[int] = []
        self._columns: dict[str, list[float]] = {}
        self._sinks = tuple(sinks)

    def add(self, step: int, values: Mapping[str, float | int]) -> None:
        """Note values at a step; a step that was noted before gets them too."""
        if not self.steps or self.steps[-1] != step:
            self.steps.append(step)
            for column in self._columns.values():
                column.append(math.nan)
        for name, value in values.items():
            self._columns.setdefault(name, [math.nan] * len(self.steps))[-1] = float(value)
        for sink in self._sinks:
            sink.add(step, {name: float(value) for name, value in values.items()})

    def series(self) -> dict[str, list]:
        """The columns, "step" first; what `Row.series` of an experiment wants."""
        return {"step": list(self.steps)} | {name: list(column) for name, column in self._columns.items()}

    def last(self) -> dict[str, float]:
        """The newest number of every column."""
        newest = {}
        for name, column in self._columns.items():
            newest[name] = next((value for value in reversed(column) if not math.isnan(value)), math.nan)
        return newest
