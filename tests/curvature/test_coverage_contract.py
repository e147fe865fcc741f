"""`docs/coverage.md` says what the matrix of this folder runs, no more and no less."""

import coverage_table


def test_the_committed_page_is_that_of_the_matrix():
    page = coverage_table.PAGE.read_text() if coverage_table.PAGE.exists() else ""
    assert page == coverage_table.render(coverage_table.expected()), (
        "cases or structures have changed: run `pytest tests/curvature`, which rewrites docs/coverage.md, and commit it"
    )
