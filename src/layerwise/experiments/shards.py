"""An experiment in shares: array jobs of a cluster run a share each, without a process that hands out work.

Share i of n is every n-th cell and seed, from the i-th on. It has a file of its own,
``<out>/<experiment>/shards/<i>-of-<n>/<preset>-<digest>.jsonl``, so that no two jobs write to one file, and goes on
where it stopped like any run. `merge` joins what is there into the experiment's file, by writing another one and
renaming it: a reader sees the old file or the new one, and joining twice changes nothing.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from layerwise.experiments.records import Journal, decode, read
from layerwise.experiments.tasks import Task
from layerwise.foundations.errors import InputError, describe

FOLDER = "shards"


@dataclass(frozen=True)
class Shard:
    """One of several shares of an experiment's cells and seeds."""

    place: int
    """From 0, as array jobs are numbered."""
    count: int

    @classmethod
    def read(cls, given: str) -> "Shard":
        """As it is typed.

        >>> Shard.read("2/8")
        Shard(place=2, count=8)
        """
        found = re.fullmatch(r"(\d+)/(\d+)", given.strip())
        if found is None or not int(found[1]) < int(found[2]):
            raise InputError(
                describe(f"--shard {given}", "i/n with i from 0 to n − 1", "pass e.g. --shard $SLURM_ARRAY_TASK_ID/8")
            )
        return cls(int(found[1]), int(found[2]))

    def path(self, records: Path) -> Path:
        """Where this share's records are, beside the experiment's."""
        return records.parent / FOLDER / f"{self.place}-of-{self.count}" / records.name

    def of(self, tasks: Sequence[Task]) -> list[Task]:
        """Every n-th cell and seed of all of them, finished or not, so that shares do not depend on one another."""
        found, number = list[Task](), 0
        for cell, seeds in tasks:
            own = [seed for place, seed in enumerate(seeds, start=number) if place % self.count == self.place]
            number += len(seeds)
            if own:
                found.append((cell, own))
        return found


def merge(records: Path) -> int:
    """Join the records of all shares into the experiment's file; returns how many were new."""
    files = sorted(records.parent.glob(f"{FOLDER}/*-of-*/{records.name}"))
    if not files:
        return 0
    with Journal(records):  # nobody adds to it meanwhile
        content = records.read_bytes()
        known = read(records).finished()
        lines = {line for line in content.split(b"\n") if line}
        new, added = list[bytes](), 0
        for path in files:
            for line in path.read_bytes().split(b"\n"):
                entry = decode(line)
                if entry is None or line in lines:
                    continue
                if entry.get("kind") != "manifest":
                    key = (entry.get("cell"), entry.get("seed"))
                    if key in known:
                        continue
                    known.add(key)  # type: ignore[arg-type]
                    added += 1
                lines.add(line)
                new.append(line)
        if new:
            joined = content + (b"" if not content or content.endswith(b"\n") else b"\n") + b"\n".join(new) + b"\n"
            _replace(records, joined)
    return added


def merge_all(out: Path) -> int:
    """The same for every experiment in a folder."""
    names = {(path.parents[2], path.name) for path in Path(out).glob(f"*/{FOLDER}/*-of-*/*-*.jsonl")}
    return sum(merge(folder / name) for folder, name in sorted(names))


def _replace(path: Path, content: bytes) -> None:
    """Write a file under another name, see it on the disk, and rename it."""
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
