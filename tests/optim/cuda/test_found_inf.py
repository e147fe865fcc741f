"""Asynchronous steps are the same as eager ones, ask the device for nothing, and change nothing where a gradient is not
finite."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from optim_tools import Batch, batches, flat, squares
from optim_tools import member as any_member
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import layerwise as lw
from layerwise.optim.engine import Layerwise
from layerwise.optim.rule import kept
from thinning import thinned

pytestmark = pytest.mark.usefixtures("untyped")
NAMES = (
    "SGD",
    "Adam",
    "KFAC",
    "KFAC exact split",
    "KFAC sampled",
    "EKFAC",
    "EKFAC running",
    "FOOF",
    "LocoProp",
    "NGD",
    "Shampoo",
    "SOAP",
    "Muon",
    "MahalanobisSpectral",
    "Layerwise",
)
DATA = batches(24, 5)
DTYPES = (torch.float32, torch.float64)
BOTH = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
ONE_EACH = pytest.mark.parametrize(("name", "dtype"), thinned(NAMES, DTYPES))
Edit = Callable[[nn.Sequential, int], None]


def member(name: str, model: nn.Module, **options: Any) -> Layerwise:
    opt = any_member(name, model, **options)
    assert isinstance(opt, Layerwise)
    return opt


@pytest.fixture
def asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))


def net(dtype: torch.dtype) -> nn.Sequential:
    """Three layers of one shape, one of another, and a vector of slopes, which gets the fallback's update."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        parts = [part for _ in range(3) for part in (nn.Linear(5, 5), nn.Tanh())]
        return nn.Sequential(*parts, nn.PReLU(5), nn.Linear(5, 3)).to(dtype)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of full rank everywhere: where a gradient has no part, SOAP divides rounding by rounding."""
    dtype = next(model.parameters()).dtype
    return squares(model(x.to(dtype)).double(), y)


def keep_gradients(model: nn.Sequential, step: int) -> None:
    """Nothing is changed between backward and step."""


def train(
    opt: torch.optim.Optimizer, model: nn.Sequential, data: list[Batch], edit: Edit = keep_gradients, start: int = 0
) -> None:
    for step, (x, y) in enumerate(data, start):
        opt.zero_grad()
        loss_of(model, x, y).backward()
        edit(model, step)
        opt.step()


def moved(dtype: torch.dtype, make: Callable[[nn.Sequential], Layerwise], edit: Edit = keep_gradients):
    """Parameters after five steps, and where they began."""
    model = net(dtype)
    start = flat(model)
    train(make(model), model, DATA[:5], edit)
    return flat(model), start


def assert_alike(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    make: Callable[[nn.Sequential], Layerwise],
    edit: Edit = keep_gradients,
    tol: float | None = None,
) -> None:
    """Eager and asynchronous steps: within 1e-9 of the way gone in float64, 1e-3 in float32."""
    expected, start = moved(dtype, make, edit)
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))
    found, _ = moved(dtype, make, edit)
    way = float((expected - start).norm())
    assert way > 1e-3
    assert float((found - expected).norm()) <= (tol or (1e-9 if dtype == torch.float64 else 1e-3)) * way


# --- the same steps ----------------------------------------------------------------------------------------


@ONE_EACH
def test_asynchronous_steps_are_the_same(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """With decay, momentum, Nesterov and a group of its own."""
    options: dict[str, Any] = {"weight_decay": 0.1, "overrides": {"2": {"lr": 0.02, "weight_decay": 0.01}}}
    if name != "NGD":
        options |= {"refresh_every": 1}
    if name not in ("SOAP", "Muon"):
        options |= {"momentum": 0.8, "nesterov": True}
    assert_alike(monkeypatch, dtype, lambda model: member(name, model, **options))


EXTRAS = {
    "graft adam": {"graft": "adam"},
    "graft gradient": {"graft": "gradient"},
    "clip kl": {"clip": 1e-4},
    "clip norm": {"clip": ("norm", 0.1)},
    "absolute damping": {"damping": 1e-2, "damping_scale": "absolute"},
    "a schedule of damping": {"damping": lambda step: 0.1 / step},
    "fallback sgd": {"update_fallback": "sgd", "fallback_lr": 0.1},
    "momentum of two groups": {"momentum": 0.9, "overrides": {"2": {"momentum": 0.0}, "7": {"update": "fallback"}}},
    "seldom statistics": {"factor_every": 3},
}


@pytest.mark.parametrize(("name", "extra", "dtype"), thinned(["KFAC", "Shampoo"], EXTRAS, DTYPES))
def test_options_do_the_same(name: str, extra: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    options = {"refresh_every": 1, **EXTRAS[extra]}
    assert_alike(monkeypatch, dtype, lambda model: member(name, model, **options))


@pytest.mark.parametrize(("name", "clip", "dtype"), thinned(["Muon", "SOAP", "Adam"], [1e-4, ("norm", 0.1)], DTYPES))
def test_clipping_of_the_others(name: str, clip: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    options = {"clip": clip} if name == "Adam" else {"clip": clip, "refresh_every": 1}
    assert_alike(monkeypatch, dtype, lambda model: member(name, model, **options))


def drop(model: nn.Sequential, step: int) -> None:
    """One layer of three has no gradient in steps 1, 3 and 4; in step 3 another has none either."""
    for at, layer in ((1, 2), (3, 2), (3, 4), (4, 2)):
        if step == at:
            for p in model[layer].parameters():
                p.grad = None


@ONE_EACH
def test_a_layer_without_gradient(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    options: dict[str, Any] = {"weight_decay": 0.1}
    if name != "NGD":
        options |= {"refresh_every": 1}
    if name not in ("SOAP", "Muon"):
        options |= {"momentum": 0.8}
    assert_alike(monkeypatch, dtype, lambda model: member(name, model, **options), drop)


@BOTH
def test_adaptive_damping(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    def ran() -> tuple[Tensor, float]:
        model = net(dtype)
        opt = lw.optim.KFAC(model, lr=0.05, damping="adaptive", refresh_every=1, scale="formula")
        for x, y in DATA[:7]:

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                opt.zero_grad()
                loss = loss_of(model, x, y)
                loss.backward()
                return loss

            opt.step(closure)
        return flat(model), float(opt.param_groups[0]["damping"])

    expected, damping = ran()
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))
    found, other = ran()
    assert other == pytest.approx(damping)
    assert float((found - expected).norm()) < 1e-4


# --- a gradient that is not finite ---------------------------------------------------------------------------


def tensors(opt: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{layer}.{name}": value.clone()
        for of_param in opt.state_dict()["state"].values()
        for layer, of_layer in of_param.items()
        for name, value in of_layer.items()
    }


def spoil(value: float) -> Edit:
    """One number of one gradient; the other layers' gradients are sound."""

    def edit(model: nn.Sequential, step: int) -> None:
        grad = model[2].weight.grad
        assert isinstance(grad, Tensor)
        grad[1, 2] = value

    return edit


def options_for(name: str, **options: Any) -> dict[str, Any]:
    """Momentum for all that have none of their own; NGD is refreshed at every step anyway."""
    own = name in ("SOAP", "Muon")
    return {**({} if name == "NGD" else options), **({} if own else {"momentum": 0.8}), "weight_decay": 0.1}


def changed(opt: torch.optim.Optimizer, before: dict[str, Tensor]) -> set[str]:
    after = tensors(opt)
    assert set(after) == set(before)
    return {key for key in after if not torch.equal(after[key], before[key])}


SOLVED = [(name, "auto") for name in NAMES]
SOLVED += [(name, "products") for name in ("KFAC", "EKFAC", "EKFAC running", "FOOF", "Shampoo", "SOAP")]


@pytest.mark.parametrize(
    ("solved", "bad"), thinned(SOLVED, [(float("nan"), torch.float32), (float("inf"), torch.float64)])
)
def test_nothing_moves_where_a_gradient_is_not_finite(
    solved: tuple[str, str], bad: tuple[float, torch.dtype], asynchronous: None
):
    """Bit for bit, with momentum and decay: parameters and every state tensor, at a step when no refresh is due."""
    (name, solver), (value, dtype) = solved, bad
    model = net(dtype)
    extra = {} if solver == "auto" else {"solver": solver}
    opt = member(name, model, **options_for(name, refresh_every=100, factor_every=1, **extra))
    train(opt, model, DATA[:8])
    before, state = flat(model), tensors(opt)
    for step in (8, 9):
        train(opt, model, DATA[step : step + 1], spoil(value))
        assert torch.equal(flat(model), before)
        assert changed(opt, state) == set()
    assert opt.health().skipped_steps == 2
    train(opt, model, DATA[10:12])
    assert bool(torch.isfinite(flat(model)).all())
    assert not torch.equal(flat(model), before)
    assert opt.health().skipped_steps == 2


def renewed_names(opt: Layerwise) -> set[str]:
    """Of the tensors that a refresh renews: roots and bases, and what the rule says."""
    stacks = [stack for stack in opt._stacks or [] if stack.rule is opt.rule]
    found = {name for stack in stacks for entry in kept(stack.state) if entry.renewed for name in entry.saved()}
    return found | {*opt.rule.requirements().renewed}


@pytest.mark.parametrize("dtype", [torch.float32])
@pytest.mark.parametrize(("name", "solver"), SOLVED)
def test_where_a_gradient_is_not_finite_only_decompositions_are_renewed(
    name: str, solver: str, dtype: torch.dtype, asynchronous: None
):
    """The host does not know of it, and refreshes whose turn it is: from statistics that stay as they are."""
    model = net(dtype)
    extra = {} if solver == "auto" else {"solver": solver}
    opt = member(name, model, **options_for(name, refresh_every=1, factor_every=1, **extra))
    train(opt, model, DATA[:5])
    before, state = flat(model), tensors(opt)
    train(opt, model, DATA[5:6], spoil(float("nan")))
    assert torch.equal(flat(model), before)
    assert isinstance(opt, Layerwise)
    names = {key.split(".")[1].removesuffix("_sweeps") for key in changed(opt, state)}
    assert names <= renewed_names(opt)
    assert all(bool(torch.isfinite(value).all()) for value in tensors(opt).values())
    assert opt.health().skipped_steps == 1


@pytest.mark.parametrize("dtype", [torch.float32])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "KFAC sampled"])  # labels numbered by forwards
def test_a_bad_step_is_as_if_it_had_not_been(name: str, dtype: torch.dtype, asynchronous: None):
    """Without it the parameters come out the same; SOAP's basis has turned a little further meanwhile."""
    options = options_for(name, refresh_every=1, factor_every=1)
    model, other = net(dtype), net(dtype)
    opt, plain = member(name, model, **options), member(name, other, **options)
    for part, edit in ((DATA[:4], keep_gradients), (DATA[4:6], spoil(float("nan"))), (DATA[6:10], keep_gradients)):
        train(opt, model, part, edit)
    train(plain, other, DATA[:4] + DATA[6:10])
    assert opt.health().skipped_steps == 2
    tol = 1e-1 if name == "SOAP" else 1e-9 if dtype == torch.float64 else 1e-3
    assert float((flat(model) - flat(other)).norm()) < tol * float((flat(model) - flat(net(dtype))).norm())


@pytest.mark.parametrize("name", ["KFAC", "EKFAC", "EKFAC running", "FOOF", "Shampoo", "SOAP"])
def test_asynchronous_steps_by_products_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch):
    """A basis begins with eigh, also where a refresh came before there were factors (SOAP)."""
    options: dict[str, Any] = {"refresh_every": 1, "solver": "products"}
    tol = 0.1 if name == "SOAP" else 1e-2
    assert_alike(monkeypatch, torch.float32, lambda model: member(name, model, **options), tol=tol)


@pytest.mark.parametrize(("name", "every", "dtype"), thinned(NAMES, [1, 2], DTYPES))
def test_a_bad_first_step(name: str, every: int, dtype: torch.dtype, asynchronous: None):
    """Afterwards everything is as if it had not been; with few refreshes at least sound."""
    options: dict[str, Any] = {} if name == "NGD" else {"refresh_every": every, "factor_every": 1}
    model, other = net(dtype), net(dtype)
    opt, plain = member(name, model, **options), member(name, other, **options)
    start = flat(model)
    train(opt, model, DATA[:1], spoil(float("nan")))
    assert torch.equal(flat(model), start)
    assert opt.health().skipped_steps == 1
    train(opt, model, DATA[1:6])
    train(plain, other, DATA[1:6])
    assert opt.health().skipped_steps == 1
    way = float((flat(other) - start).norm())
    assert bool(torch.isfinite(flat(model)).all())
    if name != "Layerwise":  # whose steps here are large, and refreshed at other steps go elsewhere
        assert float((flat(model) - start).norm()) < 5 * way
    if every == 1 and name != "KFAC sampled":
        assert float((flat(model) - flat(other)).norm()) < (1e-9 if dtype == torch.float64 else 1e-3) * way


@pytest.mark.parametrize("solver", ["auto", "products"])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", ["KFAC", "EKFAC", "EKFAC running"])
def test_bad_statistics_alone(name: str, steps: int, solver: str, asynchronous: None):
    """A layer's output gradients are not finite, its parameters' gradients are: the last good factors stay."""
    model = net(torch.float32)
    opt = member(name, model, solver=solver)
    train(opt, model, DATA[:steps])
    x, y = DATA[3]
    opt.zero_grad()
    infinite = model[2].register_forward_hook(
        lambda m, a, out: out.register_hook(lambda g: g * float("inf")) and None if out.requires_grad else None
    )
    loss_of(model, x, y).backward()
    infinite.remove()
    fine = copy.deepcopy(model)
    fine.zero_grad()
    loss_of(fine, x, y).backward()
    for p, q in zip(model.parameters(), fine.parameters(), strict=True):
        assert q.grad is not None
        p.grad = q.grad.clone()
    opt.step()
    train(opt, model, DATA[4:6])
    assert bool(torch.isfinite(flat(model)).all())
    assert float((flat(model) - flat(net(torch.float32))).norm()) < 10
    assert all(bool(torch.isfinite(value).all()) for value in tensors(opt).values())
    assert opt.health().skipped_steps == 0
    assert opt.health().skipped_statistics > 0


# --- no synchronization --------------------------------------------------------------------------------------

ASKS = {
    "_local_scalar_dense": "item(), bool(), int() or float() of a tensor",
    "nonzero": "nonzero",
    "masked_select": "masked_select",
    "equal": "torch.equal",
    "_linalg_eigh": "eigh, which on a GPU reads its flags",
    "_linalg_svd": "svd, likewise",
    "unique_dim": "unique",
}


class Unasked(TorchDispatchMode):
    """Raises where the host would ask a GPU for a value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ASKS, f"the device is asked: {ASKS[name]}"
        if name in ("index", "index_put", "index_put_"):
            assert not any(t is not None and t.dtype == torch.bool for t in args[1]), "an index of booleans"
        return func(*args, **(kwargs or {}))


@contextmanager
def nobody_asks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`Unasked`, and no Tensor.tolist, .cpu, .numpy."""

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("the device is asked: tolist, cpu or numpy")

    with monkeypatch.context() as patch, Unasked():
        for name in ("tolist", "cpu", "numpy"):
            patch.setattr(Tensor, name, refuse)
        yield


STEADY: dict[str, Callable[[nn.Sequential], Layerwise]] = {
    "KFAC": lambda model: lw.optim.KFAC(model, solver="products", scale="formula"),
    "KFAC sampled": lambda model: lw.optim.KFAC(
        model, solver="products", likelihood="categorical", factor_every=2, scale="formula"
    ),
    "KFAC, all options": lambda model: lw.optim.KFAC(
        model,
        solver="products",
        weight_decay=0.1,
        nesterov=True,
        graft="adam",
        overrides={"2": {"lr": 0.01}},
        scale="formula",
    ),
    "EKFAC": lambda model: lw.optim.EKFAC(model, solver="products", scale="formula"),
    "EKFAC running": lambda model: lw.optim.EKFAC(model, solver="products", scaling="running", scale="formula"),
    "FOOF": lambda model: lw.optim.FOOF(model, solver="products", clip=("norm", 1.0), scale="formula"),
    "Shampoo": lambda model: lw.optim.Shampoo(model, solver="products", graft="adam", scale="formula"),
    "SOAP": lambda model: lw.optim.SOAP(model, solver="products", scale="formula"),
    "Muon": lambda model: lw.optim.Muon(model, solver="products", scale="formula"),
    "Adam": lambda model: lw.optim.Adam(model),
}


@pytest.mark.parametrize("name", STEADY)
def test_a_steady_step_asks_the_device_for_nothing(name: str, asynchronous: None, monkeypatch: pytest.MonkeyPatch):
    """Forward, backward and step, from the 13th to the 24th, refreshes among them."""
    model = net(torch.float32)
    opt = STEADY[name](model)
    train(opt, model, DATA[:12])
    before = flat(model)
    with nobody_asks(monkeypatch):
        train(opt, model, DATA[12:])
    assert bool(torch.isfinite(flat(model)).all())
    assert not torch.equal(flat(model), before)


@pytest.mark.parametrize("name", ["KFAC", "SOAP", "Muon"])
def test_a_bad_step_asks_for_nothing_either(name: str, asynchronous: None, monkeypatch: pytest.MonkeyPatch):
    model = net(torch.float32)
    opt = STEADY[name](model)
    train(opt, model, DATA[:12])
    with nobody_asks(monkeypatch):
        train(opt, model, DATA[12:13], spoil(float("nan")))
        train(opt, model, DATA[13:16])
    assert opt.health().skipped_steps == 1


def test_the_test_itself_notices(monkeypatch: pytest.MonkeyPatch):
    x = torch.ones(3)
    for ask in (lambda: x[0].item(), lambda: bool(x[0] > 0), lambda: x[x > 0], lambda: x.nonzero(), lambda: x.tolist()):
        with pytest.raises(AssertionError), nobody_asks(monkeypatch):
            ask()


def test_a_step_without_any_gradient_moves_nothing(asynchronous: None):
    model = net(torch.float32)
    opt = member("Shampoo", model, lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    opt.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_a_layer_that_is_unfrozen_has_statistics_from_then_on():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    opt = lw.optim.KFAC(model, lr=0.01, scale="formula")
    x, y = torch.randn(8, 4), torch.randn(8, 3)
    (model(x) - y).square().mean().backward()
    opt.step()
    model[0].requires_grad_(True)
    opt.add_param_group({"params": list(model[0].parameters())})
    opt.zero_grad()
    (model(x) - y).square().mean().backward()
    opt.step()
    saved = [of_layer for of_param in opt.state_dict()["state"].values() for of_layer in of_param.values()]
    assert all(float(of_layer["Q_count"].min()) > 0 for of_layer in saved)
    assert len(saved) == 2


def test_an_optimizer_that_is_let_go_is_gone_at_once():
    model = nn.Sequential(nn.Linear(4, 3))
    opt = lw.optim.KFAC(model, lr=0.01, scale="formula")
    model(torch.randn(8, 4)).square().mean().backward()
    opt.step()
    reference = weakref.ref(opt)
    gc.disable()
    try:
        del opt
        assert reference() is None
    finally:
        gc.enable()
