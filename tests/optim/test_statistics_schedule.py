"""When statistics are taken: every so many steps, and more often at first."""

import copy
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optim_tools import batches, cross_entropy, mlp

import layerwise as lw
from layerwise.optim.step.statistics_schedule import is_due

pytestmark = pytest.mark.usefixtures("untyped")


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 60), st.booleans())
def test_when_statistics_are_taken(every: int, growing: bool):
    """At the first step; then never further apart than asked for, and at first than an eighth of the steps so far."""
    due = [step for step in range(1, 700) if is_due(step, every, growing)]
    assert due[0] == 1
    for before, after in pairwise(due):
        assert after - before == (min(every, max(1, before // 8)) if growing else every)


@pytest.mark.parametrize(("scale", "growing"), [("adam", True), ("formula", False)])
def test_bare_formulas_take_statistics_as_they_are_told_to(scale: str, growing: bool):
    model, due = mlp(), []
    opt = lw.optim.KFAC(model, estimator="empirical", factor_every=5, scale=scale)
    for x, y in batches(50, 5):
        due.append(opt._capture.due)
        opt.zero_grad()
        cross_entropy(model(x), y).backward()
        opt.step()
    assert due == [is_due(step, 5, growing) for step in range(1, 51)]
    other = lw.optim.KFAC(copy.deepcopy(model), estimator="empirical", factor_every=5, scale=scale)
    other.load_state_dict(opt.state_dict())
    assert other._capture.due == is_due(51, 5, growing)
