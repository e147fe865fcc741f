"""Which forwards and backwards count (architecture §3.7): pending, repeated, accumulated, scaled, left behind."""

import copy
import dataclasses
import gc
import weakref
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optim_tools import MEMBERS, batches, cross_entropy, flat, member, mlp, train_step
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import layerwise as lw
from layerwise.foundations.likelihoods import Categorical
from thinning import thinned

pytestmark = pytest.mark.usefixtures("untyped")
DATA = batches(8, 5)
OBSERVERS = ("KFAC", "KFAC sampled", "EKFAC", "EKFAC running", "FOOF", "LocoProp", "NGD", "MahalanobisSpectral")
OBSERVING = pytest.mark.parametrize("name", OBSERVERS)


def observer(name: str, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """The member with statistics at every step."""
    if name == "KFAC sampled":
        options = {"factor_every": 1, **options}
    return member(name, model, **options)


def factors(opt: torch.optim.Optimizer) -> list[Tensor]:
    found = [t for of_param in opt.state_dict()["state"].values() for t in of_param.values()]
    return [t[k] for t in found for k in ("P", "Q", "P_count", "Q_count") if k in t]


def pair(name: str, **options: Any):
    a, b = mlp(), mlp()
    return a, observer(name, a, **options), b, observer(name, b, **options)


def assert_same(a: nn.Module, b: nn.Module, tol: float = 0.0) -> None:
    assert (flat(a) - flat(b)).abs().max() <= tol


# --- what does not count ----------------------------------------------------------------------------------


def _no_grad(model: nn.Module, x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        model(x)


def _inference(model: nn.Module, x: Tensor, y: Tensor) -> None:
    with torch.inference_mode():
        model(x)


def _eval(model: nn.Module, x: Tensor, y: Tensor) -> None:
    model.eval()
    model(x)
    model.train()


def _eval_and_backward(model: nn.Module, x: Tensor, y: Tensor) -> None:
    model.eval()
    torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
    model.train()


def _never_differentiated(model: nn.Module, x: Tensor, y: Tensor) -> None:
    cross_entropy(model(x), y)


def _kept_but_never_differentiated(model: nn.Module, x: Tensor, y: Tensor) -> None:
    model.kept = [model(x)]


def _fails(model: nn.Module, x: Tensor, y: Tensor) -> None:
    with pytest.raises(RuntimeError):
        model(x[:, :2])


def _fisher(model: nn.Module, x: Tensor, y: Tensor) -> None:
    lw.fisher(model, [(x, y)], likelihood="categorical")


OTHERS = (
    *(_no_grad, _inference, _eval, _eval_and_backward),
    *(_never_differentiated, _kept_but_never_differentiated, _fails, _fisher),
)


@pytest.mark.parametrize(("name", "other", "when"), thinned(["KFAC", "NGD"], OTHERS, ["before", "between"]))
def test_other_uses_of_the_model_leave_nothing(name: str, other, when: str):
    a, one, b, two = pair(name)
    for t, (x, y) in enumerate(DATA[:4]):
        extra = DATA[t + 4]
        one.zero_grad()
        if when == "before":
            other(a, *extra)
        loss = cross_entropy(a(x), y)
        if when == "between":
            other(a, *extra)
        loss.backward()
        one.step()
        train_step(b, two, (x, y), cross_entropy)
    assert_same(a, b)
    assert all(torch.equal(s, t) for s, t in zip(factors(one), factors(two), strict=True))


def test_sampled_labels_of_a_forward_without_backward_are_dropped():
    """What is pending goes; the draws of later forwards are named by their number, so compare statistics' counts."""
    model = mlp()
    opt = observer("KFAC sampled", model)
    cross_entropy(model(DATA[0][0]), DATA[0][1])
    train_step(model, opt, DATA[1], cross_entropy)
    for of_param in opt.state_dict()["state"].values():
        for tensors in of_param.values():
            assert tensors["P_count"] == 1
    sums = [t["Q"][0, -1, -1] for of_param in opt.state_dict()["state"].values() for t in of_param.values()]
    assert all(abs(float(s) - 1) < 1e-12 for s in sums)


# --- what counts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in MEMBERS if name not in ("SOAP", "MahalanobisSpectral")])
def test_accumulation_is_the_big_batch(name: str):
    """``accumulate=4`` with a loss divided by 4 equals one batch.

    Sampled labels differ by their numbers; SOAP and the spectral member divide by what is zero but for rounding.
    """
    a, b = mlp(), mlp()
    options = {"likelihood": None} if name == "KFAC sampled" else {}
    one, two = member(name, a, accumulate=4, **options), member(name, b, **options)
    for x, y in DATA[:5]:
        one.zero_grad()
        for part in range(4):
            cut = slice(3 * part, 3 * part + 3)
            (cross_entropy(a(x[cut]), y[cut]) / 4).backward()
        one.step()
        train_step(b, two, (x, y), cross_entropy)
        assert_same(a, b, 1e-9)


@pytest.mark.parametrize(
    ("name", "average"), thinned(["KFAC", "EKFAC", "EKFAC running", "FOOF", "NGD"], ["examples", "tokens", None])
)
def test_accumulation_with_every_average(name: str, average: str | None):
    """The loss divided by k for each way of averaging, against one plain batch."""
    a, b = mlp(), mlp()
    one, two = member(name, a, accumulate=2, loss_average=average), member(name, b)
    for x, y in batches(4, 4, 5, positions=(4,)):
        one.zero_grad()
        for cut in (slice(0, 6), slice(6, 12)):
            (averaged(a(x[cut]), y[cut], average) / 2).backward()
        one.step()
        train_step(b, two, (x, y), cross_entropy)
        assert_same(a, b, 1e-9)


def averaged(f: Tensor, y: Tensor, average: str | None) -> Tensor:
    total = F.cross_entropy(f.flatten(0, -2), y.flatten(), reduction="sum")
    return total / {"examples": len(f), "tokens": y.numel(), None: 1}[average]


@pytest.mark.parametrize(
    ("name", "estimator", "average"),
    thinned(["KFAC", "EKFAC", "EKFAC running", "FOOF", "LocoProp", "NGD"], ["empirical", "exact"], ["tokens", None]),
)
def test_changing_the_loss_and_the_option_together_changes_nothing(name: str, average: str | None, estimator: str):
    options: dict[str, Any] = {}
    if estimator == "exact":
        options = {"likelihood": lw.likelihoods.Categorical(class_axis=-1), "estimator": "exact"}
    a, b = mlp(), mlp()
    one, two = member(name, a, loss_average=average, **options), member(name, b, **options)
    for x, y in batches(5, 3, 5, n=6, positions=(3,)):
        train_step(a, one, (x, y), lambda f, y: averaged(f, y, average))
        train_step(b, two, (x, y), cross_entropy)
        assert_same(a, b, 1e-9)


@OBSERVING
def test_zero_grad_between_forward_and_backward_keeps_statistics(name: str):
    a, one, b, two = pair(name)
    for x, y in DATA[:4]:
        loss = cross_entropy(a(x), y)
        one.zero_grad()
        loss.backward()
        one.step()
        train_step(b, two, (x, y), cross_entropy)
    assert_same(a, b)


@OBSERVING
def test_a_second_backward_through_one_forward_counts_once(name: str):
    """Gradients add up; examples do not."""
    model = mlp()
    opt = observer(name, model)
    loss = cross_entropy(model(DATA[0][0]), DATA[0][1])
    loss.backward(retain_graph=True)
    for p in model.parameters():
        p.grad = None
    loss.backward()
    opt.step()
    other = mlp()
    train_step(other, observer(name, other), DATA[0], cross_entropy)
    assert_same(model, other, 1e-12)


@OBSERVING
@pytest.mark.parametrize("way", ["is_grads_batched", "vmap"])
def test_a_backward_of_many_cotangents_counts_not_at_all(name: str, way: str):
    """It has no entries that could be read: on a graph of its own (which would draw labels of its own), and on that of
    the step."""
    a, one, b, two = pair(name)
    x, y = DATA[0]
    params = list(a.parameters())
    for kept in (True,) if name == "KFAC sampled" else (False, True):
        f = a(x)
        v = torch.ones(3, *f.shape, dtype=f.dtype)
        if way == "vmap":
            torch.func.vmap(lambda u, f=f, kept=kept: torch.autograd.grad(f, params, u, retain_graph=kept))(v)
        else:
            torch.autograd.grad(f, params, v, retain_graph=kept, is_grads_batched=True)
    one.zero_grad()
    cross_entropy(f, y).backward()
    one.step()
    train_step(b, two, (x, y), cross_entropy)
    assert_same(a, b)


@OBSERVING
def test_a_closure_that_is_repeated_counts_once(name: str):
    """A closure that runs the model twice, keeping the gradients of its last run, is the last run alone."""
    a, one, b, two = pair(name)
    for x, y in DATA[:3]:

        def closure(x=x, y=y):
            one.zero_grad()
            loss = cross_entropy(a(x), y)
            loss.backward()
            return loss.detach()

        one.step(closure)
        train_step(b, two, (x, y), cross_entropy)
    assert_same(a, b)


def test_forwards_of_several_batches_before_their_backward():
    """Both of a pair of views count: a loss on two outputs is one batch twice as large."""
    a, b = mlp(), mlp()
    one, two = (lw.optim.KFAC(m, 0.01, momentum=0.0, refresh_every=1, scale="formula") for m in (a, b))
    for (x, y), (u, v) in zip(DATA[:4], DATA[4:], strict=True):
        one.zero_grad()
        f, g = a(x), a(u)
        ((cross_entropy(f, y) + cross_entropy(g, v)) / 2).backward()
        one.step()
        train_step(b, two, (torch.cat([x, u]), torch.cat([y, v])), cross_entropy)
    # each output's loss is divided by 2, as with accumulate=2: told so, the steps agree
    c = mlp()
    told = lw.optim.KFAC(c, 0.01, momentum=0.0, refresh_every=1, accumulate=2, scale="formula")
    for (x, y), (u, v) in zip(DATA[:4], DATA[4:], strict=True):
        told.zero_grad()
        f, g = c(x), c(u)
        ((cross_entropy(f, y) + cross_entropy(g, v)) / 2).backward()
        told.step()
    assert_same(c, b, 1e-9)
    assert not torch.equal(flat(a), flat(b))


# --- containers -------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class ModelOutput(OrderedDict):
    """As transformers has it: a mapping whose entries are attributes too."""

    def __getattr__(self, key: str) -> Any:
        return self[key]


class Contained(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = mlp(), kind

    def forward(self, x: Tensor) -> Any:
        f = self.net(x)
        return {
            "tuple": (f, x.sum()),
            "list": [f],
            "dict": {"indices": x.long(), "out": f},
            "logits": {"loss": f.sum(), "logits": f},
            "dataclass": Output(f),
            "model_output": ModelOutput(loss=f.sum(), logits=f),
            "namespace": SimpleNamespace(logits=f),
        }[self.kind]


def _logits(out: Any) -> Tensor:
    if isinstance(out, tuple | list):
        return out[0]
    if isinstance(out, dict):
        return out["logits"] if "logits" in out else out["out"]
    return out.logits


@pytest.mark.parametrize(
    ("kind", "name"),
    thinned(["tuple", "list", "dict", "logits", "dataclass", "model_output", "namespace"], ["KFAC", "KFAC sampled"]),
)
def test_the_output_is_found_in_a_container(name: str, kind: str):
    a, b = Contained(kind), mlp()
    one, two = observer(name, a), observer(name, b)
    for batch in DATA[:3]:
        train_step(lambda x: _logits(a(x)), one, batch, cross_entropy)
        train_step(b, two, batch, cross_entropy)
    assert_same(a, b)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, *, features: Tensor, scale: float = 1.0) -> Tensor:
        return self.net(features) * scale


@pytest.mark.parametrize("name", ["KFAC", "KFAC sampled", "NGD"])
def test_inputs_by_name(name: str):
    a, b = Named(), mlp()
    one, two = observer(name, a), observer(name, b)
    for batch in DATA[:3]:
        train_step(lambda x: a(features=x, scale=1.0), one, batch, cross_entropy)
        train_step(b, two, batch, cross_entropy)
    assert_same(a, b)


# --- nothing of the graph is left -------------------------------------------------------------------------


def _saved_by_a_forward(model: nn.Module, batch) -> tuple[Tensor, list[weakref.ref]]:
    alive = []

    class Kept:
        def __init__(self, t: Tensor) -> None:
            self.t = t.detach()  # the tensor itself would be a cycle through its own graph

    def pack(t: Tensor) -> Kept:
        kept = Kept(t)
        alive.append(weakref.ref(kept))
        return kept

    with saved_tensors_hooks(pack, lambda kept: kept.t):
        loss = cross_entropy(model(batch[0]), batch[1])
    return loss, alive


@OBSERVING
def test_the_graph_is_freed_by_the_step(name: str):
    model = mlp()
    opt = observer(name, model)
    train_step(model, opt, DATA[0], cross_entropy)
    loss, alive = _saved_by_a_forward(model, DATA[1])
    loss.backward()
    del loss
    opt.step()
    gc.collect()
    assert alive
    assert not [r for r in alive if r() is not None]


@OBSERVING
def test_the_graph_of_a_forward_without_backward_is_freed_by_the_step(name: str):
    model = mlp()
    opt = observer(name, model)
    train_step(model, opt, DATA[0], cross_entropy)
    loss, alive = _saved_by_a_forward(model, DATA[1])
    del loss
    train_step(model, opt, DATA[2], cross_entropy)
    gc.collect()
    assert alive
    assert not [r for r in alive if r() is not None]


# --- precision --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["KFAC", "EKFAC", "EKFAC running", "FOOF", "NGD", "Shampoo", "Adam"])
def test_a_grad_scaler_changes_nothing(name: str):
    """A scale that is a power of two, and one that changes; on the CPU in single precision."""
    a, b = mlp().float(), mlp().float()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    one, two = member(name, a, grad_scaler=scaler), member(name, b)
    for x, y in DATA:
        x = x.float()
        one.zero_grad()
        scaler.scale(cross_entropy(a(x), y)).backward()
        scaler.step(one)
        scaler.update()
        train_step(b, two, (x, y), cross_entropy)
        assert_same(a, b, 1e-4)
    assert scaler.get_scale() > 2.0**10


@pytest.mark.parametrize("name", ["KFAC", "EKFAC", "FOOF"])
def test_a_step_that_the_scaler_skips_leaves_nothing_behind(name: str):
    """An overflow: the scaler does not call ``step``. The statistics of that batch must not reach the next step."""
    a, b = mlp().float(), mlp().float()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    one, two = member(name, a, grad_scaler=scaler), member(name, b)
    for t, (x, y) in enumerate(DATA[:6]):
        x = x.float()
        if t in (0, 3):
            one.zero_grad()
            scaler.scale(cross_entropy(a(x), y) * float("inf")).backward()
            scaler.step(one)
            scaler.update()
            continue
        one.zero_grad()
        scaler.scale(cross_entropy(a(x), y)).backward()
        scaler.step(one)
        scaler.update()
        train_step(b, two, (x, y), cross_entropy)
        assert torch.isfinite(flat(a)).all(), f"step {t}"
        assert_same(a, b, 1e-3)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_labels_are_drawn_in_the_type_of_the_output(monkeypatch: pytest.MonkeyPatch):
    """Autocast makes float32 of every softmax: of a large vocabulary that is gigabytes."""
    drawn, original = list[tuple[torch.dtype, torch.dtype]](), Categorical.sample

    def sample(self: Categorical, terms: Any, generator: torch.Generator) -> Tensor:
        found = original(self, terms, generator)
        drawn.append((terms.f.dtype, found.dtype))
        assert not torch.is_autocast_enabled("cpu")
        return found

    monkeypatch.setattr(Categorical, "sample", sample)
    monkeypatch.setattr(Categorical, "samples_half", property(lambda self: True))  # which asks whose `sample` it is
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))
    opt = lw.optim.KFAC(model, likelihood="categorical", factor_every=1)
    for _ in range(2):
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(torch.randn(8, 4)), torch.randint(5, (8,)))
        loss.backward()
        opt.step()
    assert drawn == [(torch.bfloat16, torch.bfloat16)] * 2


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("name", ["KFAC", "KFAC sampled", "EKFAC", "FOOF", "NGD", "Shampoo", "Muon"])
def test_autocast(name: str):
    """bfloat16 activations: statistics in float32, the step near that of full precision."""
    a, b = mlp(8, 16, 16, 3).float(), mlp(8, 16, 16, 3).float()
    one, two = member(name, a, lr=1e-3), member(name, b, lr=1e-3)
    for x, y in batches(3, 8, n=32):
        x = x.float()
        one.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(a(x).float(), y)
        loss.backward()
        one.step()
        train_step(b, two, (x, y), cross_entropy)
    moved = (flat(b) - flat(mlp(8, 16, 16, 3).float())).norm()
    assert (flat(a) - flat(b)).norm() < (1.5 if name in ("KFAC sampled", "NGD") else 0.3) * moved
    for t in factors(one):
        assert t.dtype == torch.float32
        assert torch.isfinite(t).all()


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("name", MEMBERS)
def test_bfloat16_parameters(name: str):
    """State in float32, parameters stay bfloat16, and the loss goes down."""
    model = mlp(8, 16, 3).bfloat16()
    opt = member(name, model)
    x, y = batches(1, 8, n=32)[0]
    losses = [train_step(model, opt, (x.bfloat16(), y), lambda f, y: cross_entropy(f.float(), y)) for _ in range(12)]
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    for of_param in opt.state_dict()["state"].values():
        assert all(t.dtype == torch.float32 for tensors in of_param.values() for t in tensors.values())
    assert torch.isfinite(flat(model)).all()
    assert min(losses) < losses[0]


# --- which layers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MEMBERS)
def test_frozen_parameters_stay(name: str):
    model = mlp()
    model[2].requires_grad_(False)
    model[0].bias.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    opt = member(name, model)
    for batch in DATA[:4]:
        train_step(model, opt, batch, cross_entropy)
    for key, p in model.state_dict().items():
        assert torch.equal(p, before[key]) == (key.startswith("2.") or key == "0.bias")


@pytest.mark.parametrize("name", MEMBERS)
def test_a_layer_frozen_after_the_optimizer_was_built_stays(name: str):
    """As with torch's own: no gradient, no step; printing and saving still work."""
    model = mlp()
    opt = member(name, model)
    train_step(model, opt, DATA[0], cross_entropy)
    model[2].requires_grad_(False)
    before = [p.clone() for p in model[2].parameters()]
    for batch in DATA[1:3]:
        train_step(model, opt, batch, cross_entropy)
    assert all(torch.equal(p, q) for p, q in zip(model[2].parameters(), before, strict=True))
    assert "4.weight" in repr(opt)
    opt.load_state_dict(opt.state_dict())
    train_step(model, opt, DATA[3], cross_entropy)


class Branches(nn.Module):
    """Two branches of one shape; a call uses those it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(5, 4), nn.Linear(5, 4), nn.Linear(4, 3)
        self.use = ("left", "right")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(sum(getattr(self, name)(x) for name in self.use).tanh())


def _branches() -> Branches:
    torch.manual_seed(0)
    return Branches().double()


@pytest.mark.parametrize(("name", "first"), thinned(MEMBERS, [True, False]))
def test_a_layer_that_is_not_called_this_step_keeps_parameters_and_state(name: str, first: bool):
    """Not called at the first step, or at a later one; the others go on as if it did not exist."""
    model = _branches()
    opt = member(name, model)
    if not first:
        for batch in DATA[:2]:
            train_step(model, opt, batch, cross_entropy)
    before = [p.detach().clone() for p in model.right.parameters()]
    saved = {k: v for of in opt.state_dict()["state"].values() for k, v in of.items() if k.startswith("right")}
    model.use = ("left",)
    for batch in DATA[2:5]:
        train_step(model, opt, batch, cross_entropy)
    assert all(torch.equal(p, q) for p, q in zip(model.right.parameters(), before, strict=True))
    now = {k: v for of in opt.state_dict()["state"].values() for k, v in of.items() if k.startswith("right")}
    for layer, tensors in saved.items():
        assert all(torch.equal(t, now[layer][k]) for k, t in tensors.items()), layer
    model.use = ("left", "right")
    for batch in DATA[5:8]:
        train_step(model, opt, batch, cross_entropy)
    assert torch.isfinite(flat(model)).all()
    assert flat(model).abs().max() < 100
    assert not torch.equal(model.right.weight, before[0])


@pytest.mark.parametrize("name", ["KFAC", "EKFAC", "FOOF", "NGD"])
def test_a_layer_that_only_some_forwards_of_a_step_call(name: str):
    """Accumulation over batches that take different branches, as in a mixture of experts."""
    model = _branches()
    opt = member(name, model, accumulate=2)
    for x, y in DATA[:4]:
        opt.zero_grad()
        for cut, use in ((slice(0, 6), ("left",)), (slice(6, 12), ("left", "right"))):
            model.use = use
            (cross_entropy(model(x[cut]), y[cut]) / 2).backward()
        opt.step()
    assert torch.isfinite(flat(model)).all()
    assert flat(model).abs().max() < 100


class StopGradient(nn.Module):
    """An encoder called twice, once as a target without gradient (as in self-supervision)."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.encode, self.head, self.how = nn.Linear(5, 4), nn.Linear(4, 3), how

    def forward(self, x: Tensor) -> Tensor:
        h = self.encode(x).tanh()
        if self.how == "detach":
            h = h + 0 * self.encode(x + 1).detach()
        elif self.how == "no_grad":
            with torch.no_grad():
                target = self.encode(x + 1)
            h = h + 0 * target
        return self.head(h)


@pytest.mark.parametrize("how", ["detach", "no_grad"])
@pytest.mark.parametrize("name", ["KFAC", "EKFAC", "FOOF", "NGD"])
def test_a_layer_one_of_whose_calls_has_no_gradient(name: str, how: str):
    """It still has statistics: the step is of the size it has without the other call."""
    torch.manual_seed(0)
    a = StopGradient(how).double()
    b = copy.deepcopy(a)
    b.how = "none"
    one, two = member(name, a), member(name, b)
    start = flat(a)
    for batch in DATA[:3]:
        train_step(a, one, batch, cross_entropy)
        train_step(b, two, batch, cross_entropy)
    assert torch.isfinite(flat(a)).all()
    assert (flat(a) - start).norm() < 10 * (flat(b) - start).norm()


@pytest.mark.parametrize("how", ["detach", "no_grad"])
def test_with_drawn_labels_a_call_without_gradient_is_left_out(how: str):
    """Its inputs are in no statistics: steps are those of the model without it."""
    torch.manual_seed(0)
    a = StopGradient(how).double()
    b = copy.deepcopy(a)
    b.how = "none"
    one, two = observer("KFAC sampled", a, seed=0), observer("KFAC sampled", b, seed=0)
    for batch in DATA[:3]:
        train_step(a, one, batch, cross_entropy)
        train_step(b, two, batch, cross_entropy)
    torch.testing.assert_close(flat(a), flat(b))


# --- random labels ----------------------------------------------------------------------------------------


def test_sampled_labels_are_reproducible_by_seed():
    runs = []
    for seed, noise in ((0, 1), (0, 2), (1, 1)):
        model = mlp()
        opt = observer("KFAC sampled", model, seed=seed)
        torch.manual_seed(noise)  # the global generator does not matter, and is not moved
        state = torch.get_rng_state()
        for batch in DATA[:4]:
            train_step(model, opt, batch, cross_entropy)
        assert torch.equal(torch.get_rng_state(), state)
        runs.append(flat(model))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_a_generator_as_seed():
    runs = []
    for seed in (3, 3, 4):
        model = mlp()
        opt = observer("KFAC sampled", model, seed=torch.Generator().manual_seed(seed))
        for batch in DATA[:2]:
            train_step(model, opt, batch, cross_entropy)
        runs.append(flat(model))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_labels_are_drawn_only_where_statistics_are_due():
    """One extra backward at every third step: counted by the gradients that reach a layer's output."""
    model = mlp()
    opt = lw.optim.KFAC(model, likelihood="categorical", factor_every=3, scale="formula")
    backwards = []
    for t, batch in enumerate(DATA[:7]):
        seen: list[int] = []

        def hook(module: nn.Module, args: Any, out: Tensor, seen: list[int] = seen) -> None:
            if out.requires_grad:
                out.register_hook(lambda g: seen.append(1))

        handle = model[2].register_forward_hook(hook)
        train_step(model, opt, batch, cross_entropy)
        handle.remove()
        if t:  # the model is examined at the first
            backwards.append(len(seen))
    assert backwards == [1, 1, 2, 1, 1, 2]


def test_the_output_is_weighed_only_where_statistics_are_due(monkeypatch: pytest.MonkeyPatch):
    """``‖∂L/∂f‖²`` is a pass over the output, which may be the largest tensor of the model."""
    model, seen, norm = mlp(), list[torch.Size](), torch.linalg.vector_norm
    opt = lw.optim.KFAC(model, estimator="empirical", factor_every=3)

    def noted(x: Tensor, *args: Any, **options: Any) -> Tensor:
        seen.append(x.shape)
        return norm(x, *args, **options)

    monkeypatch.setattr(torch.linalg, "vector_norm", noted)
    weighed, due = [], [step % 3 == 0 for step in range(28)]
    for x, y in batches(28, 5):
        f = model(x)
        seen.clear()
        cross_entropy(f, y).backward()
        weighed.append(seen.count(f.shape))
        opt.step()
        opt.zero_grad()
    assert weighed == due
    assert not all(due)
