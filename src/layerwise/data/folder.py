"""The folder of parquet files: where it is, what it must hold, and whether its files are those that are known."""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from layerwise.foundations.errors import FileFormatError, InputError, LayerwiseError, describe, not_one_of

VARIABLE = "LAYERWISE_DATA"
SPLITS = ("train", "test")
SHARD = re.compile(r"-(\d+)-of-(\d+)\.parquet$")


class MissingDataError(LayerwiseError, FileNotFoundError):
    """Data that is not there; the message has the variable to set or the command to type."""


def root(folder: str | os.PathLike[str] | None = None) -> Path:
    """The folder given, or the one that the environment variable names."""
    named = folder if folder is not None else os.environ.get(VARIABLE)
    if not named:
        raise MissingDataError(
            describe(
                f"no folder: {VARIABLE} is not set",
                "a folder with parquet files as on the Hugging Face hub",
                f"type: export {VARIABLE}=/path/to/data, or pass folder=",
            )
        )
    path = Path(named).expanduser()
    if not path.is_dir():
        raise MissingDataError(
            describe(f"{path}, which is no folder", "a folder", f"set {VARIABLE} to one that exists, or pass folder=")
        )
    return path


def shards(folder: Path, places: Sequence[str], split: str, repository: str) -> list[Path]:
    """The files of a split, in order, from the first of `places` (subfolders) that has any."""
    if split not in SPLITS:
        raise InputError(not_one_of("split", split, SPLITS))
    for place in places:
        found = sorted((folder / place).glob(f"{split}-*-of-*.parquet"))
        if found:
            _check_complete(found)
            return found
    target = folder / places[0]
    raise MissingDataError(
        describe(
            f"no {split}-*.parquet in {target}",
            f"the parquet files of {repository}",
            f"type: hf download {repository} --repo-type dataset --local-dir {target} (pip install huggingface_hub)",
        )
    )


def _check_complete(found: Sequence[Path]) -> None:
    """All shards that the names speak of are there."""
    matches = [SHARD.search(path.name) for path in found]
    numbers = {(int(m[1]), int(m[2])) for m in matches if m is not None}
    total = max(of for _, of in numbers)
    if numbers != {(k, total) for k in range(total)}:
        raise MissingDataError(
            describe(
                f"{len(numbers)} of {total} shards in {found[0].parent}",
                "all of them, of one version",
                "download again",
            )
        )


def verify(path: Path, known: Mapping[str, str]) -> None:
    """Compare a file's SHA-256 with the recorded one; nothing is recorded for a file of another name."""
    expected = known.get(path.name)
    if expected is None:
        return
    with path.open("rb") as file:
        given = hashlib.file_digest(file, "sha256").hexdigest()
    if given != expected:
        raise FileFormatError(
            describe(
                f"{path} with SHA-256 {given}",
                f"SHA-256 {expected}",
                "copy the file again, or pass verify=False if it is another version of the same data",
            )
        )
