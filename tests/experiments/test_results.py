"""Results: files of records, joined with what was declared."""

import math
import sys
from dataclasses import replace

import pytest

from layerwise.experiments import catalog
from layerwise.experiments.experiment import Cell
from layerwise.experiments.records import decode, encode, path_of
from layerwise.experiments.results import load, repeats, results
from layerwise.experiments.runner import run
from layerwise.foundations.errors import InputError


def test_a_run_is_found_again(toy, tmp_path):
    outcome = run(toy, replace(toy.presets["smoke"], seeds=3, rates=(0.2, 0.4)), preset="smoke", out=tmp_path)
    result = load(outcome.recorded.path, [toy])
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
    assert [result.experiment for result in results(tmp_path).results] == [toy]
    monkeypatch.setattr(catalog, "experiments", dict)
    found = results(tmp_path)
    assert found.results == ()
    (trouble,) = found.troubles.values()
    assert "Unknown experiment" in trouble


def test_sorted_by_name_and_preset(toy, tmp_path):
    for preset in ("paper", "smoke", "laptop"):
        run(toy, replace(toy.presets["smoke"]), preset=preset, out=tmp_path)
    assert [result.preset for result in results(tmp_path, [toy]).results] == ["smoke", "laptop", "paper"]
    others = results(tmp_path, [replace(toy, name="other")], only=True)
    assert (others.results, others.troubles, others.strangers) == ((), {}, {})


def test_too_few_seeds(toy, tmp_path):
    outcome = run(toy, replace(toy.presets["smoke"], seeds=1), preset="smoke", out=tmp_path)
    assert load(outcome.recorded.path, [toy]).state() == "0 of 2 as expected, 2 not enough runs"


def test_files_that_cannot_be_judged_are_named_and_cost_no_others(toy, tmp_path):
    run(toy, preset="smoke", out=tmp_path)
    bad = path_of(tmp_path, "strange", "smoke", "00000000")
    bad.parent.mkdir()
    bad.write_text("not a record\n")
    empty = path_of(tmp_path, "empty", "smoke", "00000000")
    empty.parent.mkdir()
    empty.write_text("")
    found = results(tmp_path, [toy])
    assert len(found.results) == 1
    (trouble,) = found.troubles.values()
    assert "strange" in trouble
    with pytest.raises(InputError, match="no manifest"):
        load(bad)


def test_what_a_file_names_is_not_imported(toy, tmp_path, monkeypatch):
    """A file of records may come from anywhere: the module that it names is a word, not something to run."""
    (tmp_path / "planted_module.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = run(toy, preset="smoke", out=tmp_path / "runs").recorded.path
    entries = [decode(line) for line in path.read_bytes().splitlines()]
    for name in ("planted", "head-to-head"):  # one that nobody knows, and one with the name of an experiment of ours
        copy = tmp_path / "runs" / name / path.name
        copy.parent.mkdir()
        manifest = entries[0] | {"experiment": name, "source": "planted_module:EXPERIMENT"}
        copy.write_bytes(b"".join(map(encode, [manifest, *entries[1:]])))
    found = results(tmp_path / "runs")
    assert "planted_module" not in sys.modules
    assert found.results == ()
    assert [path.parent.name for path in found.strangers] == ["head-to-head", "planted", "toy-descent"]
    assert all("is not part of layerwise; judge it with `layerwise check " in text for text in found.strangers.values())
    odd = entries[0] | {"source": "\x1b[31m; rm -rf:x"}
    path.write_bytes(encode(odd))
    (trouble,) = results(tmp_path / "runs").troubles.values()
    assert "\x1b" not in trouble


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": {"seeds": 2, "rates": [0.1, 0.5], "steps": "many", "pause": 0.0, "fail_at": None}}, "steps='many'"),
        ({"config": [1, 2]}, "config=[1, 2]"),
        ({"config": {"seeds": 2}}, "other fields"),
        ({"preset": None}, "preset=None"),
        ({"preset": "papr"}, "Did you mean 'paper'"),
        ({"experiment": 3}, "experiment=3"),
    ],
)
def test_manifests_that_say_something_else(toy, tmp_path, changes, words):
    good = run(toy, preset="smoke", out=tmp_path).recorded.path
    entries = [decode(line) for line in good.read_bytes().splitlines()]
    bad = good.with_name("laptop-" + good.name.split("-")[1])
    bad.write_bytes(b"".join(map(encode, [entries[0] | changes, *entries[1:]])))
    found = results(tmp_path, [toy])
    assert [result.recorded.path for result in found.results] == [good]  # the others are still judged
    (trouble,) = found.troubles.values()
    assert words in trouble
    assert f"{bad}, line 1" in trouble


def test_records_that_are_none_are_named_with_their_line(toy, tmp_path):
    path = run(toy, preset="smoke", out=tmp_path).recorded.path
    entries = [decode(line) for line in path.read_bytes().splitlines()]
    del entries[2]["cell"]
    entries[3]["seed"] = "one"
    entries[4]["values"] = [1.0]
    path.write_bytes(b"".join(map(encode, entries)))
    (result,) = results(tmp_path, [toy]).results
    assert len(result.records) == 1
    for line, words in ((3, "no `cell`"), (4, "no `seed`"), (5, "`values` are no mapping")):
        assert any(f"{path}, line {line}: no record" in note and words in note for note in result.recorded.notes)


def test_a_claim_that_fails_costs_no_others(toy, tmp_path):
    broken = replace(toy.claims(toy.presets["smoke"])[0], name="broken", quantity=lambda records: 1 / 0)
    with_one = replace(toy, claims=lambda config: [broken, *toy.claims(config)])
    run(with_one, preset="smoke", out=tmp_path)
    (result,) = results(tmp_path, [with_one]).results
    assert result.state() == "2 of 3 as expected, 1 not judged"
    assert [claim.name for claim in result.claims] == ["faster", "slower"]
    assert "ZeroDivisionError" in result.troubles[0]


# --- Seeds that agree ---------------------------------------------------------------------------------------


def rows(*values, series=None):
    return [
        {"cell": "trace", "seed": seed, "values": {"dist": value}, "series": {} if series is None else series[seed]}
        for seed, value in enumerate(values)
    ]


def said(toy, records, **cell):
    made = replace(toy, cells=lambda config: [Cell(key="trace", **cell)])
    return list(repeats(made, toy.presets["smoke"], records))


def test_seeds_that_agree_bit_by_bit(toy):
    sentence = "trace: seeds 0 and 1 gave bitwise equal results: is the seed used?"
    assert said(toy, rows(0.1, 0.1)) == [sentence]
    assert said(toy, rows(0.1, 0.1), random=False) == []
    assert said(toy, rows(0.1, 0.10000000000000002)) == []
    assert said(toy, rows(0.0, -0.0)) == []
    assert said(toy, rows(0.1, 0.2, 0.1, 0.1)) == [
        "trace: seeds 0, 2 and 3 gave bitwise equal results: is the seed used?"
    ]
    assert said(toy, rows(0.1, 0.1, series=[{"loss": [1.0, math.nan]}, {"loss": [1.0, math.nan]}])) == [sentence]
    assert said(toy, rows(0.1, 0.1, series=[{"loss": [1.0, 2.0]}, {"loss": [1.0, 3.0]}])) == []
    assert said(toy, rows(math.nan, math.nan)) == []  # all diverged: nothing is left that could differ
    assert said(toy, [{"cell": "trace", "seed": seed, "values": {}, "series": {}} for seed in (0, 1)]) == []
    gone = {"best": math.inf, "diverged": 12.0, "options": "lr"}
    assert said(toy, [{"cell": "trace", "seed": seed, "values": gone, "series": {}} for seed in (0, 1)]) == []


def test_no_seed_of_the_toy_agrees(toy, tmp_path):
    run(toy, preset="smoke", out=tmp_path)
    (result,) = results(tmp_path, [toy]).results
    assert result.repeats == ()
