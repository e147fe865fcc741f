"""Every example runs with its quick options, says what it does, and stays short."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
QUICK = {
    "character_model": ["--quick"],
    "fisher_structures": ["--steps", "0", "--examples", "50"],
    "head_refit": ["--quick"],
    "image_classifier": ["--quick"],
    "tangent_kernel": ["--steps", "0", "5"],
}
SAYS = {
    "character_model": "kfac",
    "fisher_structures": "ekfac",
    "head_refit": "trained",
    "image_classifier": "kfac",
    "tangent_kernel": "contrast",
}


def test_every_example_is_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(QUICK)


@pytest.mark.parametrize("name", sorted(QUICK))
def test_runs_quickly(name, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("LAYERWISE_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *QUICK[name]])
    with torch.random.fork_rng(devices=[]):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert SAYS[name] in said
    assert " nan" not in said


@pytest.mark.parametrize("name", ["character_model", "head_refit", "image_classifier"])
def test_is_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 150
