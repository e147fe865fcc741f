"""EKFAC's examples deferred: in the end the same scalings as at once, and nothing is kept for longer."""

import copy
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from optim_tools import batches, cross_entropy, flat, mlp
from torch import Tensor, nn

import layerwise as lw
from layerwise.foundations.errors import InputError
from layerwise.optim.cuda import deferred_examples, executor
from layerwise.optim.cuda.deferred_examples import PENDING, DeferredExamples
from layerwise.optim.cuda.executor import AsynchronousExecutor
from layerwise.optim.cuda.pending_checkpoint import PendingScalings
from layerwise.optim.engine import Layerwise
from layerwise.optim.members.ekfac import CorrectedEigenvalues
from layerwise.optim.rule import Context, Observation, Requirements, State
from layerwise.optim.step.stack import Stack

EVERY = 4
DATA = batches(3 * EVERY, 5)


class Run:
    """An optimizer whose batches are noted, as they come for each stack. Layers take turns as large ones do."""

    def __init__(self, patch: pytest.MonkeyPatch, over: int | None = EVERY, sync: bool = False, **options: Any) -> None:
        patch.setattr(Layerwise, "host_may_sync", property(lambda self: sync))
        patch.setattr(executor, "SWEEPS_LAUNCHES", 0.0)
        self.noted: dict[int, tuple[Observation, Context]] = {}
        pending = DeferredExamples._pending

        def noting(deferred: DeferredExamples, stack: Stack, seen: Observation, context: Context) -> list[Any]:
            self.noted[id(stack)] = (seen, context)
            return pending(deferred, stack, seen, context)

        patch.setattr(DeferredExamples, "_pending", noting)
        self.model = mlp(5, 6, 6, 6, 3)
        options = {"refresh_every": EVERY, "factor_every": EVERY, "examples_over": over, "momentum": 0.5} | options
        self.opt = lw.optim.EKFAC(self.model, 0.01, 0.1, **options, scale="formula")
        self.taken = 0

    def steps(self, count: int, spoil: bool = False) -> None:
        for x, y in DATA[self.taken : self.taken + count]:
            self.opt.zero_grad()
            cross_entropy(self.model(x), y).backward()
            if spoil:
                next(p.grad for p in self.model.parameters() if p.grad is not None).fill_(torch.nan)
            self.opt.step()
            self.taken += 1

    @property
    def stacks(self) -> list[Stack]:
        return [stack for stack in self.opt._stacks or () if stack.rule is self.opt.rule]

    def waiting(self) -> list[slice]:
        return [share.groups for stack in self.stacks for share in stack.memory.get(PENDING, [])]

    def rows(self) -> list[weakref.ref[Tensor]]:
        """Inputs and output gradients of the last batch."""
        calls = [call for seen, _ in self.noted.values() for (record,) in seen.recorded for call in record.io.calls]
        return [weakref.ref(x) for call in calls for x in (call.x, call.dy) if x is not None]

    def at_once(self, stack: Stack) -> Tensor:
        """The scalings of the last batch, of all layers in the present basis."""
        state = {"basis": stack.state["basis"], "s": stack.state["s"].clone()}
        stack.rule.observe(state, *self.noted[id(stack)])
        return state["s"]

    @property
    def examples(self) -> DeferredExamples:
        found = self.opt._executor
        assert isinstance(found, AsynchronousExecutor)
        return found.examples


@pytest.mark.parametrize("solver", ["auto", "products"])
def test_in_the_end_all_is_as_at_once(solver: str, monkeypatch: pytest.MonkeyPatch):
    """Each layer's scalings are those of the batch in the basis that the layer has; then its rows are let go."""
    run = Run(monkeypatch, solver=solver)
    run.steps(EVERY + 1)
    left, kept = [len(run.waiting())], run.rows()
    before = {id(stack): stack.state["s"].clone() for stack in run.stacks}
    for _ in range(EVERY - 1):
        run.steps(1)
        left.append(len(run.waiting()))
    assert left[0] > left[-1] == 0
    assert left == sorted(left, reverse=True)
    for stack in run.stacks:
        assert torch.equal(stack.state["s"], run.at_once(stack))
    assert any(not torch.equal(stack.state["s"], before[id(stack)]) for stack in run.stacks)
    run.noted.clear()
    assert not any(x() is not None for x in kept)


def test_rows_are_let_go_one_after_the_other(monkeypatch: pytest.MonkeyPatch):
    run, alive = Run(monkeypatch), []
    run.steps(EVERY + 1)
    kept = run.rows()
    run.noted.clear()
    for _ in range(EVERY):
        alive.append(sum(x() is not None for x in kept))
        run.steps(1)
    assert len(kept) > alive[0] > alive[1] > alive[-1] == 0


# --- saved in between --------------------------------------------------------------------------------------


def test_a_state_that_is_saved_in_between(monkeypatch: pytest.MonkeyPatch):
    """Has the scalings of now; the run goes on as if nothing had been saved."""
    run, other = Run(monkeypatch), Run(monkeypatch)
    for each in (run, other):
        each.steps(EVERY + 2)
    waiting, before = run.waiting(), {id(stack): stack.state["s"].clone() for stack in run.stacks}
    assert waiting
    saved = run.opt.state_dict()
    assert run.waiting() == waiting
    found = {name: kept for of in saved["state"].values() for name, kept in of.items() if "s" in kept}
    for stack in run.stacks:
        shares = [share.groups for share in stack.memory.get(PENDING, [])]
        for spec, groups in stack.slices():
            assert torch.equal(found[spec.name]["s"], before[id(stack)][groups])
            assert ("s_due" in found[spec.name]) == (groups in shares)
    for each in (run, other):
        each.steps(4)
    assert torch.equal(flat(run.model), flat(other.model))


def test_examples_that_somebody_writes_over_are_neither_saved_nor_looked_at(monkeypatch: pytest.MonkeyPatch):
    run = Run(monkeypatch)
    run.steps(EVERY + 1)
    stack = next(stack for stack in run.stacks if stack.memory.get(PENDING))
    share, before = stack.memory[PENDING][0], stack.state["s"].clone()
    share.seen.recorded[0][0].io.calls[0].dy.mul_(100)
    saved = {name: kept for of in run.opt.state_dict()["state"].values() for name, kept in of.items()}
    for spec, groups in stack.slices():
        if groups.start >= share.groups.start and groups.stop <= share.groups.stop:
            assert "s_due" not in saved[spec.name]
    share.look(stack)
    assert torch.equal(stack.state["s"], before)


def test_examples_of_layers_that_are_no_longer_trained_are_let_go(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deferred_examples, "LATE", 3)
    run = Run(monkeypatch)
    run.steps(EVERY + 1)
    assert run.waiting()
    context = replace(run.noted[id(run.stacks[0])][1], step=run.taken + 20)
    for stack in run.stacks:
        run.examples.run(stack, None, context, [False] * stack.groups)
    assert not run.waiting()


def resumed(run: Run, patch: pytest.MonkeyPatch, **options: Any) -> Run:
    """Another run that goes on from the state of this one."""
    found = Run(patch, **options)
    found.model.load_state_dict(run.model.state_dict())
    found.opt.load_state_dict(copy.deepcopy(run.opt.state_dict()))
    found.taken = run.taken
    return found


@pytest.mark.parametrize(
    ("every", "solver"),
    [(EVERY, "auto"), (EVERY, "products"), (3 * EVERY, "auto"), (EVERY // 2, "products")],
)
def test_a_resumed_run_takes_the_same_steps(every: int, solver: str, monkeypatch: pytest.MonkeyPatch):
    """Whenever it was saved, before the examples of some layers were looked at, and again soon after."""
    options = {"refresh_every": every, "solver": solver}
    run = Run(monkeypatch, **options)
    run.steps(EVERY + 1)
    assert run.waiting()
    other = resumed(resumed(run, monkeypatch, **options), monkeypatch, **options)
    other.steps(1)
    later = resumed(other, monkeypatch, **options)
    run.steps(EVERY)
    for each in (other, later):
        each.steps(run.taken - each.taken)
        assert torch.equal(flat(each.model), flat(run.model))


def test_scalings_of_another_basis_are_left(monkeypatch: pytest.MonkeyPatch):
    """Those of a run whose bases turn sooner are of no use to one whose bases stay; they are let go all the same."""
    run = Run(monkeypatch)
    run.steps(2 * EVERY + 1)
    other = resumed(run, monkeypatch, refresh_every=50)
    other.steps(EVERY - 1)
    assert not other.waiting()
    loaded = run.opt.state_dict()["state"].values()
    kept = {name: X["s"] for of_param in loaded for name, X in of_param.items() if "s_due" in X}
    assert kept
    for stack in other.stacks:
        for spec, groups in stack.slices():
            if spec.name in kept:
                assert torch.equal(stack.state["s"][groups], kept[spec.name])


def test_a_member_without_examples_takes_none(monkeypatch: pytest.MonkeyPatch):
    run = Run(monkeypatch)
    run.steps(EVERY + 2)
    other = resumed(run, monkeypatch, scaling="running")
    other.steps(1)
    assert not other.waiting()
    assert "s_due" not in next(iter(other.opt.state_dict()["state"][0].values()))


def test_a_layer_without_a_gradient_at_its_turn_looks_later(monkeypatch: pytest.MonkeyPatch):
    run = Run(monkeypatch)
    run.steps(EVERY + 1)
    stack = next(stack for stack in run.stacks if stack.memory.get(PENDING))
    share = min(stack.memory[PENDING], key=lambda share: share.step)
    context = Context(share.step, 0.0, 0.0, True, {})
    run.examples.run(stack, None, context, [False] * len(stack.state["s"]))
    assert share in stack.memory[PENDING]
    run.examples.run(stack, None, context, [True] * len(stack.state["s"]))
    assert share not in stack.memory[PENDING]


def test_a_batch_that_comes_before_the_last_is_done(monkeypatch: pytest.MonkeyPatch):
    """All layers of the last are looked at first."""
    looks, observe = [], CorrectedEigenvalues.observe

    def noting(rule: CorrectedEigenvalues, state: State, seen: Observation, context: Context) -> None:
        if seen.recorded:
            looks.append((seen.recorded[0][0].batch[0], seen.recorded[0][0].io.spec.name))
        observe(rule, state, seen, context)

    run = Run(monkeypatch)
    monkeypatch.setattr(CorrectedEigenvalues, "observe", noting)
    run.steps(EVERY + 1)
    run.opt.factor_every = 1
    run.steps(2)
    numbers = [number for number, _ in looks]
    assert [numbers.count(number) for number in sorted({*numbers})] == [4, 4, 4 - len(run.waiting())]
    for layer in {name for _, name in looks}:
        of_layer = [number for number, name in looks if name == layer]
        assert of_layer == sorted({*of_layer})


def test_a_batch_that_is_left_out_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    """Only the device knows: later steps remember its all_finite, not their own."""
    run = Run(monkeypatch)
    run.steps(EVERY)
    run.steps(1, spoil=True)
    run.steps(EVERY - 1)
    assert not run.waiting()
    for stack in run.stacks:
        s_P, s_Q = stack.state["basis"].values_P, stack.state["basis"].values_Q
        assert torch.equal(stack.state["s"], s_P.unsqueeze(-1) * s_Q.unsqueeze(-2))  # as refreshes begin them
    assert run.opt.health().skipped_steps == 1


def test_when_they_are_deferred(monkeypatch: pytest.MonkeyPatch):
    def over(rule: CorrectedEigenvalues, every: int, by_itself: bool, processes: int = 1) -> int:
        return DeferredExamples.of(rule.requirements(), every, by_itself, processes).over

    rule = CorrectedEigenvalues
    assert over(rule(), 10, True) == 10
    assert over(rule(), 10, False) == 1
    assert over(rule(examples_over=3), 10, False) == 3
    assert over(rule(examples_over=3), 2, True) == 2
    for other, every, processes in ((rule(scaling="running"), 10, 1), (rule(), 10, 2), (rule(), 1, 1)):
        assert over(other, every, True, processes) == 1
    says_nothing = Requirements(examples=True)
    assert DeferredExamples.of(says_nothing, 10, True, 1).over == 1
    run = Run(monkeypatch, over=None)
    run.steps(2)
    assert run.examples.over == 1  # a CPU
    assert not run.noted
    eager = Run(monkeypatch, over=None, sync=True)
    eager.steps(2)
    assert not isinstance(eager.opt._executor, AsynchronousExecutor)
    assert not eager.noted
    with pytest.raises(InputError, match="examples_over=0"):
        lw.optim.EKFAC(nn.Linear(2, 2), examples_over=0, scale="formula")


@pytest.mark.usefixtures("untyped")
def test_small_eigenvalues_in_other_places_are_another_basis():
    """However large the largest is."""
    values = torch.tensor([[1.0, 8e-4, 1e-6]])
    scalings, ones = values.unsqueeze(-1) * torch.ones(1, 3, 2), torch.ones(1, 2)
    for s_P, taken in ((values, True), (values * (1 + 1e-4), True), (values[:, [0, 2, 1]], False)):
        basis = SimpleNamespace(values_P=s_P, values_Q=ones)
        stack = SimpleNamespace(state={"s": torch.zeros(1, 3, 2), "basis": basis})
        known = {"values_P": values, "values_Q": ones}
        PendingScalings(slice(0, 1), 5, scalings, known).look(stack)  # type: ignore[arg-type]
        assert torch.equal(stack.state["s"], scalings if taken else torch.zeros(1, 3, 2))
