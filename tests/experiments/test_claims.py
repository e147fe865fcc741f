"""Claims: held, not held, not enough runs; never silently."""

import math
import re

import pytest

from error_sentences import WORDED
from layerwise.experiments.claims import Claim, by_seed, judge
from layerwise.foundations.errors import InputError


def records(*values: float) -> list[dict]:
    return [{"cell": "a", "seed": seed, "values": {"x": value}} for seed, value in enumerate(values)]


def claim(**changes) -> Claim:
    given = {
        "name": "small",
        "statement": "x is small.",
        "quantity": lambda rows: by_seed(rows, "a", "x"),
        "relation": "<=",
        "target": 1.0,
    }
    return Claim(**(given | changes))


@pytest.mark.parametrize(
    ("relation", "target", "value", "status"),
    [
        ("<=", 1.0, 1.0, "held"),
        ("<", 1.0, 1.0, "not held"),
        (">=", 1, 1.0, "held"),
        (">", 1.0, 1.0, "not held"),
        ("within", (0, 1.0), 1.0, "held"),
        ("within", (0, 1.0), -0.1, "not held"),
        ("<=", 1.0, math.nan, "not held"),
        (">=", 1.0, math.nan, "not held"),
        ("<=", 1.0, math.inf, "not held"),
        (">=", 1.0, math.inf, "held"),
        ("within", (0.0, 1.0), math.nan, "not held"),
    ],
)
def test_relations(relation, target, value, status):
    verdict = judge(claim(relation=relation, target=target), records(value))
    assert verdict.status == status
    assert verdict.as_expected == (status == "held")
    assert math.isfinite(value) or f"seed 0 gave {value}" in verdict.detail


def test_every_seed_counts():
    verdict = judge(claim(seeds=3), records(0.5, 2.0, 0.7))
    assert (verdict.status, verdict.n, verdict.low, verdict.high) == ("not held", 3, 0.5, 2.0)
    assert verdict.mean == pytest.approx(3.2 / 3)
    assert "not seed 1" in verdict.detail
    assert verdict.values == {0: 0.5, 1: 2.0, 2: 0.7}


@pytest.mark.parametrize("values", [(), (0.1,), (0.1, 0.2), (5.0, 5.0)])
def test_too_few_seeds_decide_nothing(values):
    verdict = judge(claim(seeds=3), records(*values))
    assert (verdict.status, verdict.as_expected, verdict.n) == ("not enough runs", None, len(values))
    assert f"{len(values)} of 3 seeds" in verdict.detail


def test_share_of_seeds():
    rows = records(0.1, 0.1, 0.1, 0.1, 9.0)
    assert judge(claim(test="share", share=0.8), rows).status == "held"
    assert judge(claim(test="share", share=0.97), rows).status == "not held"


@pytest.mark.parametrize(
    ("share", "held", "n", "status"),
    [
        (0.75, 1, 2, "held"),  # as probable as not, were the share three quarters
        (0.75, 0, 2, "not held"),
        (0.5, 0, 2, "not held"),
        (0.7, 3, 5, "held"),
        (0.7, 2, 5, "not held"),
        (0.7, 65, 100, "not held"),
        (0.7, 70, 100, "held"),
        (1.0, 4, 5, "not held"),
    ],
)
def test_a_share_fails_where_so_few_are_improbable(share, held, n, status):
    values = [0.0] * held + [9.0] * (n - held)
    assert judge(claim(test="share", share=share), records(*values)).status == status


def test_mean_needs_the_whole_interval():
    near, far = records(0.9, 1.0, 0.95), records(0.1, 0.2, 0.15)
    wide = judge(claim(test="mean", seeds=2), near)
    assert wide.mean is not None
    assert wide.interval is not None
    assert wide.mean < 1 < wide.interval[1]
    assert wide.status == "not held"
    assert judge(claim(test="mean", seeds=2), far).status == "held"


def test_mean_of_what_is_not_finite_is_not_held():
    verdict = judge(claim(test="mean", seeds=2), records(0.1, math.inf))
    assert verdict.status == "not held"
    assert verdict.interval is None
    assert "no interval" in verdict.detail


def test_a_known_error_that_shows_is_expected():
    wrong = claim(expected="fails", why="misprint")
    assert judge(wrong, records(2.0)).as_expected is True
    assert judge(wrong, records(0.5)).as_expected is False
    assert judge(wrong, []).as_expected is None


def test_nan_refutes_nothing():
    verdict = judge(claim(expected="fails", why="misprint"), records(math.nan))
    assert verdict.status == "not held"
    assert verdict.as_expected is False
    assert "NaN refutes nothing" in verdict.detail


def test_infinities_of_both_signs_have_no_mean():
    verdict = judge(claim(), records(math.inf, -math.inf))
    assert verdict.mean is not None
    assert math.isnan(verdict.mean)
    assert (verdict.low, verdict.high) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"relation": "=<"}, "Available: <, <=, >, >=, within."),
        ({"relation": "within"}, "a pair"),
        ({"target": (0.0, 1.0)}, "a number for the others"),
        ({"relation": "within", "target": (1.0, 0.0)}, "lower one first"),
        ({"target": math.nan}, "numbers"),
        ({"test": "avarage"}, "Available: every seed, mean, share."),
        ({"test": "mean"}, "at least 2"),
        ({"seeds": 0}, "at least 1"),
        ({"share": 0.0}, "(0, 1]"),
        ({"expected": "fails"}, "why"),
        ({"expected": "false"}, "'fails'"),
        ({"statement": ""}, "statement"),
        ({"origin": "papper"}, "'paper'"),
        ({"origin": "paper"}, "where the paper says so"),
        ({"origin": "misprint", "source": "eq. (1)"}, 'expected="fails"'),
        ({"why": "because"}, "move a remark to note="),
        ({"span": (1, 0)}, "largest possible"),
    ],
)
def test_bad_declarations(changes, words):
    with pytest.raises(InputError) as caught:
        claim(**changes)
    assert words in str(caught.value)
    assert re.search(WORDED, str(caught.value))
    assert "claim 'small'" in str(caught.value)


def test_a_quantity_that_fails_names_the_claim():
    with pytest.raises(InputError, match=r"claim 'small'.*KeyError"):
        judge(claim(quantity=lambda rows: {0: rows[0]["values"]["missing"]}), records(1.0))


def test_by_seed_leaves_out_what_has_not_run():
    rows = [*records(0.1), {"cell": "a", "seed": 1, "values": {}}, {"cell": "b", "seed": 2, "values": {"x": 1.0}}]
    assert by_seed(rows, "a", "x") == {0: 0.1}


def test_diverged_seeds_are_counted_apart():
    apart = claim(seeds=3, quantity=lambda rows: {0: 0.5, 1: None, 2: 0.7})
    verdict = judge(apart, records(0.5, 1.0, 0.7))
    assert (verdict.status, verdict.n, verdict.diverged) == ("held", 2, (1,))
    assert "seed 1 diverged and is counted apart" in verdict.detail
    assert judge(claim(seeds=3, quantity=lambda rows: {0: 2.0, 1: None, 2: 0.7}), records(1.0)).status == "not held"


def test_where_all_seeds_diverged_nothing_is_said():
    verdict = judge(claim(seeds=2, quantity=lambda rows: {0: None, 1: None}), records(1.0))
    assert (verdict.status, verdict.as_expected, verdict.diverged) == ("not enough runs", None, (0, 1))


def test_few_seeds_show_values_and_many_an_interval():
    assert judge(claim(), records(0.1, 0.2, 0.3, 0.4)).interval is None
    assert judge(claim(), records(0.1, 0.2, 0.3, 0.4, 0.5)).interval is not None
    assert judge(claim(test="mean", seeds=2), records(0.1, 0.2)).interval is not None


def test_an_interval_holds_only_possible_values():
    values = records(0.001, 0.002, 0.001, 0.02, 0.001)
    free, cut = judge(claim(), values).interval, judge(claim(span=(0, 1)), values).interval
    assert free is not None
    assert cut is not None
    assert free[0] < 0
    assert cut == (0.0, free[1])


def test_a_span_that_values_leave_does_not_hide_them():
    verdict = judge(claim(span=(0, 1)), records(-3.0, -3.1, -2.9, -3.0, -3.0))
    assert verdict.interval is not None
    assert verdict.interval[0] < -3


def test_a_share_comes_with_its_interval():
    verdict = judge(claim(test="share", share=0.5), records(0.1, 0.1, 9.0, 0.1))
    assert (verdict.held, verdict.n) == (3, 4)
    assert verdict.share == pytest.approx((0.19412, 0.99369), abs=1e-4)
