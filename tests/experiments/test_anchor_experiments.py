"""rare-words, softmax-shift, downstream-theorem and anchors: smoke presets, claims that can fail."""

import dataclasses

import pytest
from experiment_records import records, smoke

from layerwise.data.folder import MissingDataError
from layerwise.experiments.claims import NOT_HELD, judge
from layerwise.experiments.wu2024 import anchors, downstream_theorem, rare_words, softmax_shift
from layerwise.studies.anchor_vectors import text

ALL = {module.EXPERIMENT.name: module.EXPERIMENT for module in (anchors, downstream_theorem, rare_words, softmax_shift)}


@pytest.mark.parametrize("name", ALL)
def test_smoke_is_as_expected(name: str):
    claims = ALL[name].claims(ALL[name].preset("smoke"))
    assert [claim.name for claim in claims if not judge(claim, smoke(name)).as_expected] == []
    figures = ALL[name].figures(ALL[name].preset("smoke"), smoke(name))
    assert all(curve.y for figure in figures for panel in figure.panels for curve in panel.curves)


WORSE = {
    # values that a broken theorem, or a model without an anchor, would give
    "rare-words": {"flipped": 0.5, "formula": 1e-3, "above s p": 1e-3, "task": 0.1, "divergence": 0.1},
    "softmax-shift": {
        "probabilities": 0.1,
        "student's task": 0.1,
        "teacher's task": 0.0,
        "anchored": 1.0,
        "labels": 0.0,
    },
    "downstream-theorem": {
        "conditions": 0.0,
        "bound": -1.0,
        "wrong": 0.0,
        "divergence/floor": 0.9,
        "distance/floor": 0.9,
        "sum/floor": 0.9,
    },
    "anchors": {
        "trained/mse": 1.0,
        "trained/mse with intercept": 1.0,
        "trained/r2": 0.1,
        "trained/r2 with intercept": 0.1,
        "trained/variance": 1e-6,
        "gaussian/variance": 1.0,
        "constant/deviation": 0.1,
        "constant/error": 0.1,
    },
}


@pytest.mark.parametrize("name", WORSE)
def test_every_claim_can_fail(name: str):
    def broken(values: dict) -> dict:
        return {key: WORSE[name].get(key.partition("@")[0], value) for key, value in values.items()}

    found = [record | {"values": broken(record["values"])} for record in smoke(name)]
    claims = ALL[name].claims(ALL[name].preset("smoke"))
    assert [claim.name for claim in claims if judge(claim, found).status != NOT_HELD] == []


def test_without_the_text_it_is_said_what_to_do(monkeypatch, tmp_path):
    config = ALL["anchors"].preset("laptop")
    monkeypatch.delenv("LAYERWISE_DATA", raising=False)
    with pytest.raises(MissingDataError, match="export LAYERWISE_DATA="):
        records(ALL["anchors"], config, [0])
    monkeypatch.setenv("LAYERWISE_DATA", str(tmp_path))
    with pytest.raises(MissingDataError, match="--text made-up"):
        records(ALL["anchors"], config, [0])


def test_words_of_a_text_are_numbered_by_their_frequency(monkeypatch, tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "wikitext2-valid.txt").write_text("a b a <unk> c a b d")
    (tmp_path / "text" / "wikitext2-test.txt").write_text("a z b\n<unk> d")
    monkeypatch.setenv("LAYERWISE_DATA", str(tmp_path))
    found = text.wikitext(3)
    assert found.words == 3
    assert found.train.tolist() == [1, 2, 1, 0, 0, 1, 2, 0]
    assert found.test.tolist() == [1, 0, 2, 0, 0]
    assert found.unknown == 0.6


def test_models_are_cells_of_their_own():
    """Claims on them are the thesis's numbers."""
    config = dataclasses.replace(ALL["anchors"].preset("smoke"), models=("gpt2", "gpt2-large"))
    cells = ALL["anchors"].cells_of(config)
    assert [cell.key for cell in cells] == ["small model", "gpt2", "gpt2-large"]
    named = {claim.name for claim in ALL["anchors"].claims(config)}
    assert {"gpt2/trained/mse@100", "gpt2/two", "gpt2-large/trained/mse@0", "gpt2-large/falls"} <= named
