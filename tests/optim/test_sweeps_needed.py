"""How many sweeps a basis takes: as many as it lately needed, and one where more are of no use."""

import pytest
import torch
from torch import Tensor

from layerwise.foundations.linalg.halves import Half
from layerwise.optim import bases
from layerwise.optim.eigenbasis import CorrectedEigenvalues
from layerwise.optim.factors import YOUNG_STEPS, Factors
from layerwise.optim.rotated_adam import RotatedAdam
from layerwise.optim.rule import Context, Health, Shape
from layerwise.optim.solver import LAG, SLOW_TURNS, Plan
from layerwise.optim.sweeps import CLOSELY_COUPLED, LOOSELY_COUPLED, MORE_SWEEPS, TURNS, BasisWatch

pytestmark = pytest.mark.usefixtures("untyped")
LIMIT, CPU = 0.1, torch.device("cpu")
ONE = slice(0, 1)


def told(watch: BasisWatch, turns: list[list[float]], health: Health | None = None) -> list[int]:
    """Sweeps of the turn after each report on the first group."""
    found = []
    for step, couplings in enumerate(turns):
        watch.say(ONE, torch.tensor(couplings)[:, None])
        watch.post(step, ONE)
        watch.hear(step + LAG, health or Health())
        found.append(watch.rounds(ONE))
    return found


def test_a_borderline_coupling_is_soon_forgotten():
    """One sweep did not quite suffice: two, until it would have done for two turns."""
    watch, health = BasisWatch.over(1, CPU, LIMIT), Health()
    assert watch.rounds(ONE) == 1
    assert told(watch, [[0.099], [0.101], [0.09, 0.03], [0.09, 0.03], [0.09]], health) == [1, 2, 2, 1, 1]
    assert (health.refusals, health.fallbacks) == (1, 0)


def test_what_three_sweeps_say_of_one():
    """The coupling before the first of them is that before one alone."""
    turns = [[0.5], *[[0.09, 0.02, 0.02]] * TURNS, [0.09]]
    assert told(BasisWatch.over(1, CPU, LIMIT), turns) == [3, 3, 1, 1]
    assert told(BasisWatch.over(1, CPU, LIMIT), [[0.5], *[[0.2, 0.09, 0.02]] * TURNS, [0.2, 0.09]]) == [3, 3, 2, 2]


def test_as_many_sweeps_as_are_needed():
    watch, health = BasisWatch.over(1, CPU, LIMIT), Health()
    assert told(watch, [[0.2], [0.3, 0.11], [0.4, 0.2, 0.11]], health) == [2, 3, MORE_SWEEPS]
    assert health.refusals == 3


def test_a_coupling_that_is_stuck_asks_for_no_more():
    """Rounding, and vectors of nearly equal eigenvalues, leave what no sweep takes away."""
    watch = BasisWatch.over(1, CPU, LIMIT)
    assert told(watch, [[0.14], [0.14, 0.125]]) == [2, 1]
    assert told(watch, [[0.14]] * SLOW_TURNS) == [*[1] * (SLOW_TURNS - 1), 2]  # then it is tried again
    assert told(watch, [[0.14, 0.125]]) == [1]
    slower = BasisWatch.over(1, CPU, LIMIT)
    assert told(slower, [[0.8, 0.7], [0.7, 0.65, 0.6]]) == [3, 3]  # far away, where all turns at once


def test_what_cannot_be_followed_says_nothing_of_sweeps():
    watch, health = BasisWatch.over(2, CPU, LIMIT), Health()
    watch.say(slice(0, 2), torch.tensor([[0.3, torch.inf], [0.05, torch.inf]]))
    watch.post(1, slice(0, 2))
    watch.hear(1 + LAG, health)
    assert [watch.rounds(slice(k, k + 1)) for k in range(2)] == [2, 1]
    assert watch.rounds(slice(0, 2)) == 2
    assert (health.refusals, health.fallbacks) == (0, 1)


def test_exact_decompositions_say_nothing():
    watch = BasisWatch.over(1, CPU, LIMIT)
    watch.post(1, ONE)
    watch.hear(1 + LAG, Health())
    assert watch.rounds(ONE) == 1


def test_a_plan_has_rounds_in_parts_too():
    plan = Plan(frozenset(), frozenset({"U_P", "U_Q"}), most=frozenset({"U_Q"}))
    assert [part.rounds(part.only or "") for part in plan.parts(["U_P", "U_Q"])] == [2, 3]


# --- limits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("power", "limit"),
    [
        ((0.25, 0.25), 0.09),
        ((0.5, 0.5), 0.045),
        ((0.5, 0.25), 0.045),
        ((1.0, 0.25), 0.09),
        ((0.0, 0.01), LOOSELY_COUPLED),
    ],
)
def test_the_limit_follows_from_the_power(power: tuple[float, float], limit: float):
    assert Factors("gradient", "gradient", power).coupling_limit == pytest.approx(limit)


def test_the_limits_of_measured_moments():
    assert CorrectedEigenvalues(scaling="none").coupling_limit == CLOSELY_COUPLED
    assert CorrectedEigenvalues().coupling_limit == RotatedAdam().coupling_limit == LOOSELY_COUPLED


# --- a rule ------------------------------------------------------------------------------------------------


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sweeps_of(
    factors: list[Tensor], monkeypatch: pytest.MonkeyPatch, start: int = 100, floor: float = 0.0
) -> list[tuple[int, float]]:
    """Sweeps that Shampoo's rule (¼) takes at each turn, and the coupling before the first of them.

    `floor` is the least coupling that is seen, as where rounding shows.
    """
    found = []
    own = bases.tracked_half

    def spy(M: Tensor, U: Half, sweeps: int) -> tuple[Half, Tensor, Tensor]:
        V, values, couplings = own(M, U, sweeps)
        couplings = couplings.clamp(min=floor)
        found.append((sweeps, float(couplings[0].max())))
        return V, values, couplings

    monkeypatch.setattr(bases, "tracked_half", spy)
    rule = Factors("gradient", "identity", (0.25, 0.0))
    rule.use_solver("newton")
    shape = Shape(len(factors[0]), factors[0].shape[-1], 4, torch.float32, CPU)
    state, memory = rule.init(shape), {}
    for turn, M in enumerate(factors):
        state["P"].copy_(M)
        context = Context(start + 10 * turn, 0.0, 1e-3, True, {}, shape=shape, memory=memory)
        rule.refresh(state, slice(0, len(M)), context, Health())
        rule.report(slice(0, len(M)), context)
    return found


def test_a_basis_that_turned_once_is_soon_followed_by_single_sweeps(monkeypatch: pytest.MonkeyPatch):
    U = torch.linalg.qr(normal(1, 40, 40, seed=0))[0]
    values = torch.logspace(0, -3, 40)
    root = U * values.sqrt()
    X = root @ normal(1, 40, 40, seed=1)
    first = root @ root.mT
    after = 0.8 * first + 0.2 * X @ X.mT / 40
    found = sweeps_of([first, first, *[after] * 6], monkeypatch)
    assert found[1][1] > LIMIT
    assert [sweeps for sweeps, _ in found] == [1, 1, 2, 2, 1, 1, 1]


def test_a_young_basis_takes_all_sweeps(monkeypatch: pytest.MonkeyPatch):
    first = torch.diag(torch.logspace(0, -3, 8))[None]
    assert [sweeps for sweeps, _ in sweeps_of([first] * 3, monkeypatch, YOUNG_STEPS - 15)] == [
        MORE_SWEEPS,
        1,
    ]


def test_a_floor_costs_no_sweeps(monkeypatch: pytest.MonkeyPatch):
    """Coupled above the limit at every turn, and no sweep brings it below."""
    first = torch.diag(torch.logspace(0, -3, 8))[None]
    found = sweeps_of([first] * (2 * SLOW_TURNS), monkeypatch, floor=0.11)
    assert [sweeps for sweeps, _ in found] == [
        1,
        2,
        *[1] * SLOW_TURNS,
        2,
        *[1] * (SLOW_TURNS - 4),
    ]
