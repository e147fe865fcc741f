"""How many sweeps a basis takes: as many as it lately needed, and one where more are of no use."""

import itertools
from typing import Any

import pytest
import torch
from gpu_objects import context_at, initial_state, matrix, refined, set_factors
from torch import Tensor

from layerwise.optim.cuda import basis as bases
from layerwise.optim.cuda.basis import TrackedSide
from layerwise.optim.cuda.basis_monitor import CLOSELY_COUPLED, LOOSELY_COUPLED, MORE_SWEEPS, TURNS, BasisMonitor
from layerwise.optim.cuda.linalg.fp16 import Half
from layerwise.optim.cuda.monitor import LAG, SLOW_TURNS, YOUNG_STEPS
from layerwise.optim.kronecker import KroneckerRoots
from layerwise.optim.members.ekfac import CorrectedEigenvalues
from layerwise.optim.members.soap import RotatedAdam
from layerwise.optim.rule import Health, Shape, UpdateRule
from random_tensors import randn as normal

pytestmark = pytest.mark.usefixtures("untyped")
LIMIT, CPU = 0.1, torch.device("cpu")
ONE = slice(0, 1)


def told(monitor: BasisMonitor, turns: list[list[float]], health: Health | None = None) -> list[int]:
    """Sweeps of the turn after each report on the first group."""
    found = []
    for step, couplings in enumerate(turns):
        monitor.write(ONE, torch.tensor(couplings)[:, None])
        monitor.send(step, ONE)
        monitor.poll(step + LAG, health or Health())
        found.append(monitor.rounds(ONE))
    return found


def test_a_borderline_coupling_is_soon_forgotten():
    """One sweep did not quite suffice: two, until it would have done for two turns."""
    monitor, health = BasisMonitor.over(1, CPU, LIMIT), Health()
    assert monitor.rounds(ONE) == 1
    assert told(monitor, [[0.099], [0.101], [0.09, 0.03], [0.09, 0.03], [0.09]], health) == [1, 2, 2, 1, 1]
    assert (health.refusals, health.fallbacks) == (1, 0)


def test_what_three_sweeps_say_of_one():
    """The coupling before the first of them is that before one alone."""
    turns = [[0.5], *[[0.09, 0.02, 0.02]] * TURNS, [0.09]]
    assert told(BasisMonitor.over(1, CPU, LIMIT), turns) == [3, 3, 1, 1]
    assert told(BasisMonitor.over(1, CPU, LIMIT), [[0.5], *[[0.2, 0.09, 0.02]] * TURNS, [0.2, 0.09]]) == [3, 3, 2, 2]


def test_as_many_sweeps_as_are_needed():
    monitor, health = BasisMonitor.over(1, CPU, LIMIT), Health()
    assert told(monitor, [[0.2], [0.3, 0.11], [0.4, 0.2, 0.11]], health) == [2, 3, MORE_SWEEPS]
    assert health.refusals == 3


def test_a_coupling_that_is_stuck_asks_for_no_more():
    """Rounding, and vectors of nearly equal eigenvalues, leave what no sweep takes away."""
    monitor = BasisMonitor.over(1, CPU, LIMIT)
    assert told(monitor, [[0.14], [0.14, 0.125]]) == [2, 1]
    assert told(monitor, [[0.14]] * SLOW_TURNS) == [*[1] * (SLOW_TURNS - 1), 2]  # then it is tried again
    assert told(monitor, [[0.14, 0.125]]) == [1]
    slower = BasisMonitor.over(1, CPU, LIMIT)
    assert told(slower, [[0.8, 0.7], [0.7, 0.65, 0.6]]) == [3, 3]  # far away, where all turns at once


def test_what_cannot_be_followed_says_nothing_of_sweeps():
    monitor, health = BasisMonitor.over(2, CPU, LIMIT), Health()
    monitor.write(slice(0, 2), torch.tensor([[0.3, torch.inf], [0.05, torch.inf]]))
    monitor.send(1, slice(0, 2))
    monitor.poll(1 + LAG, health)
    assert [monitor.rounds(slice(k, k + 1)) for k in range(2)] == [2, 1]
    assert monitor.rounds(slice(0, 2)) == 2
    assert (health.refusals, health.fallbacks) == (0, 1)


def test_exact_decompositions_say_nothing():
    monitor = BasisMonitor.over(1, CPU, LIMIT)
    monitor.send(1, ONE)
    monitor.poll(1 + LAG, Health())
    assert monitor.rounds(ONE) == 1


def test_each_side_takes_the_sweeps_that_it_needs(monkeypatch: pytest.MonkeyPatch):
    """Two factors of one stack, of which only one turns."""
    taken, track = dict[str, list[int]](P=[], Q=[]), TrackedSide._track

    def noting(self: TrackedSide, factor: Any, groups: slice, sweeps: int, monitor: BasisMonitor) -> None:
        taken[self.side].append(sweeps)
        track(self, factor, groups, sweeps, monitor)

    monkeypatch.setattr(TrackedSide, "_track", noting)
    rule, shape = KroneckerRoots("gradient", "gradient", (0.25, 0.25)), Shape(1, 8, 8, torch.float32, CPU)
    state, still = initial_state(rule, shape), torch.diag(torch.logspace(0, -3, 8))
    for turn in range(3):
        X = normal(1, 8, 8, seed=turn)
        set_factors(state, P=still, Q=X @ X.mT)
        rule.refresh(state, ONE, context_at(100 + 10 * turn, 1e-3, shape))
    assert (taken["P"][-1], taken["Q"][-1]) == (1, MORE_SWEEPS)


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
    (found,) = limits_of(KroneckerRoots("gradient", "gradient", power))
    assert found == pytest.approx(limit)


def limits_of(rule: UpdateRule) -> set[float]:
    """Of the coupling before the last sweep, of both sides of a stack."""
    sides = refined(initial_state(rule, Shape(1, 4, 6, torch.float32, CPU))).values()
    return {side.limit for side in sides if isinstance(side, TrackedSide)}


def test_the_limits_of_measured_moments():
    assert limits_of(CorrectedEigenvalues(scaling="none")) == {CLOSELY_COUPLED}
    assert limits_of(CorrectedEigenvalues()) == limits_of(RotatedAdam()) == {LOOSELY_COUPLED}


# --- a rule ------------------------------------------------------------------------------------------------


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
    rule = KroneckerRoots("gradient", "identity", (0.25, 0.0))
    shape = Shape(len(factors[0]), factors[0].shape[-1], 4, torch.float32, CPU)
    state = initial_state(rule, shape)
    for turn, M in enumerate(factors):
        set_factors(state, P=M)
        rule.refresh(state, slice(0, len(M)), context_at(start + 10 * turn, 1e-3, shape))
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


def test_bases_of_an_earlier_run_are_followed():
    """With all sweeps at first; how many they need is learnt anew."""
    monitor = BasisMonitor.over(2, CPU, LIMIT, [True, False])
    assert monitor.exact == [False, True]
    assert [monitor.rounds(slice(k, k + 1)) for k in range(2)] == [MORE_SWEEPS, 1]
    assert told(monitor, [[0.05, 0.01, 0.01]] * TURNS)[-1] == 1


def test_what_an_earlier_run_knew_is_known_again():
    """Also what was still on its way to the host."""
    first, begun = BasisMonitor.over(2, CPU, LIMIT, [True, True]), [True, True]
    told(first, [[0.05, 0.01, 0.01], [0.05, 0.01, 0.01], [0.14, 0.05]])
    first.write(slice(1, 2), torch.tensor([[torch.inf]]))
    first.send(9, slice(1, 2))
    numbers = first.numbers()
    assert len(first._sent) == 1
    second, new = BasisMonitor.over(2, CPU, LIMIT, begun), BasisMonitor.over(2, CPU, LIMIT)
    for monitor in (second, new):
        monitor.recall(numbers)
    assert new.exact == [True, True]  # without a basis of that run
    first.poll(9 + LAG, Health())
    assert second.exact == first.exact == [False, True]
    assert (second.lately, second.idle) == (first.lately, first.idle)
    assert (second.pauses, second.patience) == (first.pauses, first.patience)


# --- what cannot be followed -------------------------------------------------------------------------------


def begun_at(failures: list[bool], health: Health) -> list[int]:
    """Turns at which a basis is decomposed, by whether each turn's sweep (or decomposition) fails."""
    monitor, found = BasisMonitor.over(1, CPU, LIMIT), []
    for turn, failed in enumerate(failures):
        exact = monitor.take_exact(turn, ONE, health)
        if exact:
            found.append(turn)
            monitor.write_begun(ONE, torch.tensor([not failed]))
        else:
            monitor.write(ONE, torch.tensor([[torch.inf if failed else 0.05]]))
        monitor.send(turn, ONE)
    return found


def test_what_cannot_be_followed_is_begun_again_once():
    """Two turns later the host has heard; the report of the turn in between asks for nothing more."""
    health = Health()
    assert begun_at([False] * 3 + [True] * 2 + [False] * 7, health) == [0, 3 + LAG]
    assert (health.fallbacks, health.restarts, health.refusals) == (2, 1, 0)


def test_what_can_never_be_decomposed_is_seldom_tried():
    health = Health()
    begun = begun_at([True] * 400, health)
    assert [b - a for a, b in itertools.pairwise(begun)] == [2, 3, 5, 9, 17, 33, *[65] * ((400 - 71) // 65)]
    assert (health.fallbacks, health.restarts) == (400 - LAG, len(begun) - 1)


def test_a_basis_that_recovered_is_begun_at_once_again():
    failed = [True] * 30 + [False] * 4
    assert begun_at([*failed, True, False, False, False], Health())[-1] == len(failed) + LAG


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sweep_that_overflows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Its basis stays, the other group's goes on; at the next turn both are those of eigh."""
    broken = [False]

    def spied(own: Any) -> Any:
        def spy(*args: Any) -> tuple[Any, Tensor, Tensor]:
            U, values, couplings = own(*args)
            couplings[:, 0] = torch.inf if broken[0] else couplings[:, 0]
            return U, values, couplings

        return spy

    for name in ("tracked_half", "tracked_basis"):
        monkeypatch.setattr(bases, name, spied(getattr(bases, name)))
    rule, health = KroneckerRoots("gradient", "identity", (0.25, 0.0)), Health()
    shape = Shape(2, 8, 4, dtype, CPU)
    state = initial_state(rule, shape)
    P = state["P"].mean

    def turn(number: int) -> tuple[Tensor, Tensor]:
        X = normal(2, 8, 32, seed=number).to(dtype)
        P.lerp_(X @ X.mT / 32, 0.1 if number else 1.0)
        rule.refresh(state, slice(0, 2), context_at(100 + 10 * number, 1e-3, shape, health=health))
        return matrix(state, "P").clone(), state["roots"].sides["P"].values.clone()

    turn(0)
    before = turn(1)
    broken[0] = True
    kept = turn(2)
    assert [torch.equal(a[0], b[0]) for a, b in zip(before, kept, strict=True)] == [True, True]
    assert not torch.equal(before[0][1], kept[0][1])
    broken[0] = False
    U, s = turn(3)
    assert (health.fallbacks, health.restarts) == (1, 1)
    assert torch.allclose(s, torch.linalg.eigvalsh(P), rtol=1e-4, atol=1e-6)
    assert torch.allclose((U * s.unsqueeze(-2)) @ U.mT, P, atol=2e-3 if dtype == torch.float32 else 1e-10)
    turn(4)
    turn(5)
    assert (health.fallbacks, health.restarts) == (1, 1)


def test_one_factor_that_is_not_finite_does_not_cost_the_others(monkeypatch: pytest.MonkeyPatch):
    """Neither theirs by sweeps nor theirs by eigh, which is asked for it ever more seldom."""
    tried = []
    eigh = bases.settled_eigh
    monkeypatch.setattr(bases, "settled_eigh", lambda M, name: tried.append(len(M)) or eigh(M, name=name))
    rule, health = KroneckerRoots("gradient", "identity", (0.25, 0.0)), Health()
    shape = Shape(2, 8, 4, torch.float32, CPU)
    state, first = initial_state(rule, shape), torch.diag(torch.logspace(0, -3, 8))
    P, side = state["P"].mean, state["roots"].sides["P"]
    for number in range(40):
        P[0], P[1] = torch.inf, first * (1 + number)
        rule.refresh(state, slice(0, 2), context_at(100 + 10 * number, 1e-3, shape, health=health))
        assert torch.allclose(side.values[1].sort().values, P[1].diagonal().sort().values, rtol=1e-2)
        assert torch.equal(matrix(state, "P")[0], torch.eye(8))
    assert len(tried) == 3 * 6  # at turns 0, 1, 4, 9, 18 and 35, both together and one by one
    assert health.fallbacks == 39
