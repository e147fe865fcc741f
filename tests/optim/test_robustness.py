"""What goes wrong in practice: broken batches, dead layers, singular factors, odd layers, long runs, wrong options."""

import copy
import gc
from typing import Any

import pytest
import torch
from optim_tools import MEMBERS, batches, cross_entropy, flat, gaussian, labels, member, mlp, train_step
from torch import Tensor, nn

import layerwise as lw
from layerwise.foundations.errors import InputError, LayerwiseError
from thinning import thinned

pytestmark = pytest.mark.usefixtures("untyped")
DATA = batches(8, 5)
OBSERVERS = ("KFAC", "KFAC exact split", "EKFAC", "EKFAC running", "FOOF", "LocoProp", "NGD", "MahalanobisSpectral")


def tensors(opt: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{layer}.{k}": t.clone()
        for of_param in opt.state_dict()["state"].values()
        for layer, of_layer in of_param.items()
        for k, t in of_layer.items()
    }


def sane(model: nn.Module, bound: float = 1e4) -> bool:
    return bool(torch.isfinite(flat(model)).all()) and float(flat(model).abs().max()) < bound


# --- broken batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), thinned(MEMBERS, [float("nan"), float("inf")]))
def test_a_broken_batch_is_skipped_and_counted(name: str, value: float):
    model = mlp()
    opt = member(name, model)
    for batch in DATA[:3]:
        train_step(model, opt, batch, cross_entropy)
    before, state = flat(model), tensors(opt)
    x, y = DATA[3]
    broken = x.clone()
    broken[0, 0] = value
    train_step(model, opt, (broken * value, y), cross_entropy)
    assert torch.equal(flat(model), before)
    assert all(torch.equal(t, state[k]) for k, t in tensors(opt).items())
    assert opt.health().skipped_steps == 1
    for batch in DATA[4:]:
        train_step(model, opt, batch, cross_entropy)
    assert sane(model)
    assert opt.health().skipped_steps == 1


@pytest.mark.parametrize("name", MEMBERS)
def test_a_broken_first_batch(name: str):
    """Afterwards everything is as if it had not been: same rules, same steps but for their numbers."""
    model = mlp()
    opt = member(name, model, refresh_every=1)
    train_step(model, opt, (DATA[0][0] * float("nan"), DATA[0][1]), cross_entropy)
    other = mlp()
    plain = member(name, other, refresh_every=1)
    for batch in DATA[1:5]:
        train_step(model, opt, batch, cross_entropy)
        train_step(other, plain, batch, cross_entropy)
    assert opt.health().skipped_steps == 1
    assert repr(opt) == repr(plain)
    if name != "KFAC sampled":  # whose labels are numbered by forwards
        assert (flat(model) - flat(other)).abs().max() < 1e-9


def test_a_scaled_gradient_that_overflows_is_no_statistics():
    """Statistics alone that are not finite: the last good factor stays, and is counted."""
    model = mlp()
    opt = lw.optim.KFAC(model, lr=0.01, refresh_every=1, scale="formula")
    for batch in DATA[:3]:
        train_step(model, opt, batch, cross_entropy)
    state = tensors(opt)
    opt.zero_grad()
    handle = model[2].register_forward_hook(lambda m, a, out: out.register_hook(lambda g: g * float("inf")) and None)
    cross_entropy(model(DATA[3][0]), DATA[3][1]).backward()
    handle.remove()
    fine = copy.deepcopy(model)
    fine.zero_grad()
    cross_entropy(fine(DATA[3][0]), DATA[3][1]).backward()
    for p, q in zip(model.parameters(), fine.parameters(), strict=True):
        p.grad = q.grad.clone()
    opt.step()
    assert sane(model)
    assert opt.health().skipped_statistics > 0
    assert all(torch.isfinite(t).all() for t in tensors(opt).values())
    assert torch.equal(tensors(opt)["2.P"], state["2.P"])


@pytest.mark.parametrize("name", ["KFAC", "KFAC exact split", "EKFAC", "MahalanobisSpectral"])
def test_statistics_that_are_broken_at_the_first_step(name: str):
    """No factor is known yet: the step must not be that of a factor that is zero."""
    model = mlp()
    opt = member(name, model)
    handle = model[2].register_forward_hook(
        lambda m, a, out: out.register_hook(lambda g: g * float("nan")) and None if out.requires_grad else None
    )
    cross_entropy(model(DATA[0][0]), DATA[0][1]).backward()
    handle.remove()
    fine = mlp()
    cross_entropy(fine(DATA[0][0]), DATA[0][1]).backward()
    for p, q in zip(model.parameters(), fine.parameters(), strict=True):
        p.grad = q.grad.clone()
    opt.step()
    assert sane(model)


# --- dead layers and singular factors ---------------------------------------------------------------------


@pytest.mark.parametrize(("name", "every"), thinned(MEMBERS, [2, 10]))
def test_a_head_that_starts_at_zero(name: str, every: int):
    """Layers below it have no gradient at the first step, and one at the second."""
    model = mlp().float()
    nn.init.zeros_(model[4].weight)
    opt = member(name, model, refresh_every=every)
    for x, y in DATA[:5]:
        train_step(model, opt, (x.float(), y), cross_entropy)
        assert sane(model)


class AllFinite(nn.Module):
    """A branch that is switched off by a factor of zero for some steps: gradients of zero, not None."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head, self.open = nn.Linear(5, 4), nn.Linear(5, 4), nn.Linear(4, 3), 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.a(x) + self.open * self.b(x)).tanh())


@pytest.mark.parametrize(("name", "closed"), thinned(MEMBERS, [1, 5]))
def test_a_layer_whose_gradient_is_zero_for_a_while(name: str, closed: int):
    torch.manual_seed(0)
    model = AllFinite().double()
    opt = member(name, model, **({"refresh_every": 10} if name not in ("NGD", "LocoProp") else {}))
    before = model.b.weight.detach().clone()
    for t, batch in enumerate(DATA):
        model.open = float(t >= closed)
        train_step(model, opt, batch, cross_entropy)
        if t < closed and name != "Muon":  # which has weight decay by default
            assert torch.equal(model.b.weight, before)
        assert sane(model), f"step {t + 1}"
    assert not torch.equal(model.b.weight, before)


@pytest.mark.parametrize(
    ("name", "data"), thinned(MEMBERS, ["one example", "equal inputs", "zero inputs", "one class"])
)
def test_singular_factors(name: str, data: str):
    x, y = DATA[0]
    if data == "one example":
        x, y = x[:1], y[:1]
    elif data == "equal inputs":
        x = x[:1].expand_as(x).contiguous()
    elif data == "zero inputs":
        x = torch.zeros_like(x)
    else:
        y = torch.zeros_like(y)
    model = mlp().float()
    opt = member(name, model, lr=0.003)
    for _ in range(6):
        train_step(model, opt, (x.float(), y), cross_entropy)
        assert sane(model)


def test_a_side_that_is_too_long_has_no_factor():
    """One-sided, and the print says so."""
    model = mlp(5, 40, 3)
    opt = lw.optim.KFAC(model, lr=0.01, max_factor=16, scale="formula")
    for batch in DATA[:3]:
        train_step(model, opt, batch, cross_entropy)
    assert sane(model)
    state = tensors(opt)
    assert "0.P" not in state
    assert state["0.Q"].shape == (1, 6, 6)
    assert "2.Q" not in state
    assert state["2.P"].shape == (1, 3, 3)
    assert "left has no factor: 40 > max_factor=16" in repr(opt)
    assert "right has no factor: 41 > max_factor=16" in repr(opt)


@pytest.mark.filterwarnings("ignore:.* get the fallback's update")
@pytest.mark.parametrize("name", ["KFAC", "KFAC exact split", "EKFAC", "EKFAC running", "FOOF", "Shampoo", "SOAP"])
def test_layers_that_are_too_long_on_both_sides(name: str):
    model = mlp(30, 40, 3)
    opt = member(name, model, max_factor=16)
    for x, y in batches(4, 30):
        train_step(model, opt, (x, y), cross_entropy)
    assert sane(model)
    assert "0.weight" in repr(opt)
    assert "max_factor" in repr(opt)


# --- odd layers -------------------------------------------------------------------------------------------


class Text(nn.Module):
    """Embedding, attention, norms, a head tied to the embedding or not."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.mix, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 7)
        self.scale = nn.Parameter(torch.ones(()))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embed(x))
        return self.head(h + self.scale * self.mix(h, h, h, need_weights=False)[0])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(5, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


def odd(kind: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    if kind == "batch norm":
        features = nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten()
        model = nn.Sequential(*features, nn.Linear(12, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 3))
        return model.double(), batches(6, 2, 4, 4)
    if kind == "lstm":
        return Recurrent().double(), batches(6, 4, 5, positions=(4,))
    if kind == "dropout":
        model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(8, 3))
        return model.double(), DATA[:6]
    model = Text(tied=kind == "tied").double()
    return model, [(labels(12, 4, classes=7, seed=t), labels(12, 4, classes=7, seed=t + 50)) for t in range(6)]


def small_lr(name: str) -> dict[str, float]:
    return {"lr": 0.1 * member(name, mlp()).param_groups[0]["lr"]}


@pytest.mark.filterwarnings("ignore:.*get the fallback's update")  # most of an LSTM, of members with a layer's inputs
@pytest.mark.parametrize("kind", ["batch norm", "text", "tied", "lstm", "dropout"])
@pytest.mark.parametrize("name", MEMBERS)
def test_odd_layers(name: str, kind: str):
    model, data = odd(kind)
    options = {"likelihood": lw.likelihoods.Categorical(class_axis=-1)} if name == "KFAC sampled" else {}
    opt = member(name, model, **small_lr(name), **options)
    before = {k: p.detach().clone() for k, p in model.named_parameters()}
    for batch in data:
        train_step(model, opt, batch, cross_entropy)
    assert sane(model)
    text = repr(opt)
    for key, p in model.named_parameters():
        assert key in text
        if key != "mix.in_proj_bias":
            assert not torch.equal(p, before[key]), key


def test_batch_norm_statistics_are_moved_by_the_users_forwards_alone():
    a, data = odd("batch norm")
    b = copy.deepcopy(a)
    opt = lw.optim.KFAC(a, lr=0.0, likelihood="categorical", scale="formula")
    for x, y in data[:3]:
        train_step(a, opt, (x, y), cross_entropy)
        b(x)
    for key, value in b.named_buffers():
        assert torch.equal(value, dict(a.named_buffers())[key]), key


def test_a_model_that_is_one_layer():
    """The root itself is what is recorded."""
    for name in MEMBERS:
        model = nn.Linear(5, 3).double()
        opt = member(name, model)
        before = flat(model)
        for batch in DATA[:3]:
            train_step(model, opt, batch, cross_entropy)
        assert sane(model)
        assert not torch.equal(flat(model), before)


# --- long runs --------------------------------------------------------------------------------------------


def _objects() -> int:
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.parametrize("name", ["KFAC sampled", "EKFAC", "NGD"])
def test_long_runs_leave_no_objects_behind(name: str):
    """150 steps, with forwards that are never differentiated among them."""
    _does_not_grow(name, 150)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["KFAC", "KFAC sampled", "EKFAC", "NGD", "Shampoo", "SOAP", "Muon"])
def test_ten_thousand_steps_leave_no_memory_behind(name: str):
    _does_not_grow(name, 10_000)


def _resident() -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def _does_not_grow(name: str, steps: int) -> None:
    model = mlp(3, 4, 3)
    opt = member(name, model)
    x, y = gaussian(4, 3), labels(4)

    def some(count: int) -> None:
        for t in range(count):
            train_step(model, opt, (x, y), cross_entropy)
            if t % 50 == 0:
                model(x)
            for group in opt.param_groups:
                group["lr"] = 0.0

    some(60)
    objects, memory = _objects(), _resident()
    some(steps)
    assert _objects() - objects < 200
    assert _resident() - memory < 8_000 + steps  # kB


# --- wrong options ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "sampled"}, "without a likelihood.*empirical"),
        ({"estimator": "exact"}, "without a likelihood"),
        ({"estimator": "guessed"}, "estimator='guessed'"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"damping": -1.0}, "damping=-1.0"),
        ({"damping": float("nan")}, "damping=nan"),
        ({"damping": "automatic"}, "damping='automatic'"),
        ({"damping_scale": "huge"}, "damping_scale='huge'"),
        ({"damping_split": "half"}, "half"),
        ({"factor_every": 0}, "factor_every=0"),
        ({"refresh_every": 0}, "refresh_every=0"),
        ({"factor_decay": 1.0}, "factor_decay=1.0"),
        ({"sharing": "mixed"}, "sharing='mixed'"),
        ({"graft": "sgd"}, "graft='sgd'"),
        ({"clip": 0.0}, "clip=0.0"),
        ({"clip": ("size", 1.0)}, "clip="),
        ({"update_fallback": "lion"}, "update_fallback='lion'"),
        ({"loss_average": "words"}, "loss_average='words'"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"cuda_graphs": "no"}, "cuda_graphs='no'.*True, False or None"),
        ({"cuda_graphs": 1}, "cuda_graphs=1"),
        ({"samples": 0, "likelihood": "categorical"}, "samples"),
        ({"overrides": {"nothing": {"lr": 1.0}}}, "matches no layer"),
        ({"overrides": {"0": {"rank": 1}}}, "rank"),
        ({"overrides": {"0": {"lr": -1.0}}}, "lr"),
        ({"overrides": {"0": {"update": "never"}}}, "never"),
    ],
)
def test_options_that_are_wrong(options: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        lw.optim.KFAC(mlp(), **options, scale="formula")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: lw.optim.Layerwise(m, left="inputs"), "left='inputs'"),
        (lambda m: lw.optim.Layerwise(m, right="outgrads"), "right='outgrads'"),
        (lambda m: lw.optim.Layerwise(m, basis="polar"), "basis='polar'"),
        (lambda m: lw.optim.EKFAC(m, scaling="none of these", scale="formula"), "scaling"),
        (lambda m: lw.optim.Muon(m, orthogonalize="qr", scale="formula"), "orthogonalize='qr'"),
        (lambda m: lw.optim.Muon(m, adjust="rms", scale="formula"), "adjust='rms'"),
        (lambda m: lw.optim.NGD(m, method="lu"), "method='lu'"),
        (lambda m: lw.optim.NGD(m, factor_every=2), "factor_every"),
    ],
)
def test_members_that_are_wrong(make, message: str):
    with pytest.raises(InputError, match=message):
        make(mlp())


def test_an_unknown_option_is_a_type_error():
    with pytest.raises(TypeError, match="learning_rate"):
        lw.optim.KFAC(mlp(), learning_rate=0.1, scale="formula")


@pytest.mark.parametrize("name", OBSERVERS)
def test_a_step_before_any_forward(name: str):
    model = mlp()
    early = cross_entropy(model(DATA[0][0]), DATA[0][1])
    opt = member(name, model)
    early.backward()
    with pytest.raises(LayerwiseError, match="before it has seen a training forward"):
        opt.step()


def test_a_model_without_trainable_parameters():
    model = mlp().requires_grad_(False)
    with pytest.raises(ValueError, match="without trainable parameters"):
        lw.optim.KFAC(model, scale="formula")


# --- adaptive damping -------------------------------------------------------------------------------------


def test_adaptive_damping_that_is_told_nothing_is_an_error_by_the_second_step():
    model = mlp()
    opt = lw.optim.KFAC(model, damping="adaptive", scale="formula")
    train_step(model, opt, DATA[0], cross_entropy)
    with pytest.raises(LayerwiseError, match="without a loss"):
        train_step(model, opt, DATA[1], cross_entropy)


def test_adaptive_damping_by_closures():
    """It goes down while the model predicts well, and the gradients are put back."""
    model = mlp()
    opt = lw.optim.KFAC(
        model, lr=0.01, damping="adaptive", momentum=0.0, likelihood="categorical", estimator="exact", scale="formula"
    )
    x, y = DATA[0]

    def closure() -> Tensor:
        opt.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    start = opt.param_groups[0]["damping"]
    losses = [float(opt.step(closure)) for _ in range(20)]
    assert losses[-1] < losses[0]
    assert opt.param_groups[0]["damping"] < start
    before = flat(model)
    expected = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
    opt.step(closure)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))
    assert not torch.equal(flat(model), before)


def test_adaptive_damping_by_results():
    """Told that the loss went up, it rises; told that it fell as predicted, it falls; it survives a restart."""
    model = mlp()
    opt = lw.optim.KFAC(model, lr=0.01, damping="adaptive", momentum=0.0, scale="formula")
    loss = train_step(model, opt, DATA[0], cross_entropy)
    before = opt.param_groups[0]["damping"]
    opt.step_result(loss + 1.0, before=loss)
    assert opt.param_groups[0]["damping"] > before
    raised = opt.param_groups[0]["damping"]
    loss = train_step(model, opt, DATA[0], cross_entropy)
    opt.step_result(loss - 10.0, before=loss)
    assert opt.param_groups[0]["damping"] < raised
    again = lw.optim.KFAC(mlp(), damping="adaptive", scale="formula")
    again.load_state_dict(opt.state_dict())
    train_step(again.model, again, DATA[0], cross_entropy)
    assert again.param_groups[0]["damping"] == opt.param_groups[0]["damping"]


# --- graft and clip ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("graft", ["gradient", "adam"])
@pytest.mark.parametrize("name", ["KFAC", "Shampoo", "FOOF", "SOAP", "Muon"])
def test_grafting_takes_a_norm_and_keeps_the_direction(name: str, graft: str):
    options = {"momentum": 0.0} if name in ("KFAC", "Shampoo", "FOOF") else {}
    if name == "SOAP":
        options = {"skip_first": False}
    if name == "KFAC":
        options["clip"] = None
    a, b = mlp(), mlp()
    plain = member(name, a, lr=1.0, weight_decay=0.0, **options, graft=None)
    grafted = member(name, b, lr=1.0, weight_decay=0.0, **options, graft=graft)
    start = [p.detach().clone() for p in a.parameters()]
    train_step(a, plain, DATA[0], cross_entropy)
    train_step(b, grafted, DATA[0], cross_entropy)
    joint = name in ("KFAC", "FOOF")
    for layer in (0, 2, 4):
        steps = []
        for model in (a, b):
            parts = [model[layer].weight - start[layer], model[layer].bias.unsqueeze(1) - start[layer + 1].unsqueeze(1)]
            steps.append(torch.cat(parts, 1) if joint else parts[0])
        G = torch.cat([a[layer].weight.grad, a[layer].bias.grad.unsqueeze(1)], 1) if joint else a[layer].weight.grad
        wanted = G if graft == "gradient" else G / (G.abs() + 1e-8)
        cosine = torch.nn.functional.cosine_similarity(steps[0].flatten(), steps[1].flatten(), 0)
        assert cosine > 1 - 1e-9
        assert abs(steps[1].norm() / wanted.norm() - 1) < 1e-6


def test_clipping_by_the_predicted_change():
    """``η² Σ ⟨D, ∇L⟩ ≤ κ``: the whole step is scaled by one number, and left alone below the bound."""
    kappa = 1e-4
    a, b = mlp(), mlp()
    plain = lw.optim.KFAC(a, lr=0.1, momentum=0.0, clip=None, scale="formula")
    clipped = lw.optim.KFAC(b, lr=0.1, momentum=0.0, clip=kappa, scale="formula")
    start = flat(a)
    train_step(a, plain, DATA[0], cross_entropy)
    train_step(b, clipped, DATA[0], cross_entropy)
    step, short = flat(a) - start, flat(b) - start
    gradient = torch.cat([p.grad.reshape(-1) for p in a.parameters()])
    change = -0.1 * float(step @ gradient)
    assert change > kappa
    assert torch.allclose(short, step * (kappa / change) ** 0.5, atol=1e-12)
    c = mlp()
    loose = lw.optim.KFAC(c, lr=0.1, momentum=0.0, clip=("kl", 10 * change), scale="formula")
    train_step(c, loose, DATA[0], cross_entropy)
    assert torch.equal(flat(c), flat(a))


def test_clipping_by_the_norm():
    a, b = mlp(), mlp()
    plain = lw.optim.KFAC(a, lr=0.1, momentum=0.0, clip=None, scale="formula")
    clipped = lw.optim.KFAC(b, lr=0.1, momentum=0.0, clip=("norm", 0.5), scale="formula")
    start = flat(a)
    train_step(a, plain, DATA[0], cross_entropy)
    train_step(b, clipped, DATA[0], cross_entropy)
    step, short = flat(a) - start, flat(b) - start
    assert step.norm() > 0.05
    assert torch.allclose(short, step / step.norm() * 0.05, atol=1e-12)


# --- the report -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MEMBERS)
def test_the_print_lists_every_parameter_before_and_after_the_first_step(name: str):
    model, data = odd("text")
    opt = member(name, model, **({"likelihood": None} if name == "KFAC sampled" else {}))
    for _ in range(2):
        text = repr(opt)
        assert text.startswith(type(opt).__name__)
        assert "scale=formula" in text
        for key, _p in model.named_parameters():
            assert key in text
        train_step(model, opt, data[0], cross_entropy)


def test_the_health_report():
    model = mlp()
    opt = lw.optim.KFAC(model, lr=0.01, refresh_every=2, scale="formula")
    for batch in DATA[:4]:
        train_step(model, opt, batch, cross_entropy)
    health = opt.health()
    assert (health.steps, health.skipped_steps, health.skipped_statistics, health.fallbacks) == (4, 0, 0, 0)
    assert health.refreshes >= 6
    assert set(health.condition) == set(health.damping) == {"0", "2", "4"}
    assert all(value >= 1 for value in health.condition.values())
    assert all(value > 0 for value in health.damping.values())


def test_clipping_comes_before_momentum():
    """The momentum may point against the gradient; then a clip of their product would let any step pass.

    What a step adds to the momentum, ``Δ_t − μ Δ_{t−1}``, is the bare step at the same weights, scaled to the bound.
    """
    eta, mu, kappa = 0.1, 0.9, 1e-4
    a, b = mlp(), mlp()
    opt = lw.optim.KFAC(a, lr=eta, momentum=mu, clip=kappa, refresh_every=1, scale="formula")
    bare = lw.optim.KFAC(b, lr=eta, momentum=0.0, clip=None, refresh_every=1, scale="formula")
    last = torch.zeros_like(flat(a))
    for batch in DATA[:8]:
        before = flat(a)
        b.load_state_dict(a.state_dict())
        train_step(a, opt, batch, cross_entropy)
        train_step(b, bare, batch, cross_entropy)
        step, own = flat(a) - before, flat(b) - before
        change = -eta * float(own @ torch.cat([p.grad.reshape(-1) for p in a.parameters()]))
        assert change > kappa
        assert torch.allclose(step - mu * last, own * (kappa / change) ** 0.5, atol=1e-10)
        last = step


def test_two_optimizers_on_one_model_do_not_disturb_each_other():
    """Each sees the user's forward and backward alone, not what the other does with them."""
    options = {"KFAC": {}, "KFAC sampled": {"likelihood": "categorical"}}
    for own in options.values():
        a, b = mlp(), mlp()
        alone = lw.optim.KFAC(a, lr=0.01, **own, scale="formula")
        first = lw.optim.KFAC(b, lr=0.01, **own, scale="formula")
        others = [lw.optim.KFAC(b, likelihood="categorical", scale="formula"), lw.optim.FOOF(b, scale="formula")]
        for batch in DATA[:4]:
            train_step(a, alone, batch, cross_entropy)
            for other in others:
                other.zero_grad()
            train_step(b, first, batch, cross_entropy)
            assert torch.equal(flat(a), flat(b))


def test_the_fallback_has_no_momentum_on_top_of_its_own():
    """A bias under Shampoo is stepped as by Adam alone, whatever the momentum of the matrices."""
    a, b = mlp(), mlp()
    one, two = (lw.optim.Shampoo(m, lr=0.01, momentum=mu, scale="formula") for m, mu in ((a, 0.9), (b, 0.0)))
    train_step(a, one, DATA[0], cross_entropy)
    train_step(b, two, DATA[0], cross_entropy)
    assert torch.equal(a[0].bias, b[0].bias)
    state = {k: v for of in one.state_dict()["state"].values() for k, v in of.items()}
    biases = [of for of in state.values() if "m" in of]
    assert biases
    assert all("momentum" not in of for of in biases)


def test_a_parameter_that_was_unfrozen_is_an_error_until_it_is_added():
    model = mlp()
    model[2].requires_grad_(False)
    opt = lw.optim.KFAC(model, lr=0.01, scale="formula")
    train_step(model, opt, DATA[0], cross_entropy)
    model[2].requires_grad_(True)
    with pytest.raises(lw.LayerwiseError, match="add_param_group"):
        train_step(model, opt, DATA[1], cross_entropy)
    opt.add_param_group({"params": list(model[2].parameters())})
    before = model[2].weight.detach().clone()
    train_step(model, opt, DATA[2], cross_entropy)
    assert not torch.equal(model[2].weight, before)


def test_adaptive_damping_keeps_the_proportions_of_groups():
    model = mlp()
    opt = lw.optim.KFAC(
        model, lr=0.01, damping="adaptive", momentum=0.0, overrides={"0": {"damping": 0.5}}, scale="formula"
    )
    first = [group["damping"] for group in opt.param_groups]
    assert first[0] != first[1]
    for batch in DATA[:3]:
        train_step(model, opt, batch, cross_entropy)
        opt.step_result(100.0, before=1.0)  # much worse than predicted: more damping
        opt.step_result(100.0, before=1.0)  # told again of the same step: nothing more
    now = [group["damping"] for group in opt.param_groups]
    assert now[0] > first[0]
    assert now[0] / now[1] == pytest.approx(first[0] / first[1])
    assert now[0] / first[0] == pytest.approx((20 / 19) ** 3)


@pytest.mark.parametrize("name", ["KFAC", "SOAP"])
def test_a_step_under_autocast_is_the_same(name: str):
    """Products of a step have a precision of their own."""
    ends = []
    for under in (False, True):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        opt = getattr(lw.optim, name)(model, lr=1e-3, solver="products", refresh_every=1, scale="formula")
        for step in range(3):
            opt.zero_grad()
            model(torch.randn(16, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            with torch.autocast("cpu", torch.bfloat16, enabled=under):
                opt.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*ends)
