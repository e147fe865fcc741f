"""Progress within a cell reaches whoever watches the run, and nobody else."""

import pytest

from layerwise.cli.progress import Lines
from layerwise.experiments.progress import shown_within, within_cell
from layerwise.experiments.runner import run
from layerwise.foundations.progress import Pace, Silent


class Watcher:
    def __init__(self):
        self.seen = []
        self.inner = self

    def track(self, items, description, total):
        for item in items:
            self.seen.append((description, total))
            yield item


def test_cells_report_to_the_watcher(toy, tmp_path):
    watcher = Watcher()
    run(toy, preset="smoke", out=tmp_path, progress=watcher)
    assert watcher.seen.count(("toy-descent", 4)) == 4
    assert watcher.seen.count(("descent", 6)) == 4 * 6
    assert isinstance(within_cell(), Silent)


def test_a_progress_without_an_inner_one_is_enough():
    with shown_within(Silent()):
        assert isinstance(within_cell(), Silent)


def told(total, *arrivals):
    """What is said at each arrival of an item, given in seconds from the start."""
    pace = Pace(start=0)
    left = []
    for done, now in enumerate(arrivals, start=1):
        pace.add(done, now=now)
        left.append(pace.left(total, now=now))
    return left


def test_the_start_does_not_count():
    """Half a minute to begin with and a second each: not 59 half minutes."""
    left = told(60, *range(31, 45))
    assert left[0] is None
    assert left[-1] == 46
    assert {None, *range(46, 60)} >= set(left)


def test_bursts_are_not_taken_for_speed():
    """Ten seconds a cell, and the three seeds of a cell come at once: neither 10 s a seed nor none."""
    left = told(30, 30, 30.01, 30.02, 40, 40.01, 40.02, 50, 50.01, 50.02)
    assert left[:3] == [None, None, None]
    assert left[5] == pytest.approx(10 / 3 * 24, rel=0.02)
    assert left[8] == pytest.approx(10 / 3 * 21, rel=0.02)


def test_nothing_is_left_at_the_end():
    assert told(2, 1, 2)[-1] == 0
    assert told(None, 1, 2) == [None, None]


def test_lines_say_nothing_of_the_time_left_before_they_know(capsys):
    assert list(Lines().track(iter("ab"), "work", 2)) == ["a", "b"]
    first, last = capsys.readouterr().err.splitlines()
    assert first == "work: 1 of 2, a, 0 s so far"
    assert last == "work: 2 of 2, b, 0 s left"
