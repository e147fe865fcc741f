"""Metrics at equal progress: the first point that comes as far, monotone progress, and what is left out."""

import math

import pytest

from layerwise.foundations.errors import InputError, NameLookupError
from layerwise.regimes import at_equal_progress

FAST = {"step": [0, 10, 20, 30], "loss": [2.0, 1.2, 0.8, 0.4], "noisy": [2.0, 2.4, 2.8, 3.0]}
SLOW = {"loss": [2.0, 1.5, 1.0], "noisy": [2.0, 2.1, 2.2]}


def test_first_point_at_or_below():
    found = at_equal_progress(FAST, SLOW, "loss", [1.5, 1.0], ["noisy"], interpolate=False)
    assert found.a["noisy"] == (2.4, 2.8)
    assert found.b["noisy"] == (2.1, 2.2)
    assert found.difference("noisy") == pytest.approx((0.3, 0.6))
    assert found.dropped == {}


def test_between_points():
    found = at_equal_progress(FAST, SLOW, "loss", [1.5, 1.0], ["noisy"])
    assert found.a["noisy"] == pytest.approx((2.0 + 0.4 * 5 / 8, 2.6))
    assert found.b["noisy"] == pytest.approx((2.1, 2.2))


def test_the_first_point_needs_no_neighbour():
    found = at_equal_progress(FAST, SLOW, "loss", [2.0], ["noisy"])
    assert found.a["noisy"] == found.b["noisy"] == (2.0,)


def test_a_run_that_begins_beyond_a_threshold_is_not_compared():
    a, b = {"loss": [0.4, 0.3], "m": [7.0, 8.0]}, {"loss": [2.0, 0.5, 0.3], "m": [1.0, 2.0, 3.0]}
    found = at_equal_progress(a, b, "loss", [1.0, 0.35], ["m"])
    assert found.thresholds == (0.35,)
    assert found.dropped[1.0].startswith("a begins beyond it")


def test_an_accuracy_is_no_loss():
    """Its first value is below any threshold: without `rising` nothing would have been compared."""
    log = {"accuracy": [0.1, 0.6], "x": [0, 1]}
    found = at_equal_progress(log, log, "accuracy", [0.5], ["x"])
    assert found.thresholds == ()
    assert "rising=True" in found.dropped[0.5]


def test_progress_is_its_running_minimum():
    """A loss that comes back up is not less progress: the first time counts."""
    log = {"loss": [2.0, 0.9, 1.4, 0.9, math.nan, 0.5], "x": [0, 1, 2, 3, 4, 5]}
    found = at_equal_progress(log, log, "loss", [1.0, 0.6], ["x"], interpolate=False)
    assert found.a["x"] == (1, 5)
    between = at_equal_progress(log, log, "loss", [0.7], ["x"], interpolate=True)
    assert between.a["x"] == pytest.approx((1 + 4 * 0.5,))  # from step 1, where .9 was reached, to step 5
    log = {"loss": [2.0, 1.0, 3.0, 0.5], "m": [0.0, 1.0, 9.0, 2.0]}
    found = at_equal_progress(log, log, "loss", [0.75], ["loss", "m"])
    assert (found.a["loss"], found.a["m"]) == ((0.75,), (1.5,))


def test_what_one_did_not_reach_is_dropped_with_the_reason():
    found = at_equal_progress(FAST, SLOW, "loss", [1.0, 0.5, 0.1], ["noisy"])
    assert found.thresholds == (1.0,)
    assert found.dropped == {0.5: "b came to 1 only", 0.1: "a came to 0.4 only, b came to 1 only"}
    assert "0.5 left out: b came to 1 only" in str(found)


def test_rising_progress():
    a = {"accuracy": [0.1, 0.6, 0.5, 0.9], "x": [0, 1, 2, 3]}
    b = {"accuracy": [0.1, 0.4, 0.8], "x": [0, 1, 2]}
    found = at_equal_progress(a, b, "accuracy", [0.6, 0.85], ["x"], rising=True, interpolate=False)
    assert found.a["x"] == (1,)
    assert found.b["x"] == (2,)
    assert found.dropped == {0.85: "b came to 0.8 only"}


def test_bad_input():
    with pytest.raises(NameLookupError, match="loss"):
        at_equal_progress(FAST, SLOW, "los", [1.0], ["noisy"])
    with pytest.raises(NameLookupError, match="noisy"):
        at_equal_progress(FAST, SLOW, "loss", [1.0], ["nosy"])
    with pytest.raises(InputError, match="length"):
        at_equal_progress({"loss": [1.0], "noisy": []}, SLOW, "loss", [1.0], ["noisy"])
    with pytest.raises(NameLookupError):
        at_equal_progress(FAST, SLOW, "loss", [1.0], ["noisy"]).difference("clean")
