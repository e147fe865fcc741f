"""A folder in which a cell keeps what it has done so far, so that an hour of trials survives an interruption.

The runner makes it beside the records, and removes it when all cells are recorded.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_FOLDER: ContextVar[Path | None] = ContextVar("scratch folder of a cell", default=None)


def scratch() -> Path | None:
    """The folder of the cell that is being run, which may not exist yet; None where nobody records it.

    >>> scratch() is None
    True
    """
    return _FOLDER.get()


def folder_of(records: Path) -> Path:
    """For all cells of a file of records.

    >>> folder_of(Path("runs/autoencoder/paper-00.jsonl")).name
    'paper-00.unfinished'
    """
    return records.with_suffix(".unfinished")


@contextmanager
def scratch_in(folder: Path | str | None, cell: str) -> Iterator[None]:
    """While this lasts, `scratch` is a subfolder named after the cell."""
    token = _FOLDER.set(None if folder is None else Path(folder) / re.sub(r"[^\w.-]+", "_", cell))
    try:
        yield
    finally:
        _FOLDER.reset(token)
