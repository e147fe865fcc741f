"""Staggered refreshes: everyone once in every round, rounds alike, the same for the same stacks."""

import statistics
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerwise.optim.cuda.stagger import LAUNCHES, Work, balanced, decomposition_cost
from layerwise.optim.rule import Shape
from layerwise.optim.step.refresh_schedule import Turn, one_by_one

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


@settings(max_examples=15, deadline=None)
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


@settings(max_examples=15, deadline=None)
@given(STACKS, st.integers(1, 20))
def test_steps_are_alike(stacks: list[tuple[list[int], float]], every: int):
    """The fullest step has an equal share and a batch more at most: a layer, or neighbours of 1½ shares and a layer."""
    costs = [cost for _, cost in stacks]
    found = loads(balanced([Work(layers_of(sizes), cost) for sizes, cost in stacks], every), costs, every)
    share = sum(cost * sum(sizes) for sizes, cost in stacks) / every
    largest_layer = max(cost * max(sizes) for sizes, cost in stacks)
    assert max(found) <= 2.5 * share + 2 * largest_layer + 1e-6
    assert sum(found) == pytest.approx(every * share)


def transformer(width: int = 768) -> list[Work]:
    """Attention, its projection and two layers behind it, with biases, twelve of each."""
    single, d, found = [slice(k, k + 1) for k in range(12)], width, []
    for O, I in ((3 * d, d + 16), (d, d + 16), (4 * d, d + 16), (d, 4 * d + 16)):
        shape = Shape(12, O, I, torch.float32, torch.device("cpu"))
        found.append(Work(single, decomposition_cost(shape, left=True, right=True)))
    return found


def unevenness(turns: list[list[Turn]], costs: list[float], stacks: list[Work]) -> float:
    """Slowest over median step, where all else of a step takes twice what a refresh does."""
    base = 2 * sum(stack.total for stack in stacks) / 10
    steps = [base + load for load in loads(turns, costs, 10)]
    return max(steps) / statistics.median(steps)


@pytest.mark.parametrize(
    ("width", "launches"), [(96, 0.0), (768, 0.0), (1536, 0.0), (1536, LAUNCHES), (2048, LAUNCHES)]
)
def test_transformers_of_twelve_layers(width: int, launches: float):
    stacks = transformer(width)
    turns = balanced(stacks, 10, launches)
    assert unevenness(turns, [stack.cost for stack in stacks], stacks) <= 1.06
    if launches:
        assert sum(len(of_stack) for of_stack in turns) <= 12  # not 48 layers


@pytest.mark.parametrize("width", [96, 384, 768])
def test_layers_whose_launches_cost_more_stay_together(width: int):
    """A whole stack at once, each at a step of its own: the work of these steps is not alike, their time nearly."""
    turns = balanced(transformer(width), 10, LAUNCHES)
    assert [[turn.groups for turn in of_stack] for of_stack in turns] == [[slice(0, 12)]] * 4
    assert len({turn.slot for of_stack in turns for turn in of_stack}) == 4


@pytest.mark.parametrize("width", [768, 1024, 1536, 2048])
def test_no_batch_costs_much_less_than_its_launches(width: int):
    stacks = transformer(width)
    for stack, of_stack in zip(stacks, balanced(stacks, 10, LAUNCHES), strict=True):
        if len(of_stack) > 1:
            assert stack.total / len(of_stack) >= LAUNCHES / 1.5


@settings(max_examples=8, deadline=None)
@given(STACKS, st.integers(1, 20))
def test_the_same_stacks_get_the_same_turns(stacks: list[tuple[list[int], float]], every: int):
    given_stacks = [Work(layers_of(sizes), cost) for sizes, cost in stacks]
    assert balanced(given_stacks, every) == balanced(list(given_stacks), every)


def test_one_step_a_round_takes_all():
    turns = balanced([Work([slice(0, 1), slice(1, 3)], 2.0), Work([slice(0, 5)], 1.0)], 1)
    assert [turn.groups for turn in turns[0]] == [slice(0, 3)] or len(turns[0]) == 2
    assert {turn.slot for of_stack in turns for turn in of_stack} == {0}


def test_what_costs_nothing_still_has_its_turn():
    assert balanced([Work([slice(0, 2), slice(2, 3)], 0.0)], 4) == [[Turn(slice(0, 3), 3)]]


def test_no_stacks():
    assert balanced([], 3) == []


@pytest.mark.parametrize("every", [1, 3, 10])
def test_one_by_one_is_a_layer_a_step(every: int):
    layers = [slice(k, k + 1) for k in range(7)]
    turns = one_by_one(2, layers, every)
    assert [turn.groups for turn in turns] == layers
    assert [turn.slot for turn in turns] == [(2 + k) % every for k in range(7)]
