"""The entries of `make mutants` fit the code as it is; whether they are noticed takes minutes and is asked there."""

from pathlib import Path

import pytest
from mutation import ROOT, broken, load

from layerwise.experiments import catalog

MUTANTS = load(Path(__file__).parent)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_an_entry_fits(mutant):
    text = (ROOT / mutant.file).read_text()
    changed = broken(mutant, text)
    assert changed != text
    compile(changed, mutant.file, "exec")
    unknown = {*mutant.smoke, *mutant.laptop} - set(catalog.experiments())
    assert not unknown
    # Somebody must notice, or there is a reason why nobody does.
    assert bool(mutant.smoke or mutant.laptop) != bool(mutant.unnoticed)


def test_names_are_unique():
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names))
