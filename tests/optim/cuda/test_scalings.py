"""Averages in bfloat16, EKFAC's scalings and the momentum of EKFAC and SOAP: when they are kept so, how precise steps
are, and what is saved. On a CPU by force."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_objects import FALSE, NEWTON, TRUE, context_at, device_step, initial_state, matrix, set_factors
from optim_tools import flat
from test_padding import made, tensors, train
from torch import Tensor

import layerwise as lw
from layerwise.optim import rule as rules
from layerwise.optim.cuda import backend, scalings
from layerwise.optim.cuda.backend import CudaBackend
from layerwise.optim.cuda.deferred_examples import PENDING
from layerwise.optim.engine import Layerwise
from layerwise.optim.members.ekfac import CorrectedEigenvalues
from layerwise.optim.members.soap import RotatedAdam
from layerwise.optim.rule import Context, Shape, State
from random_tensors import randn64 as randn

pytestmark = pytest.mark.usefixtures("untyped")
CPU, BOTH = torch.device("cpu"), slice(0, 2)
LIMIT, DAMPING, EXAMPLES, EVERY = 1e-2, 1e-3, 8, 4


@pytest.fixture(autouse=True)
def _rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the kernels run."""
    monkeypatch.setattr(scalings, "available", lambda device: True)


# --- when ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"scaling": "batch", "scaling_decay": 0.999}, torch.bfloat16),  # which has no average
        ({"scaling": "running"}, torch.bfloat16),
        ({"scaling": "running", "scaling_decay": 0.8}, torch.bfloat16),
        ({"scaling": "running", "scaling_decay": 0.9}, torch.float32),
        ({"scaling": "none"}, torch.float32),
        ({"sua": True}, torch.float32),
    ],
)
def test_when_scalings_are_rounded(options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    rule, shape = CorrectedEigenvalues(**options), Shape(2, 3, 4, torch.float32, CPU)
    assert rule.init(shape, CudaBackend())["s"].dtype == torch.float32  # by eigh
    state = initial_state(rule, shape)
    assert state["s"].dtype == dtype
    assert {X.dtype for name, X in rules.tensors(state).items() if name != "s"} <= {torch.float32, torch.float16}
    assert initial_state(rule, Shape(2, 3, 4, torch.float64, CPU))["s"].dtype == torch.float64
    monkeypatch.undo()
    assert initial_state(rule, shape)["s"].dtype == torch.float32


def test_moments_of_soap_are_not_rounded():
    assert initial_state(RotatedAdam(), Shape(2, 3, 4, torch.float32, CPU))["V"].dtype == torch.float32


@pytest.mark.parametrize(
    ("beta", "solver", "precision", "dtype"),
    [
        (0.9, "products", "half", torch.bfloat16),
        (0.95, "products", "half", torch.bfloat16),
        (0.99, "products", "half", torch.float32),  # which lasts too long
        (0.9, "products", "high", torch.float32),
        (0.9, "eigh", "half", torch.float32),
    ],
)
def test_when_momentum_is_rounded(beta: float, solver: str, precision: str, dtype: torch.dtype):
    rule, shape = RotatedAdam(betas=(beta, 0.99)), Shape(2, 3, 4, torch.float32, CPU)
    assert rule.init(shape, CudaBackend(solver, precision))["M"].dtype == dtype
    wide = Shape(2, 3, 4, torch.float64, CPU)
    assert rule.init(wide, CudaBackend(solver, precision))["M"].dtype == torch.float64


@pytest.mark.parametrize(
    ("options", "dtypes"),
    [
        ({}, (torch.bfloat16, torch.bfloat16)),
        ({"momentum": 0.99}, (torch.float32, torch.float32)),
        ({"betas": (0.99, 0.999)}, (torch.float32, torch.float32)),
        ({"overrides": {"0": {"momentum": 0.99}}}, (torch.float32, torch.bfloat16)),
        ({"precision": "high"}, (torch.float32, torch.float32)),
        ({"solver": "eigh"}, (torch.float32, torch.float32)),
    ],
    ids=str,
)
def test_when_momentum_of_ekfac_is_rounded(options: dict[str, Any], dtypes: tuple[torch.dtype, ...]):
    """By the momentum of each layer's own group."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    how = {"solver": "products", "precision": "half", "scaling": "running"} | options
    opt = lw.optim.EKFAC(model, **how)
    torch.nn.functional.cross_entropy(model(torch.randn(6, 5)), torch.arange(6) % 3).backward()
    opt.step()
    kept = {name: stack.state["M"].dtype for stack in opt._stacks or [] for name in stack.params if "M" in stack.state}
    assert (kept["0.weight"], kept["2.weight"]) == dtypes


# --- precision -------------------------------------------------------------------------------------------------


def factor(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """A factor of condition 1e6 with its root."""
    U, values = torch.linalg.qr(randn(2, n, n, seed=seed))[0], torch.logspace(0, -6, n, dtype=torch.float64)
    return (U * values) @ U.mT, (U * values.sqrt()) @ U.mT


def rule_and_state(device: str, **options: Any) -> tuple[CorrectedEigenvalues, State, Shape, tuple[Tensor, Tensor]]:
    """A rule with a fresh basis, and the roots of its factors."""
    rule, shape = CorrectedEigenvalues(**options), Shape(2, 48, 64, torch.float32, torch.device(device))
    state = initial_state(rule, shape)
    (P, left), (Q, right) = factor(48, 1), factor(64, 2)
    set_factors(state, P=P, Q=Q)
    rule.refresh(state, BOTH, context_of(shape, 100))
    return rule, state, shape, (left, right)


def context_of(
    shape: Shape, step: int, G: Tensor | None = None, finite: Tensor | None = None, **options: Any
) -> Context:
    step_of = device_step(finite, G)
    return context_at(step, DAMPING, shape, gradient=G, examples=EXAMPLES, device_step=step_of, **options)


def damped(split: str, s: Tensor, state: State) -> Tensor:
    """In float64."""
    if split == "exact":
        return s + DAMPING * s.mean((-2, -1), keepdim=True)
    basis = state["basis"]
    s_P, s_Q = basis.values_P.double().cpu().unsqueeze(-1), basis.values_Q.double().cpu().unsqueeze(-2)
    left, right = (DAMPING**0.5 * values.mean((-2, -1), keepdim=True) for values in (s_P, s_Q))
    return s + left * s_Q + s_P * right + left * right


def errors(device: str, finite: Tensor | None, same: bool, steps: int, **options: Any) -> Iterator[float]:
    """Of the directions of one step after another, beside the rule in float64 in the same basis.

    Gradients are like those of the factors' own distribution, new at every step or always the same.
    """
    rule, state, shape, (left, right) = rule_and_state(device, scaling="running", **options)
    U, V = (matrix(state, side).double().cpu() for side in ("P", "Q"))
    values_P, values_Q = (values.double().cpu() for values in (state["basis"].values_P, state["basis"].values_Q))
    s, memory = values_P.unsqueeze(-1) * values_Q.unsqueeze(-2), {}
    finite = None if finite is None else finite.to(device)
    for step in range(steps):
        G = (left @ randn(2, 48, 64, seed=10 + (0 if same else step)) @ right / EXAMPLES**0.5).float().to(device)
        context = context_of(shape, 101 + step, G, finite, memory=memory)
        D = NEWTON.tensor(rule.direction(state, G, context)).double().cpu()
        R = U.mT @ G.double().cpu() @ V
        s = s.lerp(EXAMPLES * R.square(), 1 - rule.scaling_decay)
        expected = U @ (R / damped(rule.split, s, state)) @ V.mT
        yield float(((D - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)).max())
    assert state["s"].dtype == torch.bfloat16


@pytest.mark.parametrize("split", ["exact", "trace"])
@pytest.mark.parametrize("finite", [None, TRUE], ids=["eager", "asynchronous"])
def test_directions_are_precise(finite: Tensor | None, split: str, device: str):
    assert max(errors(device, finite, False, 20, split=split)) < LIMIT / 2


@pytest.mark.parametrize("decay", [0.75, scalings.MOST_DECAY])
def test_an_average_does_not_come_to_rest_far_from_what_it_averages(decay: float, device: str):
    """The same gradient at every step: what is new shrinks, and is soon less than the last bit."""
    assert max(errors(device, TRUE, True, 60, scaling_decay=decay)) < LIMIT


def test_a_longer_average_would(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scalings, "MOST_DECAY", 1.0)
    assert max(errors("cpu", TRUE, True, 60, scaling_decay=0.95)) > LIMIT


def test_sums_over_rounded_scalings_are_not_rounded():
    """What damping adds, the quadratic model and the health report: as of the same scalings in float32."""
    rule, state, shape, _ = rule_and_state("cpu", split="exact")
    wide, D, context = {**state, "s": state["s"].float()}, randn(2, 48, 64).float(), context_of(shape, 101)
    for found, expected in zip(rule._added(state, context), rule._added(wide, context), strict=True):
        assert found is expected or torch.equal(found, expected)  # type: ignore[arg-type]
    assert torch.equal(rule.quadratic(state, D), rule.quadratic(wide, D))  # type: ignore[arg-type]
    for found, expected in zip(
        rule.conditions(state, context) or (), rule.conditions(wide, context) or (), strict=True
    ):
        assert torch.equal(found, expected)
    first, second = (NEWTON.tensor(rule.direction(of, D, context)) for of in (state, wide))
    assert torch.equal(first, second)


def test_the_weight_of_an_average_is_not_rounded(monkeypatch: pytest.MonkeyPatch):
    """In bfloat16 0.3 would be 0.30078."""
    weights, average = [], backend.squares_ema_

    def noting(s: Tensor, R: Any, weight: Tensor, factor: int) -> Tensor:
        weights.append(weight)
        return average(s, R, weight, factor)

    monkeypatch.setattr(backend, "squares_ema_", noting)
    rule, state, shape, _ = rule_and_state("cpu", scaling="running", scaling_decay=0.7, split="trace")
    G = randn(2, 48, 64).float()
    rule.direction(state, G, context_of(shape, 101, G, TRUE))
    (weight,) = weights
    assert weight.dtype == torch.float32
    assert weight.tolist() == pytest.approx([0.3, 0.3], rel=1e-6)


@pytest.mark.parametrize("split", ["trace", "exact"])
def test_what_is_left_out_leaves_the_bits(split: str):
    """A step that is not taken, and in an eager one a group that is not finite."""
    for finite in (FALSE, None):
        rule, state, shape, _ = rule_and_state("cpu", scaling="running", split=split)
        G, before = randn(2, 48, 64).float(), state["s"].clone()
        G[1, 3, 5] = torch.nan
        rule.direction(state, G, context_of(shape, 101, G, finite))
        assert torch.equal(state["s"][1], before[1])
        assert torch.equal(state["s"][0], before[0]) == (finite is FALSE)


# --- in training -------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "running": {"scaling": "running"},
    "batch": {},
    "deferred": {"factor_every": EVERY, "examples_over": EVERY},
}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded, and asynchronous."""
    monkeypatch.setattr(backend, "PAD_TO", {"cpu": 16})
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))


def begun(name: str) -> tuple[Any, Layerwise]:
    model = made("words")
    options = {"lr": 0.005, "solver": "products", "refresh_every": EVERY} | OPTIONS[name]
    return model, lw.optim.EKFAC(model, **options, scale="formula")


def scalings_of(opt: Layerwise) -> list[Tensor]:
    return [stack.state["s"] for stack in opt._stacks or () if "s" in stack.state]


@pytest.mark.parametrize("name", ["running", "batch"])
@pytest.mark.parametrize("sync", [False, True])
def test_they_are_those_of_float32_rounded(name: str, sync: bool, monkeypatch: pytest.MonkeyPatch):
    """At the first step, where both have seen the same: rounded once, after all examples have been added up.

    Running ones are rounded twice, when a refresh begins them and with the first gradient.
    """
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: sync))
    found, sums, average = [], set(), backend.ema_

    def noting(mean: Tensor, new: Tensor, *rest: Any) -> Tensor:
        sums.add(new.dtype)
        return average(mean, new, *rest)

    monkeypatch.setattr(backend, "ema_", noting)
    for on in (True, False):
        monkeypatch.setattr(scalings, "available", lambda device, on=on: on)
        model, opt = begun(name)
        train("words", opt, model, 0, 1)
        found.append(scalings_of(opt))
    for rounded, plain in zip(*found, strict=True):
        assert (rounded.dtype, plain.dtype) == (torch.bfloat16, torch.float32)
        assert plain.any()
        if name == "batch":
            assert sums == {torch.float32}
            assert torch.equal(rounded, plain.bfloat16())
        else:
            torch.testing.assert_close(rounded.float(), plain, rtol=2.0**-7, atol=0.0)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", OPTIONS)
def test_a_resumed_run_takes_the_same_steps(name: str):
    """Bit for bit, also where examples wait for their turn."""
    model, opt = begun(name)
    train("words", opt, model, 0, EVERY + 1)
    assert all(s.dtype == torch.bfloat16 for s in scalings_of(opt))
    assert any(stack.memory.get(PENDING) for stack in opt._stacks or ()) == (name == "deferred")
    saved = copy.deepcopy(opt.state_dict())
    other_model, other = begun(name)
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(saved)
    for each, its in ((opt, model), (other, other_model)):
        train("words", each, its, EVERY + 1, 3 * EVERY)
    assert torch.equal(flat(model), flat(other_model))
    assert all(torch.equal(x, y) for x, y in zip(scalings_of(opt), scalings_of(other), strict=True))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", OPTIONS)
def test_checkpoints_do_not_tell(name: str, monkeypatch: pytest.MonkeyPatch):
    """They hold float32: from bfloat16 to float32 and back nothing is lost, the other way each is rounded once."""
    model, opt = begun(name)
    train("words", opt, model, 0, EVERY + 2)
    saved = {key: X for key, X in tensors(opt).items() if key.endswith((".s", ".s_due"))}
    assert any(key.endswith(".s_due") for key in saved) == (name == "deferred")
    assert {X.dtype for X in saved.values()} == {torch.float32}

    def passed_on(state: dict[str, Any], on: bool) -> Layerwise:
        monkeypatch.setattr(scalings, "available", lambda device: on)
        other = begun(name)[1]
        other.load_state_dict(copy.deepcopy(state))
        other._stacks = other._build()
        assert {s.dtype for s in scalings_of(other)} == {torch.bfloat16 if on else torch.float32}
        return other

    plain = passed_on(opt.state_dict(), on=False)
    back = passed_on(plain.state_dict(), on=True)
    for other in (plain, back):
        found = tensors(other)
        assert all(torch.equal(found[key], X) for key, X in saved.items())
    state = copy.deepcopy(opt.state_dict())
    for of_param in state["state"].values():
        for of_layer in of_param.values():
            for key in {"s", "s_due"} & set(of_layer):
                of_layer[key] *= 1.001
    found = tensors(passed_on(state, on=True))
    assert all(torch.equal(found[key], (1.001 * X).bfloat16().float()) for key, X in saved.items())


# --- SOAP's momentum -----------------------------------------------------------------------------------------------


def trained_soap(steps: int, saved: dict[str, Any] | None = None, weights: dict[str, Any] | None = None) -> Any:
    """A model after so many steps, or after those that follow a checkpoint; and its optimizer."""
    model, begin = made("words"), 0
    opt = lw.optim.SOAP(model, lr=0.01, solver="products", precision="half", refresh_every=EVERY)
    if saved is not None and weights is not None:
        model.load_state_dict(weights)
        opt.load_state_dict(saved)
        begin = EVERY + 1
    train("words", opt, model, begin, steps)
    return model, opt


def momentum_of(opt: Layerwise) -> list[Tensor]:
    return [stack.state["M"] for stack in opt._stacks or () if "M" in stack.state]


@pytest.mark.parametrize("sync", [False, True])
def test_a_rounded_momentum_moves_weights_as_one_in_float32(sync: bool, monkeypatch: pytest.MonkeyPatch):
    """By either executor: of 12 steps, with three refreshes, together by less than a hundredth of what they change."""
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: sync))
    begin, found = flat(made("words")), []
    for on in (True, False):
        monkeypatch.setattr(scalings, "available", lambda device, on=on: on)
        model, opt = trained_soap(12)
        assert {M.dtype for M in momentum_of(opt)} == {torch.bfloat16 if on else torch.float32}
        found.append(flat(model) - begin)
    rounded, plain = found
    assert 0 < float((rounded - plain).norm() / plain.norm()) < 1e-2


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_run_with_a_rounded_momentum_is_resumed_bit_for_bit():
    model, opt = trained_soap(EVERY + 1)
    saved, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(model.state_dict())
    train("words", opt, model, EVERY + 1, 3 * EVERY)
    other_model, other = trained_soap(3 * EVERY, saved, weights)
    assert torch.equal(flat(model), flat(other_model))
    assert all(torch.equal(x, y) for x, y in zip(momentum_of(opt), momentum_of(other), strict=True))
