"""How many rounds an inverse takes: what the device says of it, and a factor of sampled labels that is followed."""

from typing import Any

import pytest
import torch
from gpu_objects import context_at, initial_state, matrix, set_factors
from torch import Tensor

from layerwise.optim.cuda.inverse import EXACT_BATCHES, Refined, RefinedInverse, _verdict
from layerwise.optim.cuda.monitor import REFUSED, WANTING
from layerwise.optim.kronecker import KroneckerRoots
from layerwise.optim.rule import Health, Shape

pytestmark = pytest.mark.usefixtures("untyped")
SIZE, SEQUENCES, LENGTH, TURNS = 192, 8, 85, 12


@pytest.mark.parametrize(
    ("rounds", "needed", "residual", "radius", "expected"),
    [
        (3, 1, 1e-3, 0.01, 1),
        (2, 2, 1e-3, 0.2, 2),
        (1, 1, 5e-3, 0.05, WANTING + 2),
        (2, 2, 5e-3, 0.05, WANTING + 3),
        (3, 2, 5e-3, 0.05, WANTING + 3),
        (1, 1, 5e-3, 0.3, WANTING + 2),
        (1, 1, 6e-3, 0.004, 1),  # rounding alone: more rounds would leave it
        (1, 1, 0.0124, 0.02, WANTING + 2),  # so much of it is counted, and may be something else
        (3, 2, 0.0124, 0.02, WANTING + 2),
        (3, 3, 0.1, 0.8, REFUSED),
        (1, 1, torch.inf, torch.inf, REFUSED),
    ],
)
def test_verdicts(rounds: int, needed: int, residual: float, radius: float, expected: int):
    found = Refined(torch.eye(1), torch.tensor([residual]), torch.tensor([radius]), torch.tensor([needed]))
    assert _verdict(found, rounds).tolist() == [expected]


@pytest.fixture
def rounds_taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of every refresh of an inverse; 0: it was solved exactly."""
    found, renew = [], RefinedInverse._renew

    def noting(self: RefinedInverse, factor: Any, shift: Any, groups: slice, rounds: int) -> None:
        found.append(rounds)
        renew(self, factor, shift, groups, rounds)

    monkeypatch.setattr(RefinedInverse, "_renew", noting)
    return found


def of_sampled_labels(seed: int, alike: bool) -> Tensor:
    """Second moment of gradients of a few sequences; unless all are alike, the first tokens' are the largest."""
    g = torch.randn(SEQUENCES, LENGTH, SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    g *= torch.linspace(1, 0.1, SIZE)
    g = (g if alike else g / torch.arange(1, LENGTH + 1).sqrt()[:, None]).flatten(0, 1)
    return g.mT @ g / len(g)


@pytest.mark.parametrize("alike", [True, False])
def test_a_young_mean_of_sampled_labels_is_followed(alike: bool, rounds_taken: list[int]):
    """A half, a third, …, an eighth of it are new at a turn: after the first turns nothing is refused."""
    rule, health, damping = KroneckerRoots("outgrads", "identity"), Health(), 0.05
    shape = Shape(1, SIZE, 4, torch.float32, torch.device("cpu"))
    state, whole, P, refused = initial_state(rule, shape), slice(0, 1), torch.zeros(()), []
    for turn in range(1, TURNS + 1):
        P = torch.lerp(P.expand(SIZE, SIZE).double(), of_sampled_labels(turn, alike), 0.05 / (1 - 0.95**turn))
        set_factors(state, P=P)
        rule.refresh(state, whole, context_at(10 * turn - 9, damping, shape, health=health))
        refused.append(health.refusals)
    truth = torch.linalg.inv(P + damping * P.diagonal().mean() * torch.eye(SIZE))
    found = matrix(state, "P")[0]
    assert float((found - truth).norm() / truth.norm()) < 5e-3
    assert refused[4] == refused[-1], refused
    assert len(rounds_taken) == TURNS
    assert rounds_taken[-1] == (2 if alike else 3), rounds_taken


def test_what_is_young_are_statistics_not_steps(rounds_taken: list[int]):
    """The first eight batches are solved exactly, however many steps lie between, and each of them once."""
    rule, whole = KroneckerRoots("outgrads", "identity"), slice(0, 1)
    shape = Shape(1, 16, 4, torch.float32, torch.device("cpu"))
    state = initial_state(rule, shape)
    set_factors(state, P=torch.diag(torch.logspace(0, -1, 16)))
    for turn in range(20):
        rule.refresh(state, whole, context_at(1 + 10 * turn, 0.1, shape, batches=1 + turn // 2))
    assert [rounds == 0 for rounds in rounds_taken] == [True, False] * EXACT_BATCHES + [False] * 4


def test_a_factor_that_shrinks_as_a_whole_is_followed():
    """One step from the last inverse leaves an error that looks like rounding: as large as its radius."""
    rule, health, whole = KroneckerRoots("outgrads", "identity"), Health(), slice(0, 1)
    shape = Shape(1, 24, 4, torch.float32, torch.device("cpu"))
    state, P = initial_state(rule, shape), torch.diag(torch.logspace(0, -3, 24))
    for turn in range(16):
        P = P if turn < 8 else 0.8 * P
        set_factors(state, P=P)
        rule.refresh(state, whole, context_at(100 + 10 * turn, 0.03, shape, health=health))
    truth = torch.linalg.inv(P + 0.03 * P.diagonal().mean() * torch.eye(24))
    assert float((matrix(state, "P")[0] - truth).norm() / truth.norm()) < 5e-3
    assert health.refusals > 0
