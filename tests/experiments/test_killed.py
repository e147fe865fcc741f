"""A run killed at any moment goes on without repeating what was finished and loses nothing of it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import toy_descent
from killed_runs import RATES

import layerwise
from layerwise.experiments.records import comparable, decode, read
from layerwise.experiments.runner import run

HERE = Path(__file__).parent
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(layerwise.__file__).parents[1]), str(HERE)])}

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux: fork and /proc")


def by_key(path: Path) -> dict:
    return {(record["cell"], record["seed"]): comparable(record) for record in read(path).records}


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_many_kills(tmp_path, kills):
    done = subprocess.run(
        [sys.executable, str(HERE / "killed_runs.py"), str(tmp_path / "killed"), f"{kills}", "7"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60 + 6 * kills,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] == kills
    path = Path(found["path"])
    undisturbed = replace(toy_descent.Config(), rates=RATES, seeds=2, steps=400, pause=0.02)
    whole = run(toy_descent.EXPERIMENT, undisturbed, preset="smoke", out=tmp_path / "whole").recorded
    assert path.name == whole.path.name
    assert by_key(path) == by_key(whole.path)
    assert len(by_key(path)) == 60
    entries = [decode(line) for line in path.read_bytes().split(b"\n")]
    times = Counter((e["cell"], e["seed"]) for e in entries if e and e.get("kind") != "manifest")
    assert set(times.values()) == {1}, "something finished was run again"
    assert len(read(path).manifests) > kills / 4


def test_workers_die_with_a_killed_runner(tmp_path, layerwise_command):
    """Also the pool of processes goes on after a kill, and leaves no orphans."""
    words = ["run", "toy_descent:EXPERIMENT", "--preset", "smoke", "--seeds", "4", "--pause", "0.2"]
    words += ["--out", str(tmp_path), "--engine", "processes", "--workers", "2", "--json"]
    runner = layerwise_command(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    path, deadline = None, time.monotonic() + 60
    try:
        while time.monotonic() < deadline and not (path and read(path).records):
            time.sleep(0.02)
            path = next(tmp_path.glob("*/*.jsonl"), None)
        assert path is not None
        workers = children(runner.pid)
        assert len(workers) >= 2
    finally:
        os.kill(runner.pid, signal.SIGKILL)
        runner.communicate()
    before = by_key(path)
    assert 0 < len(before) < 8
    while time.monotonic() < deadline and any(map(alive, workers)):
        time.sleep(0.02)
    assert not any(map(alive, workers))
    config = replace(toy_descent.Config(), seeds=4, pause=0.2)
    outcome = run(toy_descent.EXPERIMENT, config, preset="smoke", out=tmp_path)
    assert (outcome.kept, outcome.new, outcome.missing) == (len(before), 8 - len(before), 0)
    assert before.items() <= by_key(path).items()


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"
