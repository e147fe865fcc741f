"""How many rounds an inverse takes: what the device says of it, and a factor of sampled labels that is followed."""

import pytest
import torch
from layerwise.optim.factors import Factors
from torch import Tensor

from layerwise.optim.cuda import storage as stored
from layerwise.optim.cuda.inverse import EXACT_BATCHES, Refined, _verdict
from layerwise.optim.cuda.monitor import REFUSED, WANTING
from layerwise.optim.rule import Context, Health, Shape

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


def of_sampled_labels(seed: int, alike: bool) -> Tensor:
    """Second moment of gradients of a few sequences; unless all are alike, the first tokens' are the largest."""
    g = torch.randn(SEQUENCES, LENGTH, SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    g *= torch.linspace(1, 0.1, SIZE)
    g = (g if alike else g / torch.arange(1, LENGTH + 1).sqrt()[:, None]).flatten(0, 1)
    return g.mT @ g / len(g)


@pytest.mark.parametrize("alike", [True, False])
def test_a_young_mean_of_sampled_labels_is_followed(alike: bool):
    """A half, a third, …, an eighth of it are new at a turn: after the first turns nothing is refused."""
    rule, health, memory, damping = Factors("outgrads", "identity"), Health(), {}, 0.05
    rule.use_solver("newton")
    shape = Shape(1, SIZE, 4, torch.float32, torch.device("cpu"))
    state, whole, P, rounds, refused = rule.init(shape), slice(0, 1), torch.zeros(()), [], []
    for turn in range(1, TURNS + 1):
        P = torch.lerp(P.expand(SIZE, SIZE).double(), of_sampled_labels(turn, alike), 0.05 / (1 - 0.95**turn))
        state["P"].copy_(P)
        context = Context(10 * turn - 9, 0.0, damping, True, {}, shape=shape, memory=memory)
        context.plan = rule.plan(state, whole, context, health)
        rule.refresh(state, whole, context, health)
        rule.report(whole, context)
        rounds.append(0 if context.plan.exact else context.plan.rounds("P_root"))
        refused.append(health.refusals)
    truth = torch.linalg.inv(P + damping * P.diagonal().mean() * torch.eye(SIZE))
    found = stored.value(state, "P_root")[0]
    assert float((found - truth).norm() / truth.norm()) < 5e-3
    assert refused[4] == refused[-1], refused
    assert rounds[-1] == (2 if alike else 3), rounds


def test_what_is_young_are_statistics_not_steps():
    """The first eight batches are solved exactly, however many steps lie between, and each of them once."""
    rule, memory, whole, turns = Factors("outgrads", "identity"), {}, slice(0, 1), []
    rule.use_solver("newton")
    shape = Shape(1, 16, 4, torch.float32, torch.device("cpu"))
    state = rule.init(shape)
    for turn in range(20):
        context = Context(1 + 10 * turn, 0.0, 0.1, True, {}, batches=1 + turn // 2, shape=shape, memory=memory)
        turns.append("P_root" in rule.plan(state, whole, context, Health()).exact)
    assert turns == [True, False] * EXACT_BATCHES + [False] * 4


def test_a_factor_that_shrinks_as_a_whole_is_followed():
    """One step from the last inverse leaves an error that looks like rounding: as large as its radius."""
    rule, health, memory, whole = Factors("outgrads", "identity"), Health(), {}, slice(0, 1)
    rule.use_solver("newton")
    shape = Shape(1, 24, 4, torch.float32, torch.device("cpu"))
    state, P = rule.init(shape), torch.diag(torch.logspace(0, -3, 24))
    for turn in range(16):
        P = P if turn < 8 else 0.8 * P
        state["P"].copy_(P)
        context = Context(100 + 10 * turn, 0.0, 0.03, True, {}, shape=shape, memory=memory)
        rule.refresh(state, whole, context, health)
        rule.report(whole, context)
    truth = torch.linalg.inv(P + 0.03 * P.diagonal().mean() * torch.eye(24))
    assert float((stored.value(state, "P_root")[0] - truth).norm() / truth.norm()) < 5e-3
    assert health.refusals > 0
