from collections.abc import Iterator

import coverage_table
import jaxtyping
import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """For models this small, a second thread costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def untyped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Annotations unchecked: for the bulk of the matrix, whose code other tests have run with checks.

    Functions defined inside functions are wrapped anew at every call, which is most of the time of a small model.
    """
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    monkeypatch.setattr(jaxtyping, "jaxtyped", lambda **options: lambda function: function)


@pytest.fixture(scope="session")
def covered() -> Iterator[set[coverage_table.Cell]]:
    """What the matrix has compared and found equal; the page is written when that is all of it."""
    cells: set[coverage_table.Cell] = set()
    yield cells
    if cells == coverage_table.expected():
        page = coverage_table.render(cells)
        if not coverage_table.PAGE.exists() or coverage_table.PAGE.read_text() != page:
            coverage_table.PAGE.write_text(page)
