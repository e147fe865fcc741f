"""lw.linearized: f₀ + α (f − f₀) in any loop, its exact limit, and everything that would go wrong silently."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import layerwise as lw
from layerwise.foundations.errors import InputError, UnsupportedError
from layerwise.regimes import rescaled
from layerwise.regimes.passes import rounding

INF = math.inf


def network(seed: int = 0, dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Linear(6, 20), nn.ReLU(), nn.Dropout(dropout), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 3)]
        return nn.Sequential(*layers).to(dtype)


def data(n: int = 40, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 6, generator=generator, dtype=torch.float64)
    return x.to(dtype), (x @ torch.randn(6, 3, generator=generator, dtype=torch.float64)).argmax(1)


def train(net: nn.Module, opt: torch.optim.Optimizer, steps: int, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        loss = functional.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# --- what it computes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_initial", [True, False])
@pytest.mark.parametrize("alpha", [0.5, 3.0])
def test_outputs_are_the_formula(alpha: float, keep_initial: bool):
    model, (x, _) = network(), data()
    start = copy.deepcopy(model)
    net = lw.linearized(model, alpha, keep_initial)
    with torch.no_grad():
        assert torch.allclose(net(x), start(x) if keep_initial else 0 * start(x))
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
        expected = alpha * (model(x) - start(x)) + (start(x) if keep_initial else 0)
        assert torch.allclose(net(x), expected)


@pytest.mark.parametrize("keep_initial", [True, False])
def test_the_limit_is_the_tangent(keep_initial: bool):
    """Against a dense Jacobian; the gradient is its transpose, whatever the weights are."""
    model, (x, _) = network(), data(5)
    start = copy.deepcopy(model)
    net = lw.linearized(model, INF, keep_initial)
    columns = torch.func.jacrev(lambda w: torch.func.functional_call(start, w, (x,)))(dict(start.named_parameters()))
    J = torch.cat([c.detach().reshape(15, -1) for c in columns.values()], 1)
    with torch.no_grad():
        for p in model.parameters():
            p += torch.randn_like(p)
    moved = (J @ (flat(model) - flat(start))).view(5, 3)
    assert torch.allclose(net(x), moved + start(x) if keep_initial else moved)
    u = torch.randn(5, 3, dtype=torch.float64)
    grads = torch.autograd.grad((net(x) * u).sum(), list(model.parameters()))
    assert torch.allclose(torch.cat([g.flatten() for g in grads]), J.mT @ u.flatten())


def test_a_large_alpha_is_the_linear_run():
    """100 steps with momentum: weights, outputs and losses within 1e-3 of the exact limit."""
    (x, y), found = data(), {}
    for alpha in (1e4, INF):
        model = network()
        start = flat(model)
        net = lw.linearized(model, alpha)
        opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        losses = train(net, rescaled(opt, alpha) if alpha < INF else opt, 100, x, y)
        scale = alpha if alpha < INF else 1.0
        found[alpha] = (torch.tensor(losses), scale * (flat(model) - start), net(x).detach())
    for a, b in zip(found[1e4], found[INF], strict=True):
        assert (a - b).norm() <= 1e-3 * b.norm()
    assert found[INF][0][-1] < 0.6 * found[INF][0][0]


def test_alpha_one_is_the_plain_model():
    (x, y), plain = data(), network()
    other = copy.deepcopy(plain)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), 20, x, y)
    net = lw.linearized(other, alpha=1)
    train(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), 20, x, y)
    assert torch.equal(flat(plain), flat(other))


def test_first_steps_move_outputs_equally_for_every_alpha():
    """What the 1/α² is for."""
    (x, y), moved = data(), {}
    for alpha in (1.5, 30.0, 1000.0):
        net = lw.linearized(network(), alpha)
        before = net(x).detach()
        train(net, rescaled(torch.optim.SGD(net.parameters(), lr=1e-3), alpha), 1, x, y)
        moved[alpha] = net(x).detach() - before
    assert (moved[1.5] - moved[1000.0]).norm() < 0.02 * moved[1000.0].norm()
    assert (moved[30.0] - moved[1000.0]).norm() < 0.001 * moved[1000.0].norm()


def test_linearity_while_the_loss_halves():
    net, (x, y) = lw.linearized(network(), 1e4), data()
    measures = lw.regimes.sign_similarity, lw.regimes.kernel_alignment, lw.regimes.representation_alignment
    assert all(measure(net, x) == pytest.approx(1, abs=1e-12) for measure in measures)
    losses = train(net, rescaled(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), 1e4), 90, x, y)
    assert losses[-1] < losses[0] / 2
    assert all(measure(net, x) > 0.99 for measure in measures)


def test_adaptive_training_is_not_linear():
    """The same measures notice feature learning."""
    net, (x, y) = lw.linearized(network(), 0.5), data()
    train(net, rescaled(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), 0.5), 60, x, y)
    assert lw.regimes.sign_similarity(net, x) < 0.95
    assert lw.regimes.kernel_alignment(net, x) < 0.95


# --- any model, any loop -------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Tied weights, padding, a recurrent layer, attention with dropout; a dictionary of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 8, padding_idx=0)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.mixed = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.mixed(self.recurrent(self.words(tokens))[0])
        return {"logits": self.head(h), "length": (tokens > 0).sum(1)}


@pytest.mark.parametrize("alpha", [10.0, INF])
def test_an_odd_model(alpha: float):
    tokens = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0]])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Odd().double().eval()
    start = copy.deepcopy(model)
    net = lw.linearized(model, alpha, remind=False)
    assert [id(p) for p in net.parameters()] == [id(p) for p in model.parameters()]
    assert torch.allclose(net(tokens)["logits"], start(tokens)["logits"])
    assert torch.equal(net(tokens)["length"], torch.tensor([3, 2]))
    with torch.no_grad():
        for p in model.parameters():
            p += 1e-6 * torch.randn_like(p)
    scale = alpha if alpha < INF else 1.0
    expected = start(tokens)["logits"] + scale * (model(tokens)["logits"] - start(tokens)["logits"])
    if alpha < INF:
        assert torch.allclose(net(tokens)["logits"], expected, atol=1e-12)
    net(tokens)["logits"].sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("alpha", [10.0, INF])
def test_the_limit_of_tied_weights_and_padding(alpha: float):
    """Small moves agree with the model itself to first order, and so do gradients: padding has none as input."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(5, 4, padding_idx=0)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.words.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.words(tokens)))

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Tied().double()
    start, tokens = copy.deepcopy(model), torch.tensor([[1, 2, 0], [3, 0, 0]])
    net = lw.linearized(model, alpha, remind=False)
    with torch.no_grad():
        model.words.weight += 1e-6 * torch.randn(5, 4, dtype=torch.float64)
    scale = alpha if alpha < INF else 1.0
    expected = start(tokens) + scale * (model(tokens) - start(tokens))
    assert torch.allclose(net(tokens), expected, atol=1e-10, rtol=0)
    (ours,) = torch.autograd.grad(net(tokens).sum(), model.words.weight)
    (theirs,) = torch.autograd.grad(scale * model(tokens).sum(), model.words.weight)
    assert torch.allclose(ours, theirs, atol=1e-4)
    as_input = torch.autograd.grad(net(tokens).sum(), model.words.weight)[0][0]  # of the head alone
    assert torch.allclose(as_input, scale * torch.tanh(start.words(tokens)).sum((0, 1)), atol=1e-4)


def test_dropout_noise_is_the_same_in_both_passes():
    model, (x, _) = network(dropout=0.5), data()
    net = lw.linearized(model, 100.0)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first = net(x)
        after = torch.rand(3)
        torch.manual_seed(3)
        expected = model(x)
        assert torch.allclose(first, expected)  # f = f₀ under the same noise, so that α has nothing to scale
        assert torch.equal(torch.rand(3), after)
        assert not torch.allclose(net(x), expected)


def test_modes_of_single_modules_are_followed():
    model, (x, _) = network(dropout=0.5), data()
    net = lw.linearized(model, 100.0)
    net.train()
    model[2].eval()
    assert torch.allclose(net(x), net.at_start(x))
    assert torch.equal(net(x), net(x))


def test_a_checkpoint_resumes_exactly(tmp_path):
    (x, y), alpha = data(), 20.0
    net = lw.linearized(network(), alpha)
    opt = rescaled(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), alpha)
    train(net, opt, 5, x, y)
    torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, tmp_path / "state.pt")
    train(net, opt, 5, x, y)

    again = lw.linearized(network(seed=9), alpha)
    other = rescaled(torch.optim.SGD(again.parameters(), lr=0.05, momentum=0.9), alpha)
    state = torch.load(tmp_path / "state.pt")
    again.load_state_dict(state["net"])
    other.load_state_dict(state["opt"])
    train(again, other, 5, x, y)
    assert torch.equal(flat(again), flat(net))
    assert torch.equal(again.at_start(x), net.at_start(x))
    with pytest.raises(InputError, match="checkpoint"):
        lw.linearized(network(), 30.0).load_state_dict(state["net"])


def test_hooks_are_part_of_the_model():
    """They may change what a module returns, so that both passes have them; but for those of our own optimizers."""
    model, (x, _) = network(), data()
    model[0].register_forward_hook(lambda module, given, out: 2 * out)
    lw.optim.KFAC(model, likelihood="categorical")
    net = lw.linearized(model, 10.0, remind=False)
    assert torch.allclose(net(x), model(x))
    own = [hook for module in net.start.modules() for hook in module._forward_hooks.values()]
    assert len(own) == 1


def test_gradients_in_the_inputs():
    """A linearized head on a trained body: α scales what the head has learned, not the body's gradient."""
    model, (x, _) = network().double(), data()
    x = x.double().requires_grad_()
    net = lw.linearized(model, 100.0, remind=False)
    (plain,) = torch.autograd.grad(model(x).sum(), x)
    (ours,) = torch.autograd.grad(net(x).sum(), x)
    assert torch.allclose(ours, plain)
    with torch.no_grad():
        model[0].weight.mul_(1.01)
    assert torch.autograd.gradcheck(net, (x[:2].detach().requires_grad_(),))
    with pytest.raises(InputError, match="inputs that need a gradient"):
        net(x, at_start=net.at_start(x))


def test_padded_transformers_in_eval_mode():
    """Of torch's two paths both passes take the same: one of them sets padded positions to zero."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.mixed, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 3)

        def forward(self, x, pad):
            return self.head(self.mixed(x, src_key_padding_mask=pad).mean(1))

    model, x, pad = Padded(), torch.randn(4, 5, 8), torch.zeros(4, 5, dtype=torch.bool)
    pad[0, 3:] = True
    net = lw.linearized(model, 100.0, remind=False).eval()
    with torch.no_grad():
        assert torch.allclose(net(x, pad), net.at_start(x, pad), atol=1e-4)


def test_what_is_neither_scaled_nor_refused_would_be_wrong():
    class Out:
        def __init__(self, logits) -> None:
            self.logits = logits

    class Wrapped(nn.Linear):
        def forward(self, x):
            return Out(super().forward(x))

    with pytest.raises(InputError, match="an output of type Out"):
        lw.linearized(Wrapped(4, 3), 10.0)(torch.randn(5, 4))

    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            if self.training:
                self.mean.mul_(0.9).add_(0.1 * x.mean(0))
            return super().forward(x - self.mean)

    net = lw.linearized(Counting(), 10.0, remind=False)
    with pytest.raises(InputError, match="changes its buffer 'mean'"):
        net(torch.randn(5, 4))
    net.eval()(torch.randn(5, 4))


def test_tied_weights_are_tied_at_the_start():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.last.weight = self.first.weight

        def forward(self, x):
            return self.last(torch.tanh(self.first(x)))

    x = torch.randn(8, 3, dtype=torch.float64)
    for alpha in (10.0, INF):
        net = lw.linearized(Tied().double(), alpha)
        assert lw.regimes.kernel_alignment(net, x) == pytest.approx(1)
        assert torch.allclose(net(x), net.model(x))


def test_coarser_rounding_later_is_noticed():
    model, (x, _) = network(), data()
    net = lw.linearized(model, 100.0, remind=False)
    net(x)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match="bfloat16"):
        net(x)


def test_noise_of_any_module_and_a_given_start():
    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(nn.functional.dropout(x, 0.5, self.training))

    x = torch.randn(5, 4)
    net = lw.linearized(Noisy(4, 3), 10.0, remind=False)
    with pytest.raises(InputError, match="draws random numbers"):
        net(x, at_start=net.at_start(x))
    net.eval()
    assert torch.equal(net(x, at_start=net.at_start(x)), net(x))


def test_outputs_of_the_start_can_be_given():
    model, (x, _) = network(), data()
    net = lw.linearized(model, 10.0)
    f0 = net.at_start(x)
    with torch.no_grad():
        model[0].weight += 0.1
    calls = []
    net.start.register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(net(x[3:7], at_start=f0[3:7]), net(x[3:7]))
    assert len(calls) == 1
    assert not f0.requires_grad


def test_our_own_sgd_and_the_table_of_layers():
    (x, y), alpha = data(dtype=torch.float32), 5.0
    found = []
    for make in (torch.optim.SGD, lambda p, **o: lw.optim.SGD(p, **o)):
        net = lw.linearized(network(dtype=torch.float32), alpha)
        train(net, rescaled(make(net.parameters(), lr=0.1, momentum=0.9), alpha), 10, x, y)
        found.append(flat(net))
    assert torch.allclose(*found, atol=1e-5)
    assert len(lw.layers(lw.linearized(network(), 2.0))) == 3


def test_its_tangent_kernel_is_scaled():
    model, (x, _) = network(), data(6)
    net = lw.linearized(model, 3.0, remind=False)
    assert torch.allclose(lw.ntk(net, x).matrix(), 9 * lw.ntk(model, x).matrix())


# --- refused -------------------------------------------------------------------------------------------------


def test_batch_norm_in_train_mode_is_refused():
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).double()
    net, (x, y) = lw.linearized(model, 10.0, remind=False), data()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match="batch norm"):
        net(x)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    model[1].eval()
    functional.cross_entropy(net(x), y).backward()
    assert model[1].weight.grad is not None
    with pytest.raises(InputError, match="batch norm"):
        lw.linearized(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, track_running_stats=False)), 2.0).eval()(x)


def test_rounding_is_refused_with_both_cures():
    model = network(dtype=torch.float32)
    with torch.no_grad():
        model[-1].bias += 50
    with pytest.raises(InputError, match=r"model\.double\(\).*inf"):
        lw.linearized(model, 1e4)(data()[0].float())
    lw.linearized(model.double(), 1e4)(data()[0])
    lw.linearized(model.float(), INF)(data()[0].float())


def test_coarser_products_are_noticed():
    """Autocast; and TF32, which is what convolutions on a GPU have unless one says otherwise."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert rounding(torch.float32, "cpu", False) == (torch.finfo(torch.bfloat16).eps, "bfloat16")
    assert rounding(torch.float32, "cpu", True)[0] == torch.finfo(torch.float32).eps
    assert rounding(torch.float64, "cuda", True)[0] == torch.finfo(torch.float64).eps
    assert rounding(torch.float32, "cuda", False)[1] == "float32"
    before = torch.backends.cudnn.allow_tf32
    try:
        for allowed, kind in ((True, "TF32"), (False, "float32")):
            torch.backends.cudnn.allow_tf32 = allowed
            assert rounding(torch.float32, "cuda", True)[1] == kind
    finally:
        torch.backends.cudnn.allow_tf32 = before


def test_given_start_with_dropout_is_refused():
    net, (x, _) = lw.linearized(network(dropout=0.5), 10.0), data()
    with pytest.raises(InputError, match="dropout"):
        net(x, at_start=net.at_start(x))
    net.eval()
    with pytest.raises(InputError, match="Index both"):
        net(x[:5], at_start=net.at_start(x)[:1])


@pytest.mark.parametrize("alpha", [0, -1.0, math.nan, True, "100"])
def test_bad_alpha(alpha):
    with pytest.raises((InputError, TypeError)):
        lw.linearized(network(), alpha)


def test_bad_models():
    with pytest.raises(InputError, match="linearized yet"):
        lw.linearized(lw.linearized(network(), 2.0), 2.0)
    with pytest.raises(InputError, match="trainable"):
        lw.linearized(network().requires_grad_(False), 2.0)
    with pytest.raises(InputError, match="lazy"):
        lw.linearized(nn.LazyLinear(3), 2.0)


# --- the rate ------------------------------------------------------------------------------------------------


def test_rates_are_divided_by_the_square_of_alpha():
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.4}, {"params": model[3].parameters()}]
    opt = rescaled(torch.optim.SGD(groups, lr=0.1, momentum=0.9), alpha=10)
    assert [group["lr"] for group in opt.param_groups] == pytest.approx([0.004, 0.001])
    assert [group["momentum"] for group in opt.param_groups] == [0.9, 0.9]


@pytest.mark.parametrize(
    "make",
    [
        lambda m: torch.optim.Adam(m.parameters()),
        lambda m: torch.optim.AdamW(m.parameters()),
        lambda m: torch.optim.RMSprop(m.parameters()),
        lambda m: lw.optim.Adam(m),
        lambda m: lw.optim.Sign(m),
        lambda m: lw.optim.Muon(m),
        lambda m: lw.optim.SOAP(m),
        lambda m: lw.optim.Shampoo(m),
        lambda m: lw.optim.SGD(m, clip=1e-3),
    ],
)
def test_optimizers_that_would_undo_it_are_refused(make):
    opt = make(network(dtype=torch.float32))
    rates = [group["lr"] for group in opt.param_groups]
    with pytest.raises(UnsupportedError, match=r"SGD|options"):
        rescaled(opt, 10)
    assert [group["lr"] for group in opt.param_groups] == rates


def test_weight_decay_a_second_call_and_a_schedule_are_refused():
    model = network()
    with pytest.raises(InputError, match="weight_decay"):
        rescaled(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-4), 10)
    opt = rescaled(torch.optim.SGD(model.parameters(), lr=0.1), 10)
    with pytest.raises(InputError, match="once"):
        rescaled(opt, 10)
    assert opt.param_groups[0]["lr"] == pytest.approx(0.001)
    scheduled = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(scheduled, 10)
    with pytest.raises(InputError, match="schedule"):
        rescaled(scheduled, 10)
    for alpha in (0, INF, -1, math.nan):
        with pytest.raises(InputError, match="alpha"):
            rescaled(torch.optim.SGD(model.parameters(), lr=0.1), alpha)


def test_a_forgotten_rate_is_noticed_once():
    (x, y), model = data(), network()
    net = lw.linearized(model, 10.0)
    opt = torch.optim.SGD(net.parameters(), lr=1e-6)
    with pytest.warns(UserWarning, match="rescaled"):
        train(net, opt, 1, x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(net, opt, 1, x, y)  # once is enough
        for alpha, remind in ((1.0, True), (INF, True), (10.0, False)):
            other = lw.linearized(network(), alpha, remind=remind)
            train(other, torch.optim.SGD(other.parameters(), lr=1e-6), 1, x, y)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")  # Python's own, which is silent about what it has said before
        for _ in range(3):
            other = lw.linearized(network(), 10.0)
            train(other, torch.optim.SGD(other.parameters(), lr=1e-6), 1, x, y)
    assert len(said) == 3
    assert not any("autograd" in warning.filename for warning in said)  # a line of the user, not where torch goes back
    wrong = lw.linearized(network(), 10.0)
    with pytest.warns(UserWarning, match="alpha=3"):
        train(wrong, rescaled(torch.optim.SGD(wrong.parameters(), lr=0.1), 3.0), 1, x, y)


def test_states_and_groups_of_a_rescaled_optimizer():
    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = rescaled(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 10)
    opt.load_state_dict(plain.state_dict())  # of the run that both regimes are forked from
    assert opt.param_groups[0]["lr"] == pytest.approx(0.001)
    opt.load_state_dict(opt.state_dict())
    assert opt.param_groups[0]["lr"] == pytest.approx(0.001)
    opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert opt.param_groups[1]["lr"] == pytest.approx(0.001)
    with pytest.raises(InputError, match="alpha=10"):
        rescaled(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 3).load_state_dict(
            rescaled(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 10).state_dict()
        )
