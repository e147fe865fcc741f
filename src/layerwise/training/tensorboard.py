"""TensorBoard as a place that measurements are sent to (extra `tensorboard`)."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from layerwise.foundations.optional import require


class TensorBoard:
    """A sink of `Recorder` that writes event files; view them with ``tensorboard --logdir FOLDER``."""

    def __init__(self, folder: str | Path) -> None:
        writer = require("torch.utils.tensorboard", "tensorboard", "logging to TensorBoard", extra="tensorboard")
        self._writer = writer.SummaryWriter(str(folder))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Write scalars of one step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is pending and close the files."""
        self._writer.close()

    def __enter__(self) -> "TensorBoard":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
