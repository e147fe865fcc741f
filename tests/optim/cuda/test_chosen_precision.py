"""`Execution.precision`: asked for, or by the bits that the first gradients carry."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from optim_tools import flat
from torch import Tensor, nn

import layerwise as lw
from layerwise.foundations.errors import InputError
from layerwise.optim.cuda.backend import CudaBackend
from layerwise.optim.cuda.precision import are_half
from layerwise.optim.engine import Layerwise
from layerwise.optim.options import Execution
from random_tensors import randn

pytestmark = pytest.mark.usefixtures("untyped")


@pytest.fixture
def asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))


def rounded(X: Tensor, dtype: torch.dtype) -> Tensor:
    return X.to(dtype).float()


# --- bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_by_type_or_by_value(dtype: torch.dtype):
    X, Y = randn(5, 3), randn(4, seed=1)
    assert are_half([X.to(dtype), Y.to(dtype)])
    assert are_half([rounded(X, dtype), rounded(Y, dtype)])
    assert are_half([rounded(X, dtype), Y.to(dtype)])
    assert are_half(grad for grad in [rounded(X, dtype)])


def test_single_precision_of_one_entry_alone():
    X, Y = rounded(randn(5, 3), torch.bfloat16), rounded(randn(400, seed=1), torch.bfloat16)
    Y[399] = 1 / 3
    assert not are_half([X, Y])
    assert not are_half([Y])
    assert not are_half([randn(3).double()])


def test_two_half_types_are_not_one():
    """Numbers of bfloat16 in one tensor and of float16 in another: no type holds both."""
    large, fine = torch.tensor([2.0**100]), torch.tensor([1.0 + 2.0**-10])
    assert are_half([large])
    assert are_half([fine])
    assert not are_half([large, fine])


def test_no_gradient_and_sparse_ones():
    assert not are_half([])
    X = torch.sparse_coo_tensor([[1, 1]], torch.tensor([[1.0, 2.0], [0.5, 0.25]]), (4, 2), check_invariants=True)
    assert are_half([X])
    assert not are_half([X / 7])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_says_nothing_of_the_others(value: float):
    X = randn(5, 3)
    X[2, 1] = value
    assert not are_half([X])


# --- the choice -----------------------------------------------------------------------------------------------


def test_what_can_be_asked_for():
    assert Execution().precision == "auto"
    assert [Execution(precision=name).precision for name in ("auto", "high", "half")] == ["auto", "high", "half"]
    with pytest.raises(InputError, match="precision"):
        Execution(precision="low")


def net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def exactly(grad: Tensor) -> Tensor:
    return grad


def bfloat16(grad: Tensor) -> Tensor:
    """As autocast leaves it."""
    return rounded(grad, torch.bfloat16)


def train(opt: Layerwise, model: nn.Module, steps: range, edit: Callable[[Tensor], Tensor] = exactly) -> None:
    for step in steps:
        opt.zero_grad()
        (model(randn(16, 6, seed=step)) - randn(16, 3, seed=100 + step)).square().mean().backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad = edit(p.grad)
        opt.step()


def kfac(model: nn.Module, **options: str) -> Layerwise:
    return lw.optim.KFAC(model, lr=0.01, refresh_every=1, solver="newton", estimator="empirical", **options)


def precisions(opt: Layerwise) -> set[str]:
    """Of the backends of all stacks."""
    found = set[str]()
    for stack in opt._stacks or []:
        assert isinstance(stack.backend, CudaBackend)
        found.add(stack.backend.precision)
    return found


@pytest.mark.parametrize(("edit", "chosen"), [(exactly, "high"), (bfloat16, "half")])
@pytest.mark.usefixtures("asynchronous")
def test_the_first_gradients_choose(edit: Callable[[Tensor], Tensor], chosen: str):
    model = net()
    opt = kfac(model)
    assert opt._precision is None
    train(opt, model, range(1), edit)
    assert opt._precision == chosen
    assert precisions(opt) == {chosen}
    others = exactly if edit is bfloat16 else bfloat16
    train(opt, model, range(1, 3), others)
    assert precisions(opt) == {chosen}


@pytest.mark.usefixtures("asynchronous")
def test_autocast_is_recognised():
    model = net()
    opt = kfac(model)
    with torch.autocast("cpu", torch.bfloat16):
        f = model(randn(16, 6))
    (f.float() - randn(16, 3, seed=1)).square().mean().backward()
    opt.step()
    assert opt._precision == "half"


@pytest.mark.parametrize("asked", ["high", "half"])
@pytest.mark.parametrize("edit", [exactly, bfloat16])
@pytest.mark.usefixtures("asynchronous")
def test_what_is_asked_for_wins(asked: str, edit: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch):
    """And gradients are not looked at."""
    monkeypatch.setattr("layerwise.optim.cuda.precision.are_half", lambda grads: pytest.fail("looked at gradients"))
    model = net()
    opt = kfac(model, precision=asked)
    train(opt, model, range(1), edit)
    assert precisions(opt) == {asked}


@pytest.mark.usefixtures("asynchronous")
def test_gradients_of_the_fallback_do_not_choose():
    model = net()
    opt = lw.optim.KFAC(model, lr=0.01, solver="newton", estimator="empirical", overrides={"2": {"update": "fallback"}})
    train(opt, model, range(1), lambda grad: grad if grad.shape[0] == 3 else bfloat16(grad))
    assert opt._precision == "half"


def test_on_a_cpu_nobody_chooses():
    """Where "newton" is asked for there, products have 22 bits as before."""
    model = net()
    opt = kfac(model)
    train(opt, model, range(1), bfloat16)
    assert opt._precision is None
    (stack, *_) = opt._stacks or []
    assert isinstance(stack.backend, CudaBackend)
    other = net()
    same = kfac(other, precision="high")
    train(same, other, range(1), bfloat16)
    assert torch.equal(flat(model), flat(other))


@pytest.mark.parametrize(("edit", "same_as"), [(exactly, "high"), (bfloat16, "half")])
@pytest.mark.usefixtures("asynchronous")
def test_steps_are_those_of_what_was_chosen(edit: Callable[[Tensor], Tensor], same_as: str):
    ends = {}
    for name in ("auto", "high", "half"):
        model = net()
        train(kfac(model, precision=name), model, range(4), edit)
        ends[name] = flat(model)
    assert torch.equal(ends["auto"], ends[same_as])
    assert not torch.equal(ends["high"], ends["half"])


# --- saved and loaded ---------------------------------------------------------------------------------------------


def foof(model: nn.Module) -> Layerwise:
    """Which resumes without any number of the batch before."""
    return lw.optim.FOOF(model, lr=0.01, refresh_every=1, solver="newton")


@pytest.mark.parametrize("how", ["pickle", "copy"])
@pytest.mark.parametrize(("edit", "chosen"), [(exactly, "high"), (bfloat16, "half")])
@pytest.mark.usefixtures("asynchronous")
def test_a_copy_keeps_the_choice(how: str, edit: Callable[[Tensor], Tensor], chosen: str):
    model = net()
    opt = foof(model)
    train(opt, model, range(3), edit)
    twin = pickle.loads(pickle.dumps(opt)) if how == "pickle" else copy.deepcopy(opt)
    assert twin._precision == chosen
    others = exactly if edit is bfloat16 else bfloat16  # whose bits would choose otherwise
    train(twin, twin.model, range(3, 5), others)
    assert precisions(twin) == {chosen}
    train(opt, model, range(3, 5), others)
    assert float((flat(twin.model) - flat(model)).norm()) < 1e-3 * float((flat(model) - flat(net())).norm())


@pytest.mark.parametrize(("edit", "chosen"), [(exactly, "high"), (bfloat16, "half")])
@pytest.mark.usefixtures("asynchronous")
def test_a_checkpoint_leaves_the_choice_to_the_first_gradients_after_it(edit: Callable[[Tensor], Tensor], chosen: str):
    model, other = net(), net()
    opt, resumed = foof(model), foof(other)
    train(opt, model, range(3), edit)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["opt"])
    assert resumed._precision is None
    train(resumed, other, range(3, 5), edit)
    assert precisions(resumed) == {chosen}
    train(opt, model, range(3, 5), edit)
    assert float((flat(other) - flat(model)).norm()) < 1e-3 * float((flat(model) - flat(net())).norm())
