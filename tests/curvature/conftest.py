from collections.abc import Iterator

import coverage_table
import pytest
from jaxtyping import config


@pytest.fixture
def untyped() -> Iterator[None]:
    """Annotations unchecked: for the bulk of the matrix, whose code the exact estimator has run with checks."""
    before = config.jaxtyping_disable
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", before)


@pytest.fixture(scope="session")
def covered() -> Iterator[set[coverage_table.Cell]]:
    """What the matrix has compared and found equal; the page is written when that is all of it."""
    cells: set[coverage_table.Cell] = set()
    yield cells
    if cells == coverage_table.expected():
        page = coverage_table.render(cells)
        if not coverage_table.PAGE.exists() or coverage_table.PAGE.read_text() != page:
            coverage_table.PAGE.write_text(page)
