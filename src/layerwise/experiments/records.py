"""Records: append-only files of JSON lines, which survive being killed, cut short or damaged.

One file for an experiment, preset and configuration: ``<out>/<experiment>/<preset>-<digest>.jsonl``. Every session
begins with a manifest line (what was asked for, by which code, on what machine); every other line is the result of
one seed of one cell. A line ends with a check sum of its own bytes, so that a damaged line is known as such: it is
reported with its number, and the seed it held is run again. Numbers that are not finite are written as
``{"float": "nan"}``, so that every line is standard JSON.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from layerwise.foundations.errors import FileFormatError, InputError, describe

try:
    import fcntl
except ImportError:  # no such lock on this system: two runners on one file are then not kept apart
    fcntl = None

OUT = Path("runs")
"""Folder of all records, if nothing else is said."""
FORMAT = 1
FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
SUM = re.compile(rb',"sum":"([0-9a-f]{16})"\}')
SUFFIX = ".jsonl"
TIMED = ("time", "seconds")
"""Fields that differ between equal runs; see `comparable`."""


class RecordError(FileFormatError):
    """Records that cannot be written or read; what was recorded before is untouched."""


# --- One line -----------------------------------------------------------------------------------------------


def encode(entry: Mapping[str, Any]) -> bytes:
    """One line: the entry as JSON, with the first 16 digits of its SHA-256 as the last field.

    >>> encode({"cell": "kfac", "seed": 0})
    b'{"cell":"kfac","seed":0,"sum":"dc99ed4ed871cdef"}\\n'
    """
    body = json.dumps(to_plain(entry), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    return body[:-1] + f',"sum":"{_sum(body)}"}}\n'.encode()


def decode(line: bytes) -> dict[str, Any] | None:
    """The entry of a line (without its end), or None if it is not exactly what was written.

    >>> line = encode({"cell": "kfac", "seed": 0})[:-1]
    >>> decode(line), decode(line[:-1])
    ({'cell': 'kfac', 'seed': 0}, None)
    """
    tail = line[-len(',"sum":"0123456789abcdef"}') :]
    found = SUM.fullmatch(tail)
    body = line[: -len(tail)] + b"}"
    if found is None or found[1].decode() != _sum(body):
        return None
    try:
        # Few lines have numbers that are not finite, and looking at every mapping doubles the time of reading.
        return json.loads(body, object_hook=_float_of if b'"float"' in body else None)
    except (ValueError, RecursionError):  # written by something else, with a sum that fits
        return None


def _sum(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:16]


def to_plain(value: Any) -> Any:
    """A value as JSON knows it; scalars and arrays of torch and NumPy become numbers and lists."""
    if isinstance(value, Mapping):
        return {str(name): to_plain(item) for name, item in value.items()}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list | tuple | range):
        return [to_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return to_plain(value.tolist())
    raise InputError(
        describe(f"a result of type {type(value).__name__}", "numbers, text and lists of them", "convert it in `run`")
    )


def _float_of(entry: dict[str, Any]) -> Any:
    return float(entry["float"]) if entry.keys() == {"float"} and isinstance(entry["float"], str) else entry


def comparable(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record without what differs between equal runs: the same seed gives the same, bit for bit.

    >>> comparable({"cell": "kfac", "seed": 0, "values": {}, "seconds": 1.2})
    {'cell': 'kfac', 'seed': 0, 'values': {}}
    """
    return {name: value for name, value in record.items() if name not in TIMED}


# --- Reading ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RecordFile:
    """What a file holds."""

    path: Path
    manifests: tuple[Mapping[str, Any], ...]
    """One a session, oldest first."""
    records: tuple[Mapping[str, Any], ...]
    """One a finished cell and seed: "cell", "seed", "preset", "values", "series", "digest", "seconds"."""
    notes: tuple[str, ...]
    """Damaged lines, in words; empty for a sound file."""
    manifest_lines: tuple[int, ...] = ()
    """Where in the file the manifests are."""

    def finished(self) -> set[tuple[str, int]]:
        """Cells and seeds that need not be run again."""
        return {(record["cell"], record["seed"]) for record in self.records}


def path_of(out: Path, experiment: str, preset: str, digest: str) -> Path:
    """Where the records of a configuration are."""
    return Path(out) / experiment / f"{preset}-{digest}{SUFFIX}"


def files(out: Path, experiment: str | None = None) -> list[Path]:
    """All files of records in a folder, sorted by name."""
    return sorted(path for path in Path(out).glob(f"{experiment or '*'}/*-*{SUFFIX}") if path.is_file())


def read(path: Path) -> RecordFile:
    """Read a file of records; a missing one is empty, a damaged line is left out and named in the notes."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        content = b""
    except OSError as error:
        raise RecordError(
            describe(f"{path}, which cannot be read ({error.strerror})", "a file of records", "check its permissions")
        ) from error
    manifests, lines, records, notes = [], [], {}, []
    for number, line in enumerate(content.split(b"\n"), start=1):
        entry = decode(line)
        if entry is None:
            if line:
                notes.append(f"{path}, line {number}: damaged or cut short; left out, and what it held is run again")
        elif not path.stem.endswith(f"-{entry.get('digest')}"):
            notes.append(f"{path}, line {number}: of another configuration ({entry.get('digest')}); left out")
        elif entry.get("kind") == "manifest":
            manifests.append(entry)
            lines.append(number)
        elif wrong := _not_a_record(entry):
            notes.append(f"{path}, line {number}: no record, since {wrong}; left out, and what it held is run again")
        else:
            records.setdefault((entry["cell"], entry["seed"]), {"values": {}, "series": {}} | entry)
    return RecordFile(
        path=path,
        manifests=tuple(manifests),
        records=tuple(records.values()),
        notes=tuple(notes),
        manifest_lines=tuple(lines),
    )


def _not_a_record(entry: Mapping[str, Any]) -> str:
    """What a line lacks that was written whole, but not by the runner; nothing for a record."""
    if not isinstance(entry.get("cell"), str):
        return "it has no `cell` (a text)"
    if not isinstance(entry.get("seed"), int) or isinstance(entry["seed"], bool):
        return "it has no `seed` (an integer)"
    for name in ("values", "series"):
        if not isinstance(entry.get(name, {}), Mapping):
            return f"its `{name}` are no mapping"
    return ""


# --- Writing ------------------------------------------------------------------------------------------------


class Journal:
    """Appends to a file of records; one process at a time.

    Every entry is one ``write`` to a file opened for appending, followed by ``fsync``: a process killed at any moment
    leaves whole lines and at most one that is cut short, after which the next session begins a line of its own.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._file: int | None = None
        self._torn = False
        self._made: list[Path] = []  # folders

    def __enter__(self) -> "Journal":
        try:
            self._made = [folder for folder in (self.path.parent, *self.path.parent.parents) if not folder.exists()]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, FLAGS, 0o644)
        except OSError as error:
            raise self._failed(error, "made or opened") from error
        try:
            self._lock(self._file)
            if not self._still_there(self._file):  # another run has just given it up, see `discard`
                os.close(self._file)
                self._file = os.open(self.path, FLAGS, 0o644)
                self._lock(self._file)
            self._torn = os.lseek(self._file, 0, os.SEEK_END) > 0 and self._last_byte(self._file) != b"\n"
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file is not None:
            os.close(self._file)  # also gives the lock back
            self._file = None

    def discard(self) -> None:
        """Take the file away, and the folders that were made for it: a run that failed at once leaves nothing."""
        assert self._file is not None, "while nobody else can write to it"
        with contextlib.suppress(OSError):  # then it stays; it says only that a run was begun
            self.path.unlink()
            for folder in self._made:
                folder.rmdir()

    def append(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Write entries, one line each, and see them on the disk."""
        assert self._file is not None, "a journal is written inside its `with`"
        for entry in entries:
            line = (b"\n" if self._torn else b"") + encode(entry)
            self._torn = True  # until the whole line is known to be there
            try:
                written = os.write(self._file, line)
                if written < len(line):
                    raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes were taken")
                self._torn = False
                os.fsync(self._file)
            except OSError as error:
                raise self._failed(error, "written") from error

    def _still_there(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), os.stat(self.path))
        except FileNotFoundError:
            return False

    @staticmethod
    def _last_byte(file: int) -> bytes:
        os.lseek(file, -1, os.SEEK_END)
        return os.read(file, 1)

    def _lock(self, file: int) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RecordError(
                describe(
                    f"{self.path}, which another run is writing",
                    "one run of a configuration at a time",
                    "wait for the other one, stop it, or choose another folder with --out",
                )
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise self._failed(error, "locked") from error

    def _failed(self, error: OSError, what: str) -> RecordError:
        remedy = {
            errno.ENOSPC: "make room on the disk and type the same command again: it goes on where it stopped",
            errno.EDQUOT: "make room in your quota and type the same command again: it goes on where it stopped",
        }.get(error.errno or 0, "choose a folder that you may write to, with --out")
        reason = os.strerror(error.errno) if error.errno else str(error)
        return RecordError(
            describe(
                f"{self.path}, which could not be {what} ({reason})",
                "a file that can be appended to; all that was recorded before is kept",
                remedy,
            )
        )
