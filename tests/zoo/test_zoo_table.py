"""`docs/models.md` says what the code does."""

import pytest
from zoo_entries import ENTRIES
from zoo_table import PAGE, render, row
from zoo_updates import updates


def test_every_model_is_on_the_page_in_both_tables():
    names = [line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert names == ["model", *(entry.name for entry in ENTRIES)] * 2


@pytest.mark.slow
@pytest.mark.skipif(not all(e.is_installed for e in ENTRIES), reason="needs pip install 'layerwise[zoo]'")
def test_the_page_is_up_to_date():
    made = render([row(e) for e in ENTRIES], [updates(e) for e in ENTRIES])
    assert PAGE.read_text() == made, "run: python tests/zoo/zoo_table.py"
