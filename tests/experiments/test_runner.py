"""The runner: what is missing is run, nothing twice; the same seed gives the same record."""

import math
import os
import signal
from dataclasses import dataclass, replace

import pytest
import toy_descent

from layerwise.experiments.engines import EngineOptions
from layerwise.experiments.experiment import Row
from layerwise.experiments.records import Journal, RecordError, comparable, decode, read
from layerwise.experiments.runner import run
from layerwise.experiments.tasks import CellError
from layerwise.foundations.errors import InputError, NameLookupError

SMOKE = toy_descent.EXPERIMENT.presets["smoke"]


def rows(outcome) -> dict:
    return {(r["cell"], r["seed"]): comparable(r) for r in outcome.recorded.records}


def counting(experiment):
    """The same experiment, which notes what it is asked to run."""
    asked = []

    def run_and_note(config, cell, seeds):
        asked.append((cell.key, list(seeds)))
        return experiment.run(config, cell, seeds)

    return replace(experiment, run=run_and_note), asked


def test_batched_hands_over_all_seeds_of_a_cell(toy, tmp_path):
    noted, asked = counting(toy)
    outcome = run(noted, preset="smoke", out=tmp_path)
    assert asked == [("rate/0.1", [0, 1]), ("rate/0.5", [0, 1])]
    assert (outcome.new, outcome.kept, outcome.missing, outcome.interrupted) == (4, 0, 0, False)


def test_second_run_does_nothing(toy, tmp_path):
    first = run(toy, preset="smoke", out=tmp_path)
    before = first.recorded.path.read_bytes()
    noted, asked = counting(toy)
    second = run(noted, preset="smoke", out=tmp_path)
    assert asked == []
    assert (second.new, second.kept) == (0, 4)
    assert second.recorded.path.read_bytes() == before


def test_more_seeds_extend_the_same_file(toy, tmp_path):
    first = run(toy, preset="smoke", out=tmp_path)
    noted, asked = counting(toy)
    second = run(noted, replace(SMOKE, seeds=5), preset="smoke", out=tmp_path)
    assert asked == [("rate/0.1", [2, 3, 4]), ("rate/0.5", [2, 3, 4])]
    assert second.recorded.path == first.recorded.path
    assert [m["seeds"] for m in second.recorded.manifests] == [[0, 1], [0, 1, 2, 3, 4]]
    assert rows(first).items() <= rows(second).items()


def test_another_configuration_has_a_file_of_its_own(toy, tmp_path):
    one = run(toy, preset="smoke", out=tmp_path).recorded.path
    assert run(toy, replace(SMOKE, steps=6), preset="smoke", out=tmp_path).recorded.path != one


def test_same_seed_same_record(toy, tmp_path):
    config = replace(SMOKE, seeds=4)
    together = run(toy, config, preset="smoke", out=tmp_path / "a")
    again = run(toy, config, preset="smoke", out=tmp_path / "b")
    run(toy, replace(config, seeds=1), preset="smoke", out=tmp_path / "c")
    in_parts = run(toy, config, preset="smoke", out=tmp_path / "c")
    assert rows(together) == rows(again) == rows(in_parts)
    assert list(rows(together)) == list(rows(again))


def test_processes_give_the_same_records(toy, tmp_path):
    batched = run(toy, preset="smoke", out=tmp_path / "a")
    pooled = run(toy, preset="smoke", engine=EngineOptions(name="processes", workers=2), out=tmp_path / "b")
    assert rows(batched) == rows(pooled)
    assert pooled.recorded.manifests[0]["engine"]["name"] == "processes"
    again = run(toy, preset="smoke", engine="processes", out=tmp_path / "b")
    assert (again.new, again.kept) == (0, 4)


def test_first_line_is_the_manifest(toy, tmp_path):
    path = run(toy, preset="smoke", out=tmp_path).recorded.path
    first = decode(path.read_bytes().split(b"\n")[0])
    assert first is not None
    assert first["kind"] == "manifest"
    assert first["config"] == {"seeds": 2, "rates": [0.1, 0.5], "steps": 5, "pause": 0.0, "fail_at": None}
    assert first["source"] == "toy_descent:EXPERIMENT"
    assert {"code", "libraries", "hardware", "engine", "seeds", "time", "preset", "digest"} <= first.keys()
    assert first["libraries"]["torch"]
    assert first["hardware"]["cpu"]


def test_a_damaged_line_is_reported_and_run_again(toy, tmp_path):
    first = run(toy, preset="smoke", out=tmp_path)
    lines = first.recorded.path.read_bytes().split(b"\n")
    lines[2] = lines[2].replace(b"0", b"1", 1)
    first.recorded.path.write_bytes(b"\n".join(lines))
    noted, asked = counting(toy)
    second = run(noted, preset="smoke", out=tmp_path)
    assert asked == [("rate/0.1", [1])]
    assert any("line 3: damaged" in note for note in second.notes)
    assert rows(second) == rows(first)


def test_a_failing_cell_keeps_what_was_finished(toy, tmp_path):
    with pytest.raises(CellError, match=r"cell 'rate/0.1', seeds \[1\].*this seed fails"):
        run(toy, replace(SMOKE, fail_at=1), preset="smoke", out=tmp_path)
    kept = read(next(tmp_path.glob("*/*.jsonl")))
    assert kept.finished() == {("rate/0.1", 0)}


def test_a_failing_cell_of_a_worker(toy, tmp_path):
    with pytest.raises(CellError, match="this seed fails"):
        run(
            toy,
            replace(SMOKE, fail_at=1),
            preset="smoke",
            engine=EngineOptions(name="processes", workers=1),
            out=tmp_path,
        )


@dataclass(frozen=True)
class Deadly:
    seeds: int = 1


def die(config, cell, seeds):
    os.kill(os.getpid(), signal.SIGKILL)


MORTAL = replace(
    toy_descent.EXPERIMENT,
    name="mortal",
    presets=dict.fromkeys(("smoke", "laptop", "paper"), Deadly()),
    cells=lambda config: toy_descent.cells(SMOKE),
    claims=lambda config: [],
    run=die,
)


def test_a_worker_that_dies_is_named(tmp_path):
    with pytest.raises(CellError, match="worker process that died"):
        run(MORTAL, preset="smoke", engine=EngineOptions(name="processes", workers=1), out=tmp_path)


def test_ctrl_c_ends_cleanly(toy, tmp_path):
    def interrupted(config, cell, seeds):
        for row in toy.run(config, cell, seeds):
            if row.seed == 1:
                raise KeyboardInterrupt
            yield row

    outcome = run(replace(toy, run=interrupted), preset="smoke", out=tmp_path)
    assert (outcome.interrupted, outcome.new, outcome.missing) == (True, 1, 3)
    rest = run(toy, preset="smoke", out=tmp_path)
    assert (rest.interrupted, rest.new, rest.kept) == (False, 3, 1)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ([Row(seed=7, values={})], "seed 7"),
        ([Row(seed=0, values={}), Row(seed=0, values={})], "seed 0"),
        ([Row(seed=0, values={})], r"no row of the seeds \[1\]"),
    ],
)
def test_rows_must_be_those_asked_for(toy, tmp_path, made, words):
    with pytest.raises(CellError, match=words):
        run(replace(toy, run=lambda config, cell, seeds: made), preset="smoke", out=tmp_path)


def test_a_failure_before_the_first_record_leaves_nothing(toy, tmp_path):
    with pytest.raises(CellError, match="this seed fails"):
        run(toy, replace(SMOKE, fail_at=0), preset="smoke", out=tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []
    run(toy, preset="smoke", out=tmp_path / "runs")
    with pytest.raises(CellError, match="this seed fails"):
        run(toy, replace(SMOKE, fail_at=0, steps=9), preset="smoke", out=tmp_path / "runs")
    assert len(list((tmp_path / "runs").glob("*/*.jsonl"))) == 1  # the other file, in the same folder, stays


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 0}, "Got steps=0. Expected an integer ≥ 1. Pass e.g. --steps 5"),
        ({"rates": (0.1, math.nan)}, "Got rates=nan. Expected a finite number > 0. Pass e.g. --rates 0.1 0.5"),
        ({"rates": (-0.1,)}, "Got rates=-0.1. Expected a finite number > 0"),
        ({"rates": ()}, "Got rates with nothing in it"),
        ({"steps": "many"}, "Got steps='many'. Expected steps: int"),
        ({"pause": -1.0}, "Got pause=-1.0. Expected a finite number ≥ 0"),
        ({"pause": math.inf}, "Got pause=inf"),
        ({"seeds": 0}, "Got seeds=0. Expected an integer ≥ 1. Pass e.g. --seeds 2"),
    ],
)
def test_bad_values_are_refused_before_anything_is_written(toy, tmp_path, changes, words):
    with pytest.raises(InputError) as caught:
        run(toy, replace(SMOKE, **changes), preset="smoke", out=tmp_path)
    assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_experiment_says_which_values_go_together(toy, tmp_path):
    def together(config):
        if config.steps > 100 * config.seeds:
            raise InputError("Got many steps. Expected fewer. Lower --steps.")

    picky = replace(toy, ranges={"pause": (-1, 1), "steps": (0, 1000)}, check=together)
    with pytest.raises(InputError, match="Lower --steps"):
        run(picky, replace(SMOKE, steps=500), preset="smoke", out=tmp_path)
    with pytest.raises(InputError, match=r"steps=1001\. Expected an integer from 0 to 1000"):
        run(picky, replace(SMOKE, steps=1001), preset="smoke", out=tmp_path)
    with pytest.raises(InputError, match="ranges of stesp"):
        replace(toy, ranges={"stesp": (0, 1)})
    broken = replace(toy, claims=lambda config: 1 / 0)
    with pytest.raises(InputError, match="ZeroDivisionError"):
        run(broken, preset="smoke", out=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert run(picky, replace(SMOKE, steps=0), preset="smoke", out=tmp_path).missing == 0


def test_a_file_given_up_while_another_run_opens_it(tmp_path, monkeypatch):
    """Between opening and locking it may be taken away: then it is made anew, and nothing goes to a file of no name."""
    path = tmp_path / "toy" / "smoke-01234567.jsonl"
    first, real = Journal(path).__enter__(), Journal._lock

    def lock_late(journal, file):
        if path.exists() and first._file is not None:
            first.discard()
            first.__exit__(None, None, None)
            path.parent.mkdir(exist_ok=True)
        real(journal, file)

    monkeypatch.setattr(Journal, "_lock", lock_late)
    with Journal(path) as journal:
        journal.append([{"cell": "a", "seed": 0, "digest": "01234567"}])
    assert len(read(path).records) == 1


class NodeDiedError(Exception):
    """As Ray raises it."""


class RayTaskError(Exception):
    """As Ray raises it: around what happened in the task."""

    def __init__(self, cause):
        super().__init__(str(cause))
        self.cause = cause


@pytest.mark.parametrize(
    ("error", "words", "others"),
    [
        (NodeDiedError("the node 10.0.0.7 is gone"), "machine or worker of the Ray cluster that died", "Install"),
        (RayTaskError(ModuleNotFoundError("No module named 'mine'")), "Install both there", "died"),
        (RayTaskError(ValueError("bad shapes")), "ValueError: bad shapes", "Install"),
        (RayTaskError(CellError("said by the cell")), "said by the cell", "Ray"),
    ],
)
def test_what_went_wrong_on_a_ray_cluster(error, words, others):
    from layerwise.experiments.ray_cluster import _failure

    said = str(_failure(error, "mine:EXPERIMENT"))
    assert words in said
    assert others not in said


def test_full_disk_in_the_middle(toy, tmp_path, monkeypatch):
    real, count = os.write, [0]

    def filling(file, data):
        count[0] += data.startswith(b'{"cell"')
        return real(file, data if count[0] < 3 else data[:11])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", filling)
        with pytest.raises(RecordError, match="Make room"):
            run(toy, preset="smoke", out=tmp_path)
    rest = run(toy, preset="smoke", out=tmp_path)
    assert (rest.kept, rest.new) == (2, 2)
    assert "cut short" in rest.notes[0]


def test_records_of_another_version_are_kept_and_named(toy, tmp_path, monkeypatch):
    from layerwise.experiments import manifest as manifests

    other = {"version": "0.0.1", "commit": "c" * 40, "changed": False}
    with monkeypatch.context() as patch:
        patch.setattr(manifests, "code_version", lambda: other)
        run(toy, preset="smoke", out=tmp_path)
    again = run(toy, preset="smoke", out=tmp_path)
    assert again.kept == 4
    assert any("0.0.1 at cccccccccc" in note for note in again.notes)


def test_bad_input(toy, tmp_path):
    with pytest.raises(NameLookupError, match="Did you mean 'smoke'"):
        run(toy, preset="smoek", out=tmp_path)
    with pytest.raises(NameLookupError, match="Did you mean 'batched'"):
        run(toy, preset="smoke", engine="bached", out=tmp_path)
    with pytest.raises(InputError, match="seeds=0"):
        run(toy, replace(SMOKE, seeds=0), preset="smoke", out=tmp_path)
    with pytest.raises(InputError, match="engine ray"):
        EngineOptions(name="batched", address="auto")
    with pytest.raises(InputError, match="workers=0"):
        EngineOptions(name="processes", workers=0)
    assert list(tmp_path.iterdir()) == []


def test_processes_need_an_experiment_that_has_a_name(toy, tmp_path):
    with pytest.raises(InputError, match="no module has by a name"):
        run(replace(toy, name="nameless"), preset="smoke", engine="processes", out=tmp_path)


def test_missing_ray(toy, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'layerwise\[ray\]'"):
        run(toy, preset="smoke", engine="ray", out=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ray_gives_the_same_records(toy, tmp_path):
    pytest.importorskip("ray", reason="needs ray: pip install 'layerwise[ray]'")
    batched = run(toy, preset="smoke", out=tmp_path / "a")
    spread = run(toy, preset="smoke", engine="ray", out=tmp_path / "b")
    assert rows(batched) == rows(spread)
    with pytest.raises(CellError, match="this seed fails"):
        run(toy, replace(SMOKE, fail_at=1), preset="smoke", engine="ray", out=tmp_path / "c")


def test_ray_cluster_that_is_not_there(toy, tmp_path):
    pytest.importorskip("ray", reason="needs ray: pip install 'layerwise[ray]'")
    with pytest.raises(InputError, match="no Ray cluster answers"):
        run(toy, preset="smoke", engine=EngineOptions(name="ray", address="auto"), out=tmp_path)


@pytest.mark.parametrize("engine", ["batched", "processes"])
def test_whole_cells_and_what_they_keep_until_all_are_recorded(toy, tmp_path, engine):
    """Seeds of a cell come together to one process; its folder is beside the records while cells are missing."""
    experiment = toy_descent.SHARING
    one_rate = replace(SMOKE, rates=(0.1,))  # of two, either may come first where processes share the work
    config = replace(one_rate, fail_at=1)
    with pytest.raises(CellError):
        run(experiment, config, preset="smoke", out=tmp_path, engine=engine)
    (notes,) = tmp_path.glob("*/*.unfinished/rate_0.1/notes")
    assert notes.read_text() == "[0, 1]\n"
    (path,) = tmp_path.glob("*/*.jsonl")
    assert ("rate/0.1", 0) in {(r["cell"], r["seed"]) for r in read(path).records}  # finished before the error
    run(experiment, replace(config, seeds=1), preset="smoke", out=tmp_path)
    assert notes.exists()  # seed 1 is still unfinished
    done = run(experiment, replace(one_rate, fail_at=None), preset="smoke", out=tmp_path)
    assert done.missing == 0
    assert not list(tmp_path.glob(f"*/{done.recorded.path.stem}.unfinished"))
