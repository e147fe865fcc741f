"""Tasks that share GPUs in the engine `processes`: who sees which, as far as it can be seen without one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from followed_descent import EXPERIMENT, attempts

from layerwise.experiments import engines, processes
from layerwise.experiments.engines import EngineOptions
from layerwise.experiments.runner import run
from layerwise.foundations.errors import InputError


def test_every_worker_sees_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Three GPUs, one task each; the tasks wait until all three have begun."""
    monkeypatch.setattr(engines, "visible_gpus", lambda: ["4", "5", "GPU-7c"])
    config = replace(EXPERIMENT.preset("smoke"), seeds=3, rates=(0.1,), folder=str(tmp_path), wait_for=3)
    outcome = run(
        EXPERIMENT, config, preset="smoke", engine=EngineOptions(name="processes", per_device=1), out=tmp_path / "out"
    )
    assert outcome.missing == 0
    assert sorted(file.read_text() for file in tmp_path.glob("*-*-*")) == ["4", "5", "GPU-7c"]
    assert len({process for _, _, process in attempts(tmp_path)}) == 3
    assert outcome.recorded.manifests[0]["engine"]["per_device"] == 1


@pytest.mark.parametrize(
    ("workers", "devices", "expected"), [(None, 2, 6), (4, 2, 4), (9, 2, 6), (2, 0, 2)], ids=lambda value: f"{value}"
)
def test_how_many_workers(workers: int | None, devices: int, expected: int):
    options = EngineOptions(name="processes", workers=workers, per_device=3)
    assert options.crew(devices)[0] == expected


@pytest.mark.parametrize(
    ("named", "count", "expected"), [(None, 2, ["0", "1"]), ("3, 5", 2, ["3", "5"]), ("GPU-1,GPU-2", 1, ["GPU-1"])]
)
def test_gpus_by_the_names_that_the_environment_has(
    named: str | None, count: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert processes.visible_gpus() == expected


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InputError, match="per_device=0"):
        EngineOptions(name="processes", per_device=0)
    with pytest.raises(InputError, match="several tasks"):
        EngineOptions(per_device=2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config = replace(EXPERIMENT.preset("smoke"), folder=str(tmp_path))
    with pytest.raises(InputError, match="no GPU that torch can use"):
        run(EXPERIMENT, config, preset="smoke", engine=EngineOptions(name="processes", per_device=2), out=tmp_path)
    assert list(tmp_path.iterdir()) == []
