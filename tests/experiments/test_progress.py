"""Progress within a cell reaches whoever watches the run, and nobody else."""

from layerwise.experiments.progress import shown_within, within_cell
from layerwise.experiments.runner import run
from layerwise.foundations.progress import Silent


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
