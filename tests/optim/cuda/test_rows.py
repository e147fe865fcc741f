"""Rows that are kept for the step, by torch on the CPU: the same means as from moments made in the backward."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.optim.cuda import factor, rows
from layerwise.optim.cuda.device_step import DeviceStep
from layerwise.optim.cuda.factor import DeviceFactor
from layerwise.optim.cuda.rows import Rows, StackRows, average_rows_, together
from layerwise.optim.engine import Layerwise
from layerwise.optim.rule import Context, Health
from layerwise.optim.statistics.accumulate import Accumulator, Sums
from random_tensors import randn


def context_of(finite: bool | None = None) -> Context:
    """Of an eager step, or of one whose gradients are finite or not as only the device knows."""
    step = None if finite is None else DeviceStep(torch.tensor(finite))
    return Context(1, 0.0, 0.0, True, {}, health=Health(on_device=step is not None), device_step=step)


def stack_of(X: list[Tensor], bias: bool = False) -> StackRows:
    found = together([Rows(x, torch.bfloat16, 4.0 if not bias else 1.0, bias) for x in X], [40] * len(X))
    assert found is not None
    return found


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("finite", [None, True, False])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_the_same_as_moments(bias: bool, finite: bool | None, kind: torch.dtype):
    X = [randn(4, 10, 16, seed=k).to(kind) for k in range(3)]
    X[1][2, 3, 4] = torch.inf
    found, expected = (randn(3, 16 + bias, 16 + bias, seed=7) for _ in range(2))
    before = found.clone()
    counts = [torch.tensor([0.0, 1.0, 2.0]) for _ in range(2)]
    contexts = [context_of(finite) for _ in range(2)]
    stack = stack_of(X, bias)
    average_rows_(found, counts[0], stack, 0.9, contexts[0])
    moments = torch.cat([layer.moment() for layer in stack.layers]) / stack.count
    DeviceFactor("Q", expected, counts[1], 16 + bias).update_(moments, 0.9, contexts[1])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(counts[0], counts[1])
    assert torch.equal(found[1], before[1])
    for context in contexts:
        context.health.settle()
    assert [context.health.skipped_statistics for context in contexts] == [finite is not False] * 2


def test_squares_that_overflow_are_left_out():
    X = [torch.ones(40, 16).bfloat16(), torch.full((40, 16), 1e20).bfloat16()]
    mean, count, context = torch.zeros(2, 16, 16), torch.zeros(2), context_of()
    average_rows_(mean, count, stack_of(X), 0.9, context)
    assert count.tolist() == [1, 0]
    assert not mean[1].any()
    assert context.health.skipped_statistics == 1


def test_only_layers_alike_go_together():
    one = Rows(torch.ones(4, 16).half(), torch.float16)
    assert together([one, one], [4, 4]) is not None
    assert together([one, one], [4, 5]) is None
    assert together([one, None], [4, 4]) is None
    assert together([None, one], [4, 4]) is None
    for other in (
        Rows(torch.ones(5, 16).half(), torch.float16),
        Rows(torch.ones(4, 16), torch.float16),
        Rows(torch.ones(4, 16).half(), torch.float16, 2.0),
        Rows(torch.ones(4, 16).half(), torch.float16, 1.0, True),
    ):
        assert together([one, other], [4, 4]) is None
    across = Rows(torch.ones(16, 16).half().mT, torch.float16)
    assert together([across, across], [16, 16]) is None


# --- the loss's scale -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.37, 250.0])
def test_rescaled_by_a_number_on_the_device(factor: float):
    """As by the host's number: moments and rows of output gradients, not those of inputs."""
    found, expected = (
        Sums(randn(1, 16, 16), 40, randn(1, 8, 8, seed=1), 40, [], Rows(randn(40, 16).bfloat16(), torch.bfloat16),
             Rows(randn(40, 8, seed=2).bfloat16(), torch.bfloat16, 4.0))
        for _ in range(2)
    )  # fmt: skip
    found.rescale_by(torch.tensor(factor**2, dtype=torch.float64))
    expected.rescale(factor)
    for name in ("A", "G"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-6, atol=0)
    for name in ("inputs", "outgrads"):
        torch.testing.assert_close(
            getattr(found, name).moment(), getattr(expected, name).moment(), rtol=1e-6, atol=1e-6
        )
    assert found.G is not None
    assert found.G.dtype == torch.float32
    assert not torch.allclose(found.G, randn(1, 8, 8, seed=1))
    means, counts = [randn(1, 8, 8, seed=7) for _ in range(2)], [torch.ones(1) for _ in range(2)]
    for sums, mean, count in zip((found, expected), means, counts, strict=True):
        stack = together([sums.outgrads], [40])
        assert stack is not None
        average_rows_(mean, count, stack, 0.9, context_of())
    torch.testing.assert_close(*means, rtol=1e-5, atol=1e-6 * factor**2)
    assert not torch.allclose(means[0], randn(1, 8, 8, seed=7))


class Residual(nn.Module):
    """Blocks with a norm before their linear layers, whose inputs are of single precision under autocast."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.linears = nn.ModuleList(nn.Linear(16, 16, bias=i > 0) for i in range(3))
        self.head = nn.Linear(16, 4)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + linear(norm(x))
        return self.head(self.linears[1](x) if self.shared else x)


def train(
    model: nn.Module, steps: int = 3, batches: int = 1, member: Any = lw.optim.KFAC, **options: Any
) -> tuple[lw.optim.Layerwise, list[Tensor]]:
    opt = member(
        model, scale="formula", lr=0.01, overrides={"head": {"update": "fallback"}}, accumulate=batches, **options
    )
    x = torch.empty(6, 8)
    for step in range(steps):
        opt.zero_grad()
        for b in range(batches):
            x.copy_(randn(6, 8, seed=10 * step + b))  # one tensor for every batch: the first layer's own input
            with torch.autocast("cpu", torch.bfloat16):
                f = model(x)
            (f.float().square().sum(1).mean() / batches).backward()
        opt.step()
    return opt, [p.detach().clone() for p in model.parameters()]


@pytest.fixture
def kept_rows(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """As on a GPU: rows are kept for the step. Counts what is asked for."""
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))
    calls = {"kept": 0, "again": 0, "averaged": 0}
    keep, again, average = rows.Rows.of_inputs, Accumulator.add_rows, rows.average_rows_

    def kept(io):
        calls["kept"] += 1
        return keep(io)

    def add_rows(*args):
        found = again(*args)
        calls["again"] += found
        return found

    def averaged(*args):
        calls["averaged"] += 1
        average(*args)

    monkeypatch.setattr(rows, "waits_for_step", rows.has_plain_rows)
    monkeypatch.setattr(rows.Rows, "of_inputs", staticmethod(kept))
    monkeypatch.setattr(Accumulator, "add_rows", add_rows)
    monkeypatch.setattr(factor, "average_rows_", averaged)
    return calls


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)  # inputs in bfloat16 here, in float32 there


def test_training_with_rows_kept_for_the_step(kept_rows: dict[str, int]):
    model = Residual()
    plain = copy.deepcopy(model)
    _, found = train(model)
    # Three linear layers after a norm, of which two have one shape; the first layer's input is the user's own.
    assert kept_rows == {"kept": 3, "again": 6, "averaged": 12}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "waits_for_step", lambda io: False)
        _, expected = train(plain)
    assert kept_rows["kept"] == 3
    assert_close(found, expected)


def test_examples_are_recorded_as_before_where_rows_are_kept_again(kept_rows: dict[str, int]):
    """EKFAC's; the first batch tells what of a call is always the same."""
    models = [Residual() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    _, found = train(models[0], member=lw.optim.EKFAC)
    assert kept_rows["again"] == 6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Accumulator, "add_rows", lambda *_: False)
        _, expected = train(models[1], member=lw.optim.EKFAC)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("case", ["accumulate", "shared", "reduce"])
def test_what_is_not_kept(kept_rows: dict[str, int], case: str):
    model = Residual(shared=case == "shared")
    plain = copy.deepcopy(model)
    options = {"batches": 2} if case == "accumulate" else {"sharing": "reduce"} if case == "reduce" else {}
    _, found = train(model, **options)
    if case == "reduce":
        assert kept_rows["kept"] == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "waits_for_step", lambda io: False)
        _, expected = train(plain, **options)
    assert_close(found, expected)


def test_layers_that_the_rule_does_not_treat_are_not_recorded():
    model = Residual()
    opt, _ = train(model, steps=1)
    capture = opt._capture
    assert capture is not None
    tape = capture._tape(6)
    assert [spec.name for spec in tape.table.layers] == ["first", "linears.0", "linears.1", "linears.2"]
    capture.look_again(opt.table)
    assert not capture._unwanted


def test_a_tape_that_listens_holds_no_graph():
    model = Residual()
    opt = lw.optim.KFAC(model, scale="formula")
    f = model(randn(6, 8))
    tape = opt._capture._pending[0].tape
    assert all(event.edge is None and event.live for event in tape.events)
    assert [event.lent for event in tape.events] == [True] + [False] * (len(tape.events) - 1)
    f.sum().backward()
    opt.step()


def test_gradients_in_between_do_not_count(kept_rows: dict[str, int]):
    """A backward that is thrown away, an evaluation, and a forward without a backward."""
    model = Residual()
    plain = copy.deepcopy(model)
    results = []
    for kept, m in ((True, model), (False, plain)):
        with pytest.MonkeyPatch.context() as patch:
            if not kept:
                patch.setattr(rows, "waits_for_step", lambda io: False)
            opt = lw.optim.KFAC(m, lr=0.01, scale="formula")
            for step in range(3):
                for discarded in (True, False):
                    opt.zero_grad()
                    with torch.autocast("cpu", torch.bfloat16):
                        f = m(randn(6, 8, seed=step + 5 * discarded))
                        f.float().square().sum(1).mean().backward()
                        m(randn(2, 8))
                        m.eval()
                        m(randn(5, 8)).float().sum().backward() if discarded else None
                        m.train()
                opt.step()
            results.append([p.detach().clone() for p in m.parameters()])
    assert_close(*results)


def trained_by(scale: float) -> tuple[Layerwise, list[Tensor]]:
    """Empirical statistics of a loss times a number, with updates of Adam's size, which do not depend on it."""
    torch.manual_seed(0)
    model = Residual()
    opt = lw.optim.KFAC(model, lr=0.01, estimator="empirical", factor_every=1, refresh_every=2, solver="products")
    for step in range(6):
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            f = model(randn(6, 8, seed=step))
        (scale * f.float().square().sum(1).mean()).backward()
        opt.step()
    return opt, [p.detach().clone() for p in model.parameters()]


def test_the_scale_of_the_loss_is_taken_out_on_the_device(kept_rows: dict[str, int], monkeypatch: pytest.MonkeyPatch):
    """Trainings are those with the number that a host would have read, whatever the loss is multiplied by."""
    called = []
    own = Sums.rescale_by
    monkeypatch.setattr(Sums, "rescale_by", lambda sums, squared: called.append(squared) or own(sums, squared))
    _, found = trained_by(1.0)
    assert kept_rows["averaged"] > 0
    assert called
    _, larger = trained_by(2.0**12)
    monkeypatch.setattr(Sums, "rescale_by", lambda sums, squared: sums.rescale(float(squared) ** 0.5))
    _, by_host = trained_by(1.0)
    torch.manual_seed(0)
    way = torch.cat([(a - p.detach()).flatten() for a, p in zip(found, Residual().parameters(), strict=True)]).norm()
    for others in (larger, by_host):
        apart = torch.cat([(a - b).flatten() for a, b in zip(found, others, strict=True)]).norm()
        assert float(apart) < 1e-3 * float(way)
