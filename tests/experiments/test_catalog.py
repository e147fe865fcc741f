"""The catalog finds experiments by name and by reference."""

import pytest
import toy_descent

from layerwise.experiments import catalog
from layerwise.foundations.errors import InputError, NameLookupError


@pytest.fixture
def with_toy(monkeypatch, toy):
    monkeypatch.setattr(catalog, "experiments", lambda: {toy.name: toy})


@pytest.mark.usefixtures("with_toy")
def test_by_name(toy):
    assert catalog.find("toy-descent") is toy
    with pytest.raises(NameLookupError, match="Did you mean 'toy-descent'"):
        catalog.find("toy-decent")


def test_by_reference(toy):
    assert catalog.find("toy_descent:EXPERIMENT") is toy
    assert catalog.find("toy_descent:") is toy
    assert catalog.reference_to(toy) == "toy_descent:EXPERIMENT"
    assert catalog.reference_to(toy_descent.Experiment(**vars(toy))) is None


@pytest.mark.parametrize("reference", ["no_such_module:EXPERIMENT", "toy_descent:NOTHING", ":X"])
def test_references_to_nothing(reference):
    with pytest.raises(NameLookupError, match="could not be found"):
        catalog.find(reference)


def test_reference_to_something_else():
    with pytest.raises(InputError, match="which is a type"):
        catalog.find("toy_descent:Config")


def test_every_experiment_is_well_formed():
    """Whatever the catalog holds: names agree, and cells and claims of every preset can be made."""
    for name, experiment in catalog.experiments().items():
        assert experiment.name == name
        assert catalog.from_reference(str(catalog.reference_to(experiment))) is experiment
        for config in experiment.presets.values():
            assert experiment.cells_of(config)
            assert len({claim.name for claim in experiment.claims(config)}) == len(experiment.claims(config))
        assert experiment.claims(experiment.presets["paper"])
        assert list(catalog.experiments()) == sorted(catalog.experiments())


def test_folders_of_the_catalog():
    found = catalog.folders()["george2023"]
    assert {"autoencoder", "fisher-quality", "kfe-theorems"} <= set(found) <= set(catalog.experiments())
    assert "head-to-head" not in found
