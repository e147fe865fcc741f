"""Records survive being cut short, damaged, and a disk that is full; nothing recorded is ever lost."""

import errno
import json
import math
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerwise.experiments.records import Journal, RecordError, comparable, decode, encode, files, path_of, read
from layerwise.foundations.errors import InputError

DIGEST = "01234567"


def entry(seed: int, **values) -> dict:
    return {"cell": "trace/kfac", "seed": seed, "preset": "smoke", "digest": DIGEST, "values": values, "series": {}}


def seeds(path) -> list[int]:
    return [record["seed"] for record in read(path).records]


def write(path, *numbers: int) -> None:
    with Journal(path) as journal:
        journal.append([entry(seed, dist=seed / 3) for seed in numbers])


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(), scalars | st.lists(st.floats())))
def test_round_trip_is_exact(values):
    line = encode({"cell": "c", "seed": 1, "values": values})
    assert line.count(b"\n") == 1
    body = line.decode()
    json.loads(body, parse_constant=lambda word: pytest.fail(f"{word} is not standard JSON"))
    again = decode(line[:-1])
    assert again is not None
    assert repr(again["values"]) == repr(values)


def test_numbers_of_torch_and_numpy():
    line = encode({"a": torch.tensor(1.5), "b": np.float32(0.5), "c": np.arange(3), "d": torch.eye(2), "e": np.True_})
    assert decode(line[:-1]) == {"a": 1.5, "b": 0.5, "c": [0, 1, 2], "d": [[1.0, 0.0], [0.0, 1.0]], "e": True}


def test_what_is_no_number_is_refused():
    with pytest.raises(InputError, match="type set"):
        encode({"values": {1, 2}})


def test_a_bit_flipped_anywhere_is_noticed():
    line = encode(entry(3, dist=0.25, word="é", bad=math.nan))[:-1]
    for place in range(len(line)):
        for bit in range(8):
            changed = bytearray(line)
            changed[place] ^= 1 << bit
            assert decode(bytes(changed)) is None


def test_last_line_cut_at_every_byte(journal_path):
    write(journal_path, 0, 1, 2)
    whole = journal_path.read_bytes()
    last = len(whole) - whole[:-1].rindex(b"\n") - 1
    for cut in range(1, last + 1):
        journal_path.write_bytes(whole[:-cut])
        found = read(journal_path)
        assert [record["seed"] for record in found.records] == ([0, 1, 2] if cut == 1 else [0, 1])
        assert len(found.notes) == (0 if cut in (1, last) else 1)
        write(journal_path, 2, 3)
        assert seeds(journal_path) == ([0, 1, 2, 3])
        assert journal_path.read_bytes().startswith(whole[:-cut])  # nothing is ever taken away


def test_damage_in_the_middle_costs_one_line(journal_path):
    write(journal_path, *range(20))
    whole = journal_path.read_bytes()
    ends = [k for k, byte in enumerate(whole) if byte == ord("\n")]
    chance = random.Random(0)
    for _ in range(200):
        place = chance.randrange(len(whole))
        changed = bytearray(whole)
        changed[place] ^= 1 << chance.randrange(8)
        journal_path.write_bytes(changed)
        found = read(journal_path)
        hurt = sum(end < place for end in ends)
        joined = place in ends  # two lines become one
        lost = {hurt, hurt + 1} if joined else {hurt}
        assert {record["seed"] for record in found.records} == set(range(20)) - lost
        assert found.notes
        assert f"line {hurt + 1}:" in found.notes[0]


def test_the_first_of_two_equal_ones_counts(journal_path):
    with Journal(journal_path) as journal:
        journal.append([entry(0, dist=1.0), entry(0, dist=2.0)])
    assert [record["values"]["dist"] for record in read(journal_path).records] == [1.0]


def test_lines_of_another_configuration_are_left_out(journal_path):
    with Journal(journal_path) as journal:
        journal.append([entry(0), entry(1) | {"digest": "ffffffff"}])
    found = read(journal_path)
    assert seeds(journal_path) == [0]
    assert "line 2: of another configuration" in found.notes[0]


def test_a_missing_file_is_empty(tmp_path):
    assert read(tmp_path / "none.jsonl").records == ()


def test_full_disk_loses_nothing(journal_path, monkeypatch):
    write(journal_path, 0, 1)
    before = journal_path.read_bytes()

    def full(file, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, Journal(journal_path) as journal:
        patch.setattr(os, "write", full)
        with pytest.raises(RecordError, match=r"No space left.*Make room"):
            journal.append([entry(2)])
    assert journal_path.read_bytes() == before
    write(journal_path, 2)
    assert seeds(journal_path) == [0, 1, 2]


@pytest.mark.parametrize("taken", [0, 1, 40])
def test_disk_that_fills_within_a_line(journal_path, monkeypatch, taken):
    write(journal_path, 0, 1)
    real = os.write
    with Journal(journal_path) as journal:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda file, data: real(file, data[:taken]))
            with pytest.raises(RecordError, match="Make room"):
                journal.append([entry(2)])
        journal.append([entry(2)])  # room again, in the same session
    assert seeds(journal_path) == [0, 1, 2]
    assert len(read(journal_path).notes) == (1 if taken else 0)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_read_only_folder(journal_path, monkeypatch, code):
    def refuse(*arguments, **options):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(RecordError, match="--out"), Journal(journal_path):
        pass


def test_folder_that_is_a_file(tmp_path):
    (tmp_path / "runs").write_text("not a folder")
    with pytest.raises(RecordError, match="could not be made"), Journal(path_of(tmp_path / "runs", "a", "b", "c")):
        pass


def test_one_runner_at_a_time(journal_path):
    with (
        Journal(journal_path),
        pytest.raises(RecordError, match="another run is writing"),
        Journal(journal_path),
    ):
        pass
    write(journal_path, 0)  # the lock is given back


def test_lock_holds_between_processes_and_dies_with_them(journal_path):
    code = (
        "import sys, time; from layerwise.experiments.records import Journal\n"
        "with Journal(sys.argv[1]): print('ready', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(journal_path)], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        with pytest.raises(RecordError, match="another run"), Journal(journal_path):
            pass
    finally:
        other.kill()
        other.communicate()
    write(journal_path, 0)
    assert seeds(journal_path) == [0]


def test_comparable_leaves_out_times():
    assert comparable(entry(1) | {"seconds": 1.0, "time": "now"}) == entry(1)


def test_files_are_found(tmp_path):
    for name in ("b", "a"):
        write(path_of(tmp_path, name, "smoke", DIGEST), 0)
    (tmp_path / "a" / "notes.txt").write_text("")
    assert [path.parent.name for path in files(tmp_path)] == ["a", "b"]
    assert [path.name for path in files(tmp_path, "b")] == [f"smoke-{DIGEST}.jsonl"]
    assert files(tmp_path / "none") == []
