"""Statistics are those of the gradient that a step takes, whatever loop has made it."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optim_tools import batches, cross_entropy, flat, gaussian, labels, member, mlp, squares, train_step
from torch import Tensor, nn

import layerwise as lw
from layerwise.layers.capture.model_call import output_tensor, own_backward, uncompiled, without_fast_path
from layerwise.optim.statistics.hooks import Capture

pytestmark = pytest.mark.usefixtures("untyped")
DATA = batches(8, 5)
OBSERVERS = ("KFAC", "KFAC sampled", "EKFAC", "EKFAC running", "FOOF", "NGD", "MahalanobisSpectral")
OBSERVING = pytest.mark.parametrize("name", OBSERVERS)


def pair(name: str, make: Callable[[], nn.Module] = mlp) -> tuple[Any, Any, Any, Any]:
    a = make()
    b = copy.deepcopy(a)
    return a, member(name, a), b, member(name, b)


def statistics(opt: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {}
    for of_param in opt.state_dict()["state"].values():
        for layer, tensors in of_param.items():
            found |= {f"{layer}.{k}": t for k, t in tensors.items() if k in ("P", "Q", "P_count", "Q_count")}
    return found


def assert_same(a: nn.Module, one: Any, b: nn.Module, two: Any, tol: float = 1e-9) -> None:
    assert (flat(a) - flat(b)).abs().max() < tol
    for (key, s), t in zip(statistics(one).items(), statistics(two).values(), strict=True):
        assert torch.allclose(s, t, rtol=1e-9, atol=1e-12), key


# --- several backwards through one forward ------------------------------------------------------------------


@OBSERVING
@pytest.mark.parametrize("retain_last", [False, True])
def test_two_losses_one_after_the_other_are_their_sum(name: str, retain_last: bool):
    a, one, b, two = pair(name)
    for x, y in DATA[:4]:
        one.zero_grad()
        f = a(x)
        cross_entropy(f, y).backward(retain_graph=True)
        squares(f, y).backward(retain_graph=retain_last)
        one.step()
        train_step(b, two, (x, y), lambda f, y: cross_entropy(f, y) + squares(f, y))
    assert_same(a, one, b, two)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x).tanh()
        return self.left(h), self.right(h)


def two_heads() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TwoHeads().double()


@pytest.mark.parametrize("name", ["KFAC", "EKFAC", "NGD"])
def test_two_heads_one_after_the_other(name: str):
    """Each loss passes through one head and the trunk."""
    a, one, b, two = pair(name, two_heads)
    for x, y in DATA[:4]:
        one.zero_grad()
        left, right = a(x)
        cross_entropy(left, y).backward(retain_graph=True)
        squares(right, y).backward()
        one.step()
        two.zero_grad()
        left, right = b(x)
        (cross_entropy(left, y) + squares(right, y)).backward()
        two.step()
    assert_same(a, one, b, two)


@OBSERVING
def test_a_gradient_that_was_set_to_zero_leaves_nothing(name: str):
    """`zero_grad` between two backwards through one forward: the second alone counts, examples included."""
    a, one, b, two = pair(name)
    for x, y in DATA[:4]:
        one.zero_grad()
        f = a(x)
        cross_entropy(f, y).backward(retain_graph=True)
        one.zero_grad()
        squares(f, y).backward()
        one.step()
        train_step(b, two, (x, y), squares)
    assert_same(a, one, b, two)


def test_kept_graphs_are_let_go_by_the_step():
    model = mlp()
    opt = lw.optim.KFAC(model)
    f = model(DATA[0][0])
    cross_entropy(f, DATA[0][1]).backward(retain_graph=True)
    opt.step()
    assert not opt._capture._pending
    assert int(statistics(opt)["0.P_count"][0]) == 1


# --- gradients that no parameter gets -----------------------------------------------------------------------


@OBSERVING
@pytest.mark.parametrize("when", ["before", "after", "of another batch"])
def test_a_gradient_of_the_inputs_is_no_statistic(name: str, when: str):
    """Saliency, adversarial examples, penalties that are only measured: in train mode, beside a step."""
    a, one, b, two = pair(name)
    if name == "KFAC sampled" and when == "of another batch":
        one, two = (member(name, m, estimator="exact") for m in (a, b))  # labels are numbered by forwards
    for t, (x, y) in enumerate(DATA[:4]):
        one.zero_grad()
        x = x.clone().requires_grad_()
        f = a(x)
        loss = cross_entropy(f, y)
        if when == "before":
            torch.autograd.grad(squares(f, y), x, retain_graph=True)
        elif when == "of another batch":
            other = DATA[t + 4][0].clone().requires_grad_()
            torch.autograd.grad(squares(a(other), y), other)
        loss.backward(retain_graph=when == "after")
        if when == "after":
            torch.autograd.grad(squares(f, y), x)
        one.step()
        train_step(b, two, (x.detach(), y), cross_entropy)
    assert_same(a, one, b, two)


@pytest.mark.parametrize("name", ["KFAC", "NGD"])
def test_a_gradient_of_the_output_is_no_statistic(name: str):
    a, one, b, two = pair(name)
    for x, y in DATA[:3]:
        one.zero_grad()
        f = a(x)
        loss = cross_entropy(f, y)
        torch.autograd.grad(squares(f, y), f, retain_graph=True)
        loss.backward()
        one.step()
        train_step(b, two, (x, y), cross_entropy)
    assert_same(a, one, b, two)


@OBSERVING
def test_gradients_that_are_asked_for_and_put_in_place(name: str):
    """``p.grad = autograd.grad(loss, params)`` is a backward like any other."""
    a, one, b, two = pair(name)
    for x, y in DATA[:4]:
        params = list(a.parameters())
        for p, g in zip(params, torch.autograd.grad(cross_entropy(a(x), y), params), strict=True):
            p.grad = g
        one.step()
        one.zero_grad()
        train_step(b, two, (x, y), cross_entropy)
    assert_same(a, one, b, two)


# --- what the model returns ---------------------------------------------------------------------------------


class Returning(nn.Module):
    """An output among others."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.head, self.kind = nn.Linear(5, 4), nn.Linear(4, 3), kind

    def forward(self, x: Tensor) -> Any:
        h = self.body(x).tanh()
        f = self.head(h)
        aux = 0.01 * h.square().mean()
        return {
            "logits": f,
            "aux, logits": (aux, f),
            "aux of each example, logits": (h.square().mean(-1), f),
            "features, logits": (h, f),
            "logits, probabilities": (f, f.softmax(-1)),
            "logits, features": (f, h),
            "dictionary": {"aux": aux, "out": f},
        }[self.kind]


PLACES = {"logits": None, "logits, probabilities": 0, "logits, features": 0, "dictionary": "out"}
KINDS = ("aux, logits", "aux of each example, logits", "features, logits")
KINDS = (*KINDS, "logits, probabilities", "logits, features", "dictionary")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "average"), [("KFAC", "examples"), ("KFAC", "tokens"), ("KFAC sampled", "examples")])
def test_the_output_among_others(name: str, average: str, kind: str):
    """Steps are those of the same model that returns its output alone."""
    models, per_token = [], average == "tokens"
    data = batches(4, 4, 5, positions=(4,)) if per_token else DATA[:4]
    for k in (kind, "logits"):
        torch.manual_seed(0)
        model = Returning(k).double()
        opt = member(name, model, loss_average=average)
        place = PLACES.get(k, 1)
        for x, y in data:
            out = model(x)
            f = out if place is None else out[place]
            opt.zero_grad()
            (cross_entropy(f, y) / (4 if per_token else 1)).backward()
            opt.step()
        models.append((model, opt))
    assert_same(*models[0], *models[1])


class WithLoss(nn.Module):
    """Returns its loss beside the logits, as Hugging Face's models do that are given labels, or the logits alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.kind = nn.Linear(5, 4), nn.Linear(4, 3), kind

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        h = self.body(x).tanh()
        f = self.head(h)
        if self.kind == "logits":
            return f
        loss = F.cross_entropy(f, labels)
        return (loss, f) if self.kind == "tuple" else {"loss": loss, "logits": f}

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        out = self(x=x, labels=labels)
        return F.cross_entropy(out, labels) if self.kind == "logits" else out[0 if self.kind == "tuple" else "loss"]


LOSSES_INSIDE = {
    "KFAC": lambda model: lw.optim.KFAC(model, lr=1e-2),
    "EKFAC": lambda model: lw.optim.EKFAC(model, lr=1e-2),
    "empirical": lambda model: lw.optim.KFAC(model, lr=1e-2, estimator="empirical"),
    "exact": lambda model: lw.optim.KFAC(model, lr=1e-2, estimator="exact", likelihood="categorical"),
    "formula": lambda model: lw.optim.KFAC(model, lr=1e-2, likelihood="categorical", scale="formula"),
    "NGD": lambda model: lw.optim.NGD(model, lr=1e-2, likelihood="categorical"),
}


@pytest.mark.parametrize("kind", ["tuple", "dictionary"])
@pytest.mark.parametrize("name", LOSSES_INSIDE)
def test_a_loss_that_the_model_returns(name: str, kind: str):
    """The backward reaches the loss before the logits; statistics come of every batch all the same."""
    ran = []
    for k in (kind, "logits"):
        model = WithLoss(k).double()
        opt = LOSSES_INSIDE[name](model)
        for x, y in DATA[:6]:
            opt.zero_grad()
            model.loss(x, y).backward()
            opt.step()
        ran.append((model, opt))
    assert_same(*ran[0], *ran[1])


def test_a_backward_that_brings_no_statistics_is_said(monkeypatch: pytest.MonkeyPatch):
    model = mlp()
    opt = member("KFAC", model)
    for number, batch in enumerate(DATA[:4]):
        if number < 2:
            train_step(model, opt, batch, cross_entropy)
            continue
        monkeypatch.setattr(Capture, "_keep_arrived", lambda *args, **kwargs: None)
        if number == 2:
            with pytest.warns(UserWarning, match="no layer's statistics came"):
                train_step(model, opt, batch, cross_entropy)
        else:  # said once
            train_step(model, opt, batch, cross_entropy)


def test_which_tensor_is_the_output():
    features = gaussian(6, 4).requires_grad_().tanh()
    f = features @ gaussian(4, 3)
    assert output_tensor((f.mean(), f)) is f
    assert output_tensor((features, f)) is f
    assert output_tensor((f, features)) is f
    assert output_tensor((f, f.softmax(-1))) is f
    for hidden in (gaussian(6, 5, 4), gaussian(6, 3, 4)):  # the latter as if f had a number for each of its rows
        assert output_tensor((f, [hidden.requires_grad_().tanh()])) is f
    assert output_tensor({"loss": f.sum(), "scores": f}) is f
    assert output_tensor((features.detach(), f.detach())).shape == features.shape  # no graph: the first


# --- threads, and optimizers that are gone ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["KFAC", "KFAC sampled", "NGD"])
def test_a_backward_of_the_library_in_another_thread(name: str):
    """It says nothing about the backwards of this one."""
    a, one, b, two = pair(name)

    def train() -> None:
        for batch in DATA[:3]:
            train_step(a, one, batch, cross_entropy)

    with own_backward(object()):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    for batch in DATA[:3]:
        train_step(b, two, batch, cross_entropy)
    assert torch.equal(flat(a), flat(b))


def test_models_that_are_trained_in_threads():
    """Two at a time, with labels drawn (which takes backwards of the library's own): as one after the other."""
    alone, together = [], []
    for found, threaded in ((alone, False), (together, True)):
        models = [mlp(seed=k) for k in range(2)]
        opts = [lw.optim.KFAC(m, lr=0.02, likelihood="categorical" if k else None) for k, m in enumerate(models)]

        def train(k: int, models=models, opts=opts) -> None:
            for batch in DATA * 3:
                train_step(models[k], opts[k], batch, cross_entropy)

        threads = [threading.Thread(target=train, args=(k,)) for k in range(2)]
        for thread in threads:
            thread.start()
            if not threaded:
                thread.join()
        for thread in threads:
            thread.join()
        found += [flat(m) for m in models]
    assert all(torch.equal(p, q) for p, q in zip(alone, together, strict=True))


def test_settings_of_the_process_are_put_back_by_the_last_who_holds_them():
    """In any order, as threads have it."""
    first, second = uncompiled(), uncompiled()
    paths = without_fast_path(), without_fast_path()
    import torch._dynamo

    for context in (first, second, *paths):
        context.__enter__()
    first.__exit__(None, None, None)
    paths[0].__exit__(None, None, None)
    assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    assert not torch.backends.mha.get_fastpath_enabled()
    second.__exit__(None, None, None)
    paths[1].__exit__(None, None, None)
    assert torch._dynamo.eval_frame._stance.stance == "default"
    assert torch.backends.mha.get_fastpath_enabled()


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", ["KFAC", "KFAC sampled", "EKFAC", "FOOF", "NGD"])
def test_hooks_go_with_the_optimizer(name: str, steps: int):
    model = mlp()
    opt = member(name, model)
    assert hooks(model) == 2
    for batch in DATA[:steps]:
        train_step(model, opt, batch, cross_entropy)
    other, copied = copy.deepcopy((model, opt))
    kept = model(DATA[0][0])  # a forward whose backward never comes, and whose output somebody keeps
    gone = weakref.ref(opt)
    del opt
    gc.collect()
    assert gone() is None
    assert hooks(model) == 0
    assert kept.requires_grad
    assert hooks(other) >= 2
    train_step(other, copied, DATA[0], cross_entropy)
    del copied
    gc.collect()
    assert torch.isfinite(F.cross_entropy(other(DATA[0][0]), labels(12)))
