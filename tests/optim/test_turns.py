"""Turns: everyone once in every round, rounds alike, the same for the same stacks."""

from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerwise.optim.turns import LAUNCHES, MORE_ROUNDS, Turn, Work, balanced, one_by_one

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=12)
"""Groups of each layer of a stack."""
STACKS = st.lists(st.tuples(SIZES, st.floats(0.0, 1e9)), min_size=1, max_size=6)


def layers_of(sizes: list[int]) -> list[slice]:
    return [slice(a, b) for a, b in pairwise(accumulate(sizes, initial=0))]


def loads(turns: list[list[Turn]], costs: list[float], every: int) -> list[float]:
    """Work of each step of a round."""
    found = [0.0] * every
    for of_stack, cost in zip(turns, costs, strict=True):
        for turn in of_stack:
            found[turn.slot] += cost * (turn.groups.stop - turn.groups.start)
    return found


@settings(max_examples=80, deadline=None)
@given(STACKS, st.integers(1, 20))
def test_every_group_has_one_turn_and_layers_stay_whole(stacks: list[tuple[list[int], float]], every: int):
    turns = balanced([Work(layers_of(sizes), cost) for sizes, cost in stacks], every)
    assert len(turns) == len(stacks)
    for of_stack, (sizes, _) in zip(turns, stacks, strict=True):
        covered = [k for turn in of_stack for k in range(turn.groups.start, turn.groups.stop)]
        assert covered == list(range(sum(sizes)))  # in order, each once
        ends = set(accumulate(sizes))
        assert all(turn.groups.stop in ends for turn in of_stack)
        assert all(0 <= turn.slot < every for turn in of_stack)


@settings(max_examples=80, deadline=None)
@given(STACKS, st.integers(1, 20))
def test_steps_are_alike(stacks: list[tuple[list[int], float]], every: int):
    """The fullest step has an equal share and a batch more at most: a layer, or neighbours of 1½ shares and a layer."""
    costs = [cost for _, cost in stacks]
    found = loads(balanced([Work(layers_of(sizes), cost) for sizes, cost in stacks], every), costs, every)
    share = sum(cost * sum(sizes) for sizes, cost in stacks) / every
    largest_layer = max(cost * max(sizes) for sizes, cost in stacks)
    assert max(found) <= 2.5 * share + 2 * largest_layer + 1e-6
    assert sum(found) == pytest.approx(every * share)


def transformer(width: int = 768, labels: bool = False) -> list[Work]:
    """Attention, its projection and two layers behind it, with biases, twelve of each."""
    single, d = [slice(k, k + 1) for k in range(12)], width
    sizes = ((3 * d, d + 1), (d, d + 1), (4 * d, d + 1), (d, 4 * d + 1))
    return [Work(single, float(O**3 + I**3), MORE_ROUNDS * labels * O**3) for O, I in sizes]


def test_a_transformer_of_twelve_layers():
    """No step has more than 1.05 shares."""
    stacks = transformer()
    turns = balanced(stacks, 10, LAUNCHES)
    found = loads(turns, [stack.cost for stack in stacks], 10)
    assert max(found) <= 1.05 * sum(found) / 10
    assert sum(len(of_stack) for of_stack in turns) <= 12  # not 48 layers


def test_the_factors_of_one_kind_of_layer_may_take_three_rounds():
    """Those of queries, keys and values do. All in two steps of ten, these would have twice an equal share."""
    stacks = transformer(labels=True)
    turns = balanced(stacks, 10, LAUNCHES)
    found = loads(turns, [stack.cost + (stack.more if number == 0 else 0) for number, stack in enumerate(stacks)], 10)
    assert max(found) <= 1.2 * sum(found) / 10
    assert sum(len(of_stack) for of_stack in turns) <= 20
    expected = loads(turns, [stack.cost for stack in stacks], 10)
    assert max(expected) <= 1.2 * sum(expected) / 10


def test_small_layers_stay_in_few_batches():
    """Where launches are what a batch costs."""
    assert sum(len(of_stack) for of_stack in balanced(transformer(96, labels=True), 10, LAUNCHES)) <= 4


@settings(max_examples=30, deadline=None)
@given(STACKS, st.integers(1, 20))
def test_the_same_stacks_get_the_same_turns(stacks: list[tuple[list[int], float]], every: int):
    given_stacks = [
        Work(layers_of(sizes), cost, more) for (sizes, cost), more in zip(stacks, [0.0, 1e8] * 3, strict=False)
    ]
    assert balanced(given_stacks, every) == balanced(list(given_stacks), every)


def test_one_step_a_round_takes_all():
    turns = balanced([Work([slice(0, 1), slice(1, 3)], 2.0), Work([slice(0, 5)], 1.0)], 1)
    assert [turn.groups for turn in turns[0]] == [slice(0, 3)] or len(turns[0]) == 2
    assert {turn.slot for of_stack in turns for turn in of_stack} == {0}


def test_what_costs_nothing_still_has_its_turn():
    assert balanced([Work([slice(0, 2), slice(2, 3)], 0.0)], 4) == [[Turn(slice(0, 3), 0)]]


def test_no_stacks():
    assert balanced([], 3) == []


@pytest.mark.parametrize("every", [1, 3, 10])
def test_one_by_one_is_a_layer_a_step(every: int):
    layers = [slice(k, k + 1) for k in range(7)]
    turns = one_by_one(2, layers, every)
    assert [turn.groups for turn in turns] == layers
    assert [turn.slot for turn in turns] == [(2 + k) % every for k in range(7)]
