"""Results: files of records, joined with what was declared."""

from dataclasses import replace

import pytest

from layerwise.experiments import catalog
from layerwise.experiments.records import path_of
from layerwise.experiments.results import load, results
from layerwise.experiments.runner import run
from layerwise.foundations.errors import InputError


def test_a_run_is_found_again(toy, tmp_path):
    outcome = run(toy, replace(toy.presets["smoke"], seeds=3, rates=(0.2, 0.4)), preset="smoke", out=tmp_path)
    result = load(outcome.recorded.path)
    assert result.experiment is toy
    assert result.config == replace(toy.presets["smoke"], seeds=3, rates=(0.2, 0.4))
    assert [(v.claim, v.status, v.as_expected) for v in result.verdicts] == [
        ("faster", "held", True),
        ("slower", "not held", True),
    ]
    assert result.state() == "2 of 2 as expected"
    assert len(result.records) == 6


def test_by_name_when_it_is_of_the_catalog(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(catalog, "experiments", lambda: {toy.name: toy})
    monkeypatch.setattr(catalog, "reference_to", lambda experiment: None)
    monkeypatch.setattr("layerwise.experiments.runner.reference_to", lambda experiment: None)
    run("toy-descent", preset="smoke", out=tmp_path)
    assert [result.experiment for result in results(tmp_path)[0]] == [toy]
    monkeypatch.setattr(catalog, "experiments", dict)
    found, troubles = results(tmp_path)
    assert found == []
    assert "names no experiment" in troubles[0]


def test_sorted_by_name_and_preset(toy, tmp_path):
    for preset in ("paper", "smoke", "laptop"):
        run(toy, replace(toy.presets["smoke"]), preset=preset, out=tmp_path)
    assert [result.preset for result in results(tmp_path)[0]] == ["smoke", "laptop", "paper"]
    assert results(tmp_path, "other") == ([], [])


def test_too_few_seeds(toy, tmp_path):
    outcome = run(toy, replace(toy.presets["smoke"], seeds=1), preset="smoke", out=tmp_path)
    assert load(outcome.recorded.path).state() == "0 of 2 as expected, 2 not enough runs"


def test_files_that_cannot_be_judged_are_named_and_cost_no_others(toy, tmp_path):
    run(toy, preset="smoke", out=tmp_path)
    bad = path_of(tmp_path, "strange", "smoke", "00000000")
    bad.parent.mkdir()
    bad.write_text("not a record\n")
    empty = path_of(tmp_path, "empty", "smoke", "00000000")
    empty.parent.mkdir()
    empty.write_text("")
    found, troubles = results(tmp_path)
    assert len(found) == 1
    assert len(troubles) == 1
    assert "strange" in troubles[0]
    with pytest.raises(InputError, match="no manifest"):
        load(bad)
