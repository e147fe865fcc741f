"""`docs/paper-coverage.md` lists every statement that claims refer to, and says what checks it."""

import re

import paper_coverage
import pytest
from paper_coverage import ROOT, about, claims, places, statements

STATEMENTS = statements()


def test_the_page_is_what_is_declared():
    page = paper_coverage.PAGE.read_text() if paper_coverage.PAGE.exists() else ""
    assert page == paper_coverage.render(), (
        "claims or statements have changed: run `python tests/experiments/paper_coverage.py` and commit the page"
    )


def test_every_source_of_a_claim_is_listed():
    listed = {statement.place for statement in STATEMENTS}
    named = {place for _, claim in claims() for place in places(claim.source)}
    assert not named - listed


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda statement: statement.place)
def test_a_statement_is_checked_or_says_why_not(statement):
    assert bool(about(statement) or statement.tests) != bool(statement.why_not)
    for test in statement.tests:
        path, _, name = test.partition("::")
        assert re.search(rf"^\s*def {name.partition('[')[0]}\(", (ROOT / path).read_text(), re.MULTILINE), test
