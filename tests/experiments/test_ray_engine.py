"""The engine `ray` on a cluster of several machines, each a raylet of its own here, and what it does when one dies."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import followed_descent
import pytest
from followed_descent import EXPERIMENT, attempts

import layerwise
from layerwise.experiments.engines import EngineOptions
from layerwise.experiments.ray_cluster import _require_room
from layerwise.experiments.records import comparable, decode, read
from layerwise.experiments.runner import run
from layerwise.experiments.tasks import CellError
from layerwise.foundations.errors import InputError

ray = pytest.importorskip("ray", reason="needs ray: pip install 'layerwise[ray]'")
cluster_utils = pytest.importorskip("ray.cluster_utils", reason="needs ray: pip install 'layerwise[ray]'")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
]
CELLS, SEEDS = 2, 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without CPUs, so that all is run by other machines: two, of which one has a GPU by its own account."""
    paths = [str(Path(layerwise.__file__).parents[1]), str(Path(followed_descent.__file__).parent)]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(paths + [before] * bool(before))
    found = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    found.add_node(num_cpus=1)
    found.add_node(num_cpus=2, num_gpus=1)
    yield found
    ray.shutdown()
    found.shutdown()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def config_in(folder: Path, **options: Any) -> followed_descent.Config:
    folder.mkdir()
    return replace(EXPERIMENT.preset("smoke"), seeds=SEEDS, folder=str(folder), **options)


def on(cluster: Any, **options: Any) -> EngineOptions:
    return EngineOptions(name="ray", address=cluster.address, **options)


def meanwhile(folder: Path, number: int, act: Callable[[tuple[str, int, int]], None]) -> threading.Thread:
    """Do something to the `number`-th attempt once it has begun."""

    def wait() -> None:
        deadline = time.monotonic() + 120
        while len(attempts(folder)) <= number and time.monotonic() < deadline:
            time.sleep(0.02)
        act(attempts(folder)[number])

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def assert_complete(path: Path, expected: Path) -> None:
    """Every cell and seed once, whole lines only, the values of a run in this process."""
    entries = [decode(line) for line in path.read_bytes().split(b"\n") if line]
    assert None not in entries
    times = Counter((e["cell"], e["seed"]) for e in entries if e and e.get("kind") != "manifest")
    assert len(times) == CELLS * SEEDS
    assert set(times.values()) == {1}
    ours, theirs = ({(r["cell"], r["seed"]): comparable(r) for r in read(p).records} for p in (path, expected))
    for key, record in theirs.items():
        assert ours[key]["values"] == record["values"]
        assert ours[key]["series"] == record["series"]
    assert not list(path.parent.glob("*.tmp"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    return run(EXPERIMENT, config_in(folder / "work"), preset="smoke", out=folder / "out").recorded.path


def test_a_worker_that_is_killed_has_its_task_run_again(cluster: Any, undisturbed: Path, tmp_path: Path):
    config = config_in(tmp_path / "work", pause=0.5)
    killer = meanwhile(tmp_path / "work", 2, lambda attempt: os.kill(attempt[2], signal.SIGKILL))
    outcome = run(EXPERIMENT, config, preset="smoke", engine=on(cluster), out=tmp_path / "out")
    killer.join()
    assert (outcome.new, outcome.missing) == (CELLS * SEEDS, 0)
    assert_complete(outcome.recorded.path, undisturbed)
    begun = attempts(tmp_path / "work")
    assert len(begun) == CELLS * SEEDS + 1
    assert max(Counter(attempt[:2] for attempt in begun).values()) == 2


def test_a_machine_that_is_lost(cluster: Any, undisturbed: Path, tmp_path: Path):
    """With whatever runs there; the others do it."""
    lost = cluster.add_node(num_cpus=4)
    cluster.wait_for_nodes()
    config = config_in(tmp_path / "work", pause=1.0)
    killer = meanwhile(tmp_path / "work", 5, lambda _: cluster.remove_node(lost, allow_graceful=False))
    outcome = run(EXPERIMENT, config, preset="smoke", engine=on(cluster), out=tmp_path / "out")
    killer.join()
    assert (outcome.new, outcome.missing) == (CELLS * SEEDS, 0)
    assert_complete(outcome.recorded.path, undisturbed)
    assert len(attempts(tmp_path / "work")) > CELLS * SEEDS


def test_a_task_that_kills_every_worker_is_named_and_the_rest_is_kept(cluster: Any, undisturbed: Path, tmp_path: Path):
    """As one does that needs more memory than there is."""
    config = config_in(tmp_path / "work", pause=0.3)
    stop = threading.Event()

    def kill_seed_3() -> None:
        killed = set[int]()
        while not stop.is_set():
            for _, seed, process in attempts(tmp_path / "work"):
                if seed == 3 and process not in killed:
                    killed.add(process)
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.02)

    killer = threading.Thread(target=kill_seed_3)
    killer.start()
    try:
        with pytest.raises(CellError, match="worker of the Ray cluster that died"):
            run(EXPERIMENT, config, preset="smoke", engine=on(cluster), out=tmp_path / "out")
    finally:
        stop.set()
        killer.join()
    again = run(EXPERIMENT, config, preset="smoke", engine=on(cluster), out=tmp_path / "out")
    assert again.kept > 0
    assert again.missing == 0
    assert_complete(again.recorded.path, undisturbed)


def test_tasks_that_share_a_gpu(cluster: Any, undisturbed: Path, tmp_path: Path):
    """Two at a time on the machine that has one, where each sees it as the first; they wait for each other."""
    config = config_in(tmp_path / "work", wait_for=2)
    engine = on(cluster, per_device=2)
    outcome = run(EXPERIMENT, config, preset="smoke", engine=engine, out=tmp_path / "out")
    assert_complete(outcome.recorded.path, undisturbed)
    assert {file.read_text() for file in (tmp_path / "work").iterdir()} == {"0"}
    first, second = attempts(tmp_path / "work")[:2]
    assert first[2] != second[2]
    assert outcome.recorded.manifests[0]["engine"]["per_device"] == 2


def test_a_gpu_that_no_machine_has():
    machines = [{"CPU": 4.0}, {"CPU": 1.0, "GPU": 1.0}]
    _require_room(machines, {"CPU": 1.0, "GPU": 0.5}, grows=False)
    with pytest.raises(InputError, match=r"2 CPU and 0\.5 GPU"):
        _require_room(machines, {"CPU": 2.0, "GPU": 0.5}, grows=False)
    with pytest.warns(UserWarning, match="wait until one joins"):
        _require_room(machines, {"CPU": 8.0}, grows=True)


def test_the_device_of_other_machines_is_not_looked_for_here(cluster: Any, tmp_path: Path):
    """A head without a GPU starts runs that need one."""
    config = config_in(tmp_path / "work", device="no-such-device")
    with pytest.raises(InputError, match="cannot be used here"):
        run(EXPERIMENT, config, preset="smoke", out=tmp_path / "here")
    assert run(EXPERIMENT, config, preset="smoke", engine=on(cluster), out=tmp_path / "there").missing == 0
