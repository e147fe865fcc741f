"""An experiment in shares: together they are the whole, whatever order they run and are joined in."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import toy_descent

from layerwise.cli.main import main
from layerwise.experiments.records import comparable, decode, files, read
from layerwise.experiments.runner import run
from layerwise.experiments.shards import Shard, merge, merge_all
from layerwise.foundations.errors import InputError

EXPERIMENT = toy_descent.EXPERIMENT
CONFIG = toy_descent.Config(seeds=5, rates=(0.1, 0.3, 0.5))


def records(path: Path) -> list[dict]:
    return sorted((comparable(record) for record in read(path).records), key=lambda r: (r["cell"], r["seed"]))


def test_shares_are_together_the_whole(tmp_path: Path):
    whole = run(EXPERIMENT, CONFIG, preset="smoke", out=tmp_path / "whole").recorded
    for place in (2, 0, 3, 1):
        share = run(EXPERIMENT, CONFIG, preset="smoke", out=tmp_path / "shares", shard=Shard(place, 4))
        assert (share.missing, share.new) == (0, 4 if place < 3 else 3)
        assert files(tmp_path / "shares") == []
    main_file = tmp_path / "shares" / whole.path.parent.name / whole.path.name
    assert merge(main_file) == 15
    assert records(main_file) == records(whole.path)
    before = main_file.read_bytes()
    assert merge(main_file) == 0
    assert main_file.read_bytes() == before
    assert read(main_file).notes == ()
    assert not list(main_file.parent.glob("*.tmp"))


def test_a_share_that_was_stopped_goes_on_and_a_run_takes_what_shares_have(tmp_path: Path):
    assert run(EXPERIMENT, CONFIG, preset="smoke", out=tmp_path, shard=Shard(1, 2)).new == 7
    again = run(EXPERIMENT, CONFIG, preset="smoke", out=tmp_path, shard=Shard(1, 2))
    assert (again.new, again.kept) == (0, 7)
    rest = run(EXPERIMENT, CONFIG, preset="smoke", out=tmp_path)
    assert (rest.new, rest.kept, rest.missing) == (8, 7, 0)


def test_a_line_that_was_cut_short_is_left_out(tmp_path: Path):
    share = run(EXPERIMENT, CONFIG, preset="smoke", out=tmp_path, shard=Shard(0, 2))
    path = share.recorded.path
    path.write_bytes(path.read_bytes()[:-9])
    assert merge_all(tmp_path) == 7
    (joined,) = files(tmp_path)
    assert len(read(joined).records) == 7
    assert read(joined).notes == ()
    assert run(EXPERIMENT, CONFIG, preset="smoke", out=tmp_path, shard=Shard(0, 2)).new == 1
    assert merge_all(tmp_path) == 1


def test_jobs_at_one_time_and_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """As an array job has them: processes that know of each other only by the folder."""
    words = ["run", "toy_descent:EXPERIMENT", "--preset", "smoke", "--seeds", "4", "--out", str(tmp_path)]
    where = os.pathsep.join([str(Path(toy_descent.__file__).parent), os.environ.get("PYTHONPATH", "")])
    start = [sys.executable, "-c", "import sys; from layerwise.cli.main import main; sys.exit(main(sys.argv[1:]))"]
    jobs = [
        subprocess.Popen([*start, *words, "--shard", f"{i}/2"], env={**os.environ, "PYTHONPATH": where})
        for i in range(2)
    ]
    assert [job.wait(timeout=120) for job in jobs] == [0, 0]
    assert main(["check", "toy_descent:EXPERIMENT", "--out", str(tmp_path)]) == 0
    (joined,) = files(tmp_path)
    assert len(read(joined).records) == 8
    capsys.readouterr()


def test_a_share_that_is_killed_and_started_again(
    tmp_path: Path, layerwise_command, capsys: pytest.CaptureFixture[str]
):
    """As a cluster does it with a job that it took the machine from; joining before that takes what there is."""
    words = ["run", "toy_descent:EXPERIMENT", "--preset", "smoke", "--seeds", "4", "--pause", "0.3"]
    words += ["--out", str(tmp_path)]
    jobs = [
        layerwise_command(*words, "--shard", f"{i}/2", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for i in range(2)
    ]
    path, deadline = None, time.monotonic() + 120
    while time.monotonic() < deadline and not (path and read(path).records):
        time.sleep(0.02)
        path = next(tmp_path.glob("*/shards/0-of-2/*.jsonl"), None)
    jobs[0].kill()
    assert [job.wait(timeout=120) for job in jobs] == [-signal.SIGKILL, 0]
    assert path is not None
    before = read(path).finished()
    assert 0 < len(before) < 4
    assert merge_all(tmp_path) == 4 + len(before)
    config = toy_descent.Config(seeds=4, pause=0.3)
    share = run(EXPERIMENT, config, preset="smoke", out=tmp_path, shard=Shard(0, 2))
    assert (share.kept, share.new, share.missing) == (len(before), 4 - len(before), 0)
    assert main(["check", "toy_descent:EXPERIMENT", "--out", str(tmp_path)]) == 0
    (joined,) = files(tmp_path)
    entries = [decode(line) for line in joined.read_bytes().split(b"\n") if line]
    times = Counter((entry["cell"], entry["seed"]) for entry in entries if entry and "cell" in entry)
    assert (len(times), set(times.values())) == (8, {1})
    assert records(joined) == records(run(EXPERIMENT, config, preset="smoke", out=tmp_path / "whole").recorded.path)
    capsys.readouterr()


@pytest.mark.parametrize("given", ["8/8", "1", "a/b", "-1/2", "0/0"])
def test_a_share_that_there_is_not(given: str):
    with pytest.raises(InputError, match="i/n with i from 0 to n − 1"):
        Shard.read(given)
