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
from layerwise.optim import engine
from layerwise.optim.cuda.backend import CudaBackend
from layerwise.optim.cuda.precision import ENTRIES, TELLING, are_half
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
    """Of those that are looked at: the first that are neither zero nor infinite."""
    X, Y = rounded(randn(5, 3), torch.bfloat16), rounded(randn(400, seed=1), torch.bfloat16)
    Y[ENTRIES - 1] = torch.pi / 10  # not 1/3: three times a number of bfloat16 has no more than 10 bits
    assert not are_half([X, Y])
    assert not are_half([Y])
    assert not are_half([torch.cat([torch.zeros(100), Y])])
    assert not are_half([randn(4).double()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(3))
def test_gradients_that_were_clipped_or_scaled(dtype: torch.dtype, seed: int):
    """By one number, as `clip_grad_norm_` and a gradient scaler do: the bits of a quotient stay. By two they do not."""
    parameters = [nn.Parameter(torch.zeros(40, 30)), nn.Parameter(torch.zeros(40))]
    for place, p in enumerate(parameters):
        p.grad = rounded(randn(*p.shape, seed=10 * seed + place), dtype)
    nn.utils.clip_grad_norm_(parameters, 0.1 + 0.077 * seed)
    grads = [p.grad for p in parameters if p.grad is not None]
    assert are_half(grads)
    assert are_half([grad * 0.7531 for grad in grads])
    assert are_half([grad / 65536.0 for grad in grads])
    assert not are_half([grad + 0.123 * rounded(randn(*grad.shape, seed=5), dtype) for grad in grads])


@pytest.mark.parametrize("seed", range(20))
def test_single_precision_is_not_taken_for_half(seed: int):
    """Also of few entries, which are multiples of some number by chance; of fewer nothing is said."""
    assert not are_half([randn(TELLING, seed=seed)])
    assert not are_half([randn(TELLING - 1, seed=seed)])
    assert are_half([randn(TELLING - 1, seed=seed), rounded(randn(30, seed=seed), torch.bfloat16)])


def test_bits_count_and_not_the_range():
    """Numbers of bfloat16 in one tensor and of float16 in another: each has its own scale."""
    large, fine = randn(20, seed=1).bfloat16().float() * 2.0**100, rounded(randn(20), torch.float16)
    assert are_half([large, fine])
    assert not are_half([large, fine, randn(20, seed=2)])


def test_no_gradient_and_sparse_ones():
    assert not are_half([])
    values = rounded(randn(2, 30), torch.bfloat16)
    X = torch.sparse_coo_tensor([[1, 2]], values, (4, 30), check_invariants=True)
    assert are_half([X])
    assert are_half([X / 7])
    assert not are_half([X + torch.sparse_coo_tensor([[1, 2]], randn(2, 30, seed=1), (4, 30), check_invariants=True)])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_says_nothing_of_the_others(value: float):
    X = randn(5, 3)
    X[2, 1] = X[0, 0] = value
    assert not are_half([X])
    assert are_half([rounded(X, torch.bfloat16)])
    assert not are_half([torch.full((5, 3), value)])


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
    return lw.optim.KFAC(model, lr=0.01, refresh_every=1, solver="products", estimator="empirical", **options)


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
    opt = lw.optim.KFAC(
        model, lr=0.01, solver="products", estimator="empirical", overrides={"2": {"update": "fallback"}}
    )
    train(opt, model, range(1), lambda grad: grad if grad.shape[0] == 3 else bfloat16(grad))
    assert opt._precision == "half"


@pytest.mark.parametrize("first", [0.0, torch.nan, None])
@pytest.mark.parametrize(("edit", "chosen"), [(exactly, "high"), (bfloat16, "half")])
@pytest.mark.usefixtures("asynchronous")
def test_where_the_first_gradients_say_nothing_later_ones_choose(
    first: float | None, edit: Callable[[Tensor], Tensor], chosen: str
):
    """Zeros behind a gate of zero, a batch that overflows, layers that are thawed later."""
    ends = {}
    for name in ("auto", chosen):
        model = net()
        opt = lw.optim.SOAP(model, lr=0.01, refresh_every=1, precision=name)

        def edited(grad: Tensor) -> Tensor:
            return edit(grad) if grad.ndim == 1 or first is None else torch.full_like(grad, first)

        opt.zero_grad()
        if first is None:
            without_matrices(opt, model, edit)
        else:
            train(opt, model, range(2), edited)
        assert opt._precision is None
        train(opt, model, range(2, 6), edit)
        assert precisions(opt) == {chosen}
        ends[name] = flat(model)
    assert float((ends["auto"] - ends[chosen]).norm()) < 1e-3 * float((ends[chosen] - flat(net())).norm())


def without_matrices(opt: Layerwise, model: nn.Module, edit: Callable[[Tensor], Tensor]) -> None:
    """Two steps of the biases alone."""
    for step in range(2):
        for p in model.parameters():
            p.grad = edit(randn(*p.shape, seed=step)) if p.ndim == 1 else None
        opt.step()


@pytest.mark.usefixtures("asynchronous")
def test_gradients_that_never_say_anything_are_asked_so_often(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine, "ASKS", 2)
    model, asked = net(), list[int]()
    opt = lw.optim.SOAP(model, lr=0.01)
    monkeypatch.setattr(
        "layerwise.optim.cuda.precision.are_half", lambda grads: asked.append(opt.steps_taken) if [*grads] else None
    )
    train(opt, model, range(5))
    assert asked == [0, 1, 2]
    assert opt._precision is None


def test_on_a_cpu_nobody_chooses():
    """Where "products" is asked for there, products have 22 bits as before."""
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
    return lw.optim.FOOF(model, lr=0.01, refresh_every=1, solver="products")


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
