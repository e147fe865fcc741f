"""Deferred statistics: every refresh sees the factors it would have seen, and nothing is kept longer."""

import copy
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.foundations.errors import InputError
from layerwise.optim.cuda import deferred_statistics, executor, rows
from layerwise.optim.cuda.deferred_statistics import PENDING, DeferredStatistics, PendingRows
from layerwise.optim.cuda.stagger import Work
from layerwise.optim.engine import Layerwise
from layerwise.optim.step.refresh_schedule import Turn

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16: torch goes on

WIDTH, BATCH, DEPTH = 16, 12, 3
MEMBERS: dict[str, Callable[..., Layerwise]] = {
    "KFAC": partial(lw.optim.KFAC, scale="formula"),
    "KFAC of any scale": lw.optim.KFAC,
    "EKFAC": partial(lw.optim.EKFAC, scale="formula"),
    "EKFAC running": lambda model, **options: lw.optim.EKFAC(model, scaling="running", **options, scale="formula"),
    "K-FAC in a basis": lambda model, **options: lw.optim.KFAC(
        model, damping_split="exact", **options, scale="formula"
    ),
}


class Net(nn.Module):
    """Layers of one size behind one of another, whose input is the user's own; rows of such a one do not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH // 2, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 2 * WIDTH)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        self.hidden = h
        return self.head(h)


@pytest.fixture(autouse=True)
def rows_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, and layers take turns as large ones do."""
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))
    monkeypatch.setattr(rows, "waits_for_step", rows.has_plain_rows)
    monkeypatch.setattr(executor, "LAUNCHES", 0.0)


class Run:
    """A training run; batches are named by their number."""

    def __init__(self, over: int | None, member: str = "KFAC", **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Net()
        options = {"factor_every": 4, "refresh_every": 4, "likelihood": "categorical", "lr": 0.02} | options
        self.opt = MEMBERS[member](self.model, statistics_over=over, **options)
        self.taken = 0

    def steps(self, count: int, without: str = "") -> "Run":
        for _ in range(count):
            generator = torch.Generator().manual_seed(self.taken)
            x, y = torch.randn(BATCH, WIDTH // 2, generator=generator), torch.arange(BATCH) % WIDTH
            self.opt.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                f = self.model(x)
            nn.functional.cross_entropy(f.float(), y).backward()
            for name, p in self.model.named_parameters():
                if without and name.startswith(without):
                    p.grad = None
            self.opt.step()
            self.taken += 1
        return self

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def waiting(self) -> int:
        return sum(len(stack.memory.get(PENDING, [])) for stack in self.opt._stacks or [])


def assert_same(found: Run, expected: Run) -> None:
    for a, b in zip(found.weights(), expected.weights(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)  # the order of sums in products of other batches


@pytest.mark.parametrize(
    ("member", "solver"),
    [
        ("KFAC", "auto"),
        ("KFAC", "products"),
        ("EKFAC", "auto"),
        ("EKFAC running", "products"),
        ("K-FAC in a basis", "auto"),
    ],
)
def test_the_same_steps_as_at_once(member: str, solver: str):
    found = Run(4, member, cuda_graphs=False, solver=solver).steps(6)
    assert found.waiting() > 0
    assert_same(found.steps(3), Run(1, member, cuda_graphs=False, solver=solver).steps(9))


@pytest.mark.parametrize(("factors", "decompositions", "over"), [(4, 6, 3), (6, 4, 6), (4, 1, 4)])
def test_whatever_the_schedule(factors: int, decompositions: int, over: int):
    schedule = {"factor_every": factors, "refresh_every": decompositions}
    assert_same(Run(over, **schedule).steps(11), Run(1, **schedule).steps(11))


@pytest.mark.parametrize("shares", [1, 100])
@pytest.mark.parametrize("member", ["KFAC", "EKFAC running"])
def test_however_many_layers_are_taken_in_together(member: str, shares: int, monkeypatch: pytest.MonkeyPatch):
    """A stack at once, with the first of its turns; or in as many parts as it is refreshed in."""
    monkeypatch.setattr(deferred_statistics, "SHARES", shares)
    monkeypatch.setattr(executor, "balanced", lambda works, every, launches: one_layer_each(works, every))
    found = Run(4, member, cuda_graphs=False).steps(5)
    blocks = max(found.opt._stacks or [], key=lambda stack: stack.groups)
    parts = deferred_statistics.joined(blocks.memory["turns"], blocks.memory[deferred_statistics.MOST_GROUPS])
    assert [slots for _, slots in parts] == ([(3, 2, 1)] if shares == 1 else [(3,), (2,), (1,)])
    assert_same(found.steps(5), Run(1, member, cuda_graphs=False).steps(10))


def one_layer_each(works: Sequence[Work], every: int) -> list[list[Turn]]:
    """Turns, the first layer's last."""
    return [[Turn(groups, every - 1 - place) for place, groups in enumerate(work.layers)] for work in works]


def test_a_checkpoint_has_all_of_its_batch():
    found, expected = Run(4).steps(6), Run(1).steps(6)
    assert found.waiting() > 0
    saved, wanted = found.opt.state_dict(), expected.opt.state_dict()
    for a, b in zip(saved["state"].values(), wanted["state"].values(), strict=True):
        for layer in b:
            for name, X in b[layer].items():
                torch.testing.assert_close(a[layer][name], X)
    resumed = Run(4)
    resumed.model.load_state_dict(found.model.state_dict())
    resumed.opt.load_state_dict(saved)
    resumed.taken = 6
    resumed.steps(5)
    assert_same(resumed, expected.steps(5))
    assert_same(found.steps(5), expected)


@pytest.mark.parametrize("over", [1, 4])
@pytest.mark.parametrize("stopped", [4, 6, 7])
def test_a_run_of_empirical_statistics_is_resumed(over: int, stopped: int):
    """Whose loss's scale is taken out on the device: as without a break, wherever it stopped."""
    options: dict[str, Any] = {"estimator": "empirical", "scale": "adam", "likelihood": None, "solver": "products"}
    whole = Run(over, "KFAC of any scale", **options).steps(stopped)
    resumed = Run(over, "KFAC of any scale", **options)
    resumed.model.load_state_dict(whole.model.state_dict())
    resumed.opt.load_state_dict(copy.deepcopy(whole.opt.state_dict()))
    resumed.taken = stopped
    begun = whole.weights()
    assert_same(resumed.steps(5), whole.steps(5))
    assert not any(torch.equal(a, b) for a, b in zip(begun, whole.weights(), strict=True))


def test_a_report_changes_nothing():
    found = Run(4).steps(6)
    expected = Run(1).steps(6)
    assert found.opt.health().condition == pytest.approx(expected.opt.health().condition)
    assert found.waiting() == 0
    assert_same(found.steps(3), expected.steps(3))


@pytest.mark.parametrize(("before", "solver"), [(4, "auto"), (5, "products"), (5, "auto"), (6, "auto")])
def test_layers_without_a_gradient(before: int, solver: str):
    """At the step of a batch, and after it; beside others in their turn."""
    options = {"cuda_graphs": False, "solver": solver}
    runs = [Run(over, **options).steps(before).steps(1, without="blocks.1").steps(8 - before) for over in (4, 1)]
    assert_same(*runs)


def test_rows_of_layers_that_are_dropped_are_let_go():
    run = Run(4).steps(5)
    assert run.waiting() > 0
    run.opt.factor_every = 1000  # no batch comes
    run.steps(4, without="blocks")
    assert run.waiting() == 0


def test_rows_of_a_side_without_a_factor_are_not_kept(monkeypatch: pytest.MonkeyPatch):
    made, of = list[PendingRows](), PendingRows.of

    def noting(*given: Any) -> PendingRows:
        made.append(of(*given))
        return made[-1]

    monkeypatch.setattr(PendingRows, "of", noting)
    run = Run(4, max_factor=24).steps(5)  # of the head's 32 outputs
    heads = [one for one in made if one.seen.G is None]
    assert len(heads) == 1
    assert heads[0].seen.A is not None
    assert all(one.seen.A is not None for one in made)
    assert_same(run.steps(5), Run(1, max_factor=24).steps(10))


def test_rows_are_let_go_after_their_turn():
    run = Run(4).steps(5)
    kept = [
        weakref.ref(layer.x)
        for stack in run.opt._stacks or []
        for share in stack.memory.get(PENDING, [])
        for layer in share.seen.G.layers
    ]
    assert kept
    assert all(x() is not None for x in kept)
    run.steps(3)
    assert all(x() is None for x in kept)


def test_rows_that_somebody_writes_over_are_left_out_and_counted():
    run = Run(4).steps(5)
    head = next(stack for stack in run.opt._stacks or [] if stack.specs[0].name == "head")
    if not head.memory.get(PENDING):
        head = next(stack for stack in run.opt._stacks or [] if stack.memory.get(PENDING))
    share, before = head.memory[PENDING][0], head.state["Q"].mean.clone()
    share.seen.A.layers[0].x.zero_()  # as `hidden[done] = 0` would
    assert run.opt.health().skipped_statistics == len(share.seen.known)
    groups = share.groups
    torch.testing.assert_close(head.state["Q"].mean[groups], before[groups], rtol=0, atol=0)
    run.steps(4)
    assert not head.memory.get(PENDING)  # from then on at once
    assert not torch.equal(head.state["Q"].mean[groups], before[groups])


def test_who_defers():
    assert DeferredStatistics.of(None, 10, by_itself=True, alone=True).over == 10
    assert DeferredStatistics.of(None, 10, by_itself=False, alone=True).over == 1
    assert DeferredStatistics.of(3, 10, by_itself=False, alone=True).over == 3
    assert DeferredStatistics.of(30, 10, by_itself=False, alone=True).over == 10
    assert DeferredStatistics.of(3, 10, by_itself=True, alone=False).over == 1
    assert Run(None).steps(5).waiting() == 0  # on a CPU, unless asked
    with pytest.raises(InputError, match="statistics_over=0"):
        Run(0)


def test_rules_that_read_factors_between_refreshes_do_not_defer():
    """`LocoProp` reads its factor in its own way; roots that are kept as a basis read factors at every step."""
    torch.manual_seed(0)
    options = {"factor_every": 4, "refresh_every": 4, "statistics_over": 4}
    for make in (lw.optim.LocoProp, lambda model, **given: Layerwise(model, power=0.5, solver="products", **given)):
        run = Run(4)
        run.model = Net()
        run.opt = make(run.model, **options)
        assert run.steps(5).waiting() == 0


def test_factors_of_all_groups_are_not_narrowed():
    run = Run(4).steps(5)
    stack = max(run.opt._stacks or [], key=lambda stack: stack.groups)
    Q = stack.state["Q"]
    assert deferred_statistics._narrowed(Q, slice(0, stack.groups)) is Q
    one = deferred_statistics._narrowed(Q, slice(1, 2))
    assert len(one.mean) == len(one.count) == 1
    assert one.mean.data_ptr() == Q.mean[1:].data_ptr()
