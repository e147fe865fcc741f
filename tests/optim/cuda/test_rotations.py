"""Steps in a basis that is kept in halves: how they get back, what is searched and split, and how precise they are."""

from typing import Any

import numpy as np
import pytest
import torch
from layerwise.optim.factors import Factors
from layerwise.optim.rotated_adam import RotatedAdam, step_bound
from test_param_lists import train, zoo
from torch import Tensor

import layerwise as lw
from interpreter import INTERPRETED, only_interpreted
from layerwise.optim.cuda import elementwise as fused
from layerwise.optim.cuda import storage as stored
from layerwise.optim.cuda.adam_corrections import corrections_
from layerwise.optim.cuda.linalg import orthogonal
from layerwise.optim.cuda.linalg import split_fp16 as half_pairs
from layerwise.optim.cuda.linalg.fp16 import Half
from layerwise.optim.cuda.linalg.orthogonal import BASIS_SCALE
from layerwise.optim.cuda.scaled import Scaled
from layerwise.optim.cuda.triton import products as triton_products
from layerwise.optim.cuda.triton import splits as triton_splits
from layerwise.optim.eigenbasis import CorrectedEigenvalues
from layerwise.optim.engine import Layerwise
from layerwise.optim.rule import Context, Health, Shape, State
from layerwise.optim.step.graft import Clip
from layerwise.optim.step.stack import Stack
from random_tensors import randn

pytestmark = pytest.mark.usefixtures("untyped")
ROUNDING, DAMPING = 1e-3, 1e-2
TINY = 2.0**-104
"""Gradients whose scale, times that of a basis, is near the largest number."""
SQUARE_ROOT = "Shampoo, power ½"
OPEN, SHUT = torch.tensor(True), torch.tensor(False)
RULES: dict[str, Any] = {
    "SOAP": RotatedAdam,
    "EKFAC": lambda: CorrectedEigenvalues(scaling="running"),
    "EKFAC, one pass": lambda: CorrectedEigenvalues(scaling="running", split="trace"),
    "Shampoo": lambda: Factors("gradient", "gradient", (0.25, 0.25)),
    SQUARE_ROOT: lambda: Factors("gradient", "gradient", (0.5, 0.5)),
}


def rule_and_state(name: str, size: tuple[int, int] = (16, 24)) -> tuple[Any, State, Shape]:
    """A rule with bases of random factors, kept in halves."""
    rule, (O, I) = RULES[name](), size
    rule.use_solver("newton")
    shape = Shape(2, O, I, torch.float32, torch.device("cpu"))
    state = rule.init(shape)
    for side, n in (("P", O), ("Q", I)):
        X = randn(2, n, 2 * n, seed=n) * torch.logspace(0, -2, n)[:, None]
        state[side].copy_(X @ X.mT)
    if "begun" in state:
        state["begun"].fill_(1)
    rule.refresh(state, slice(0, 2), context_of(shape), Health())
    return rule, state, shape


def context_of(shape: Shape, G: Tensor | None = None, gate: Tensor | None = None) -> Context:
    largest = None if G is None else G.abs().amax((1, 2))
    return Context(200, 0.1, DAMPING, True, {}, shape=shape, gate=gate, gradient=G, largest=largest, observes=False)


def exact(name: str, rule: Any, state: State, G: Tensor) -> Tensor:
    """The direction in float64, from the bases and moments as they are."""
    U, V = (stored.value(state, f"U_{side}").double() for side in ("P", "Q"))
    R = U.mT @ G.double() @ V
    if name == "SOAP":
        b1, b2 = rule.betas
        t = state["steps"].double().view(-1, 1, 1)
        Y = state["M"].double() / (state["V"].double().sqrt() + rule.eps) * (1 - b2**t).sqrt() / (1 - b1**t)
    elif name == "EKFAC":
        s = state["s"].double()
        Y = R / (s + DAMPING * s.mean((-2, -1), keepdim=True))
    elif name == "EKFAC, one pass":
        s_P, s_Q = state["s_P"].double().unsqueeze(-1), state["s_Q"].double().unsqueeze(-2)
        left, right = (DAMPING**0.5 * s.mean((-2, -1), keepdim=True) for s in (s_P, s_Q))
        Y = R / (state["s"].double() + left * s_Q + s_P * right + left * right)
    else:
        a, b = (
            (s + DAMPING * s.mean(-1, keepdim=True)).pow(-rule.power[0])
            for s in (state["s_P"].double(), state["s_Q"].double())
        )
        Y = a.unsqueeze(-1) * R * b.unsqueeze(-2)
    return U @ Y @ V.mT


def directions(name: str, steps: int = 3, gate: Tensor = OPEN, size: float = 1.0) -> tuple[Tensor | Scaled, Tensor]:
    """The last of a few steps' directions, as found and exactly."""
    rule, state, shape = rule_and_state(name)
    found, G = torch.empty(0), torch.empty(0)
    for step in range(steps):
        G = size * randn(2, 16, 24, seed=10 + step) * torch.logspace(0, -3, 24)
        context, health = context_of(shape, G, gate), Health(gate=gate)
        rule.rescale(state, None, G, context)
        found = rule.scaled_direction(state, G, context, health)
    return found, exact(name, rule, state, G)


def divided(D: Tensor | Scaled) -> Tensor:
    if isinstance(D, Tensor):
        return D.double()
    return D.C.double() / torch.stack(D.scales).double().prod(0).view(-1, 1, 1)


# --- precision -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "size"), [*((name, 1.0) for name in RULES), ("EKFAC", TINY), (SQUARE_ROOT, TINY)])
def test_directions_are_precise(name: str, size: float):
    found, expected = directions(name, size=size)
    assert isinstance(found, Scaled)
    assert all(torch.isfinite(scale).all() for scale in found.scales)
    bound = 3e-3 if name == "Shampoo" else ROUNDING  # its way in has 11 bits, too
    errors = (divided(found) - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert float(errors.max()) < bound


@pytest.mark.parametrize("gate", [OPEN, SHUT])
def test_an_adam_step_is_written_as_a_half(gate: Tensor):
    rule, state, shape = rule_and_state("SOAP")
    before = {name: x.clone() for name, x in state.items()}
    G = randn(2, 16, 24)
    Y = rule.step_in_basis(state, G, context_of(shape, G, gate), Health(gate=gate))
    assert isinstance(Y, Half)
    assert Y.hi.dtype == torch.float16
    assert Y.scale.tolist() == [64.0, 64.0]
    if gate is SHUT:
        assert not Y.hi.any()
        assert all(torch.equal(state[name], x) for name, x in before.items())


@pytest.mark.parametrize("betas", [(0.95, 0.95), (0.9, 0.999), (0.9, 0.95), (0.0, 0.99), (0.8, 0.7)])
def test_no_step_of_adam_exceeds_its_bound(betas: tuple[float, float]):
    """Gradients that grow as (β₂/β₁)ᵗ make it as large as it can be; one that is alone makes it 1."""
    (b1, b2), count = betas, 400
    grown = torch.linspace(1 - count, 0, count, dtype=torch.float64).mul(np.log(b2 / max(b1, 0.5))).exp()
    alone = torch.zeros_like(grown)
    alone[0] = 1.0
    gradients = torch.stack([grown, alone, randn(count).double(), -grown], dim=1)
    M, V, steps, largest = grown.new_zeros(1, 1, 4), grown.new_zeros(1, 1, 4), grown.new_zeros(1), 0.0
    for g in gradients:
        c1, c2 = corrections_(steps, b1, b2)
        corrections: dict[str, Any] = {"correction1": c1, "correction2": c2}
        step = fused.rotated_adam_(M, V, g.view(1, 1, 4), beta1=b1, beta2=b2, eps=1e-300, **corrections)
        largest = max(largest, float(step.abs().max()))
    assert 0.4 * step_bound(b1, b2) <= largest <= 1.0001 * step_bound(b1, b2)


def test_momentum_that_lasts_longer_than_second_moments_has_no_bound():
    assert step_bound(0.99, 0.9) == step_bound(0.5, 0.0) == 2.0**7


# --- passes that are not made ----------------------------------------------------------------------------------


def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fused, stored, orthogonal, triton_products):
        monkeypatch.setattr(module, "available", lambda device: True)
    tiles = triton_products.Tiles(m=16, n=16, depth=16, warps=1, stages=1)
    monkeypatch.setattr(triton_products, "tiles_for", lambda *given: tiles)


def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Searches for the largest entry, and splits by kernels, from now on."""
    found = {"searches": 0, "splits": 0}
    for module, name, kind in (
        (triton_splits, "_launch", "splits"),
        (triton_splits, "largest_parts", "searches"),
        (half_pairs, "pair_scale", "searches"),
    ):
        was = getattr(module, name)

        def noted(*given: Any, kind: str = kind, was: Any = was) -> Any:
            found[kind] += 1
            return was(*given)

        monkeypatch.setattr(module, name, noted)
    return found


@pytest.mark.interpreted
@pytest.mark.parametrize("name", RULES)
def test_nothing_is_searched_but_the_gradient(name: str, monkeypatch: pytest.MonkeyPatch):
    """And that only where its largest entry is not known: torch does not ask for it."""
    rule, state, shape = rule_and_state(name)
    if INTERPRETED:
        use_kernels(monkeypatch)
    found, G = counted(monkeypatch), randn(2, 16, 24)
    context = context_of(shape, G, OPEN)
    rule.rescale(state, None, G, context)
    rule.scaled_direction(state, G, context, Health(gate=OPEN))
    assert found["searches"] == (0 if INTERPRETED or name == "Shampoo" else 1)
    if INTERPRETED:  # the gradient, and what one product leaves of it in pairs; steps are written as halves
        assert found["splits"] == (1 if name == "Shampoo" else 2)


@pytest.mark.interpreted
@only_interpreted
@pytest.mark.parametrize("name", RULES)
def test_kernels_make_the_same_directions(name: str, monkeypatch: pytest.MonkeyPatch):
    by_torch, _ = directions(name)
    use_kernels(monkeypatch)
    by_kernels, _ = directions(name)
    expected = divided(by_torch)
    assert float((divided(by_kernels) - expected).norm() / expected.norm()) < ROUNDING


# --- what the passes find on their way ------------------------------------------------------------------------


class Twice(CorrectedEigenvalues):
    """A step of its own, made of the other."""

    def step_in_basis(self, state: State, grad: Tensor, context: Context, health: Health) -> Tensor:
        Y = super().step_in_basis(state, grad, context, health)
        return 2 * (Y.hi.float() / Y.scale.view(-1, 1, 1) if isinstance(Y, Half) else Y)


def asked(rule: Any, state: State, shape: Shape, G: Tensor, gradient: Tensor | None = None) -> tuple[Any, Context]:
    context = context_of(shape, G if gradient is None else gradient, OPEN)
    context.asks_along = True
    rule.rescale(state, None, G, context)
    return rule.scaled_direction(state, G, context, Health(gate=OPEN)), context


@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["EKFAC", "EKFAC, one pass", "Shampoo", SQUARE_ROOT])
def test_the_product_with_the_gradient_is_found_on_the_way(name: str, monkeypatch: pytest.MonkeyPatch):
    """And taken by the clip, where it is of the step's own gradient."""
    rule, state, shape = rule_and_state(name)
    if INTERPRETED:
        use_kernels(monkeypatch)
    G = randn(2, 16, 24, seed=5)
    D, context = asked(rule, state, shape, G)
    assert isinstance(D, Scaled)
    assert D.along is not None
    assert context.along is None
    expected = float((divided(D) * G.double()).sum())
    assert abs(float(D.along) / expected - 1) < 3e-3
    assert asked(rule, state, shape, G.clone(), G)[0].along is None
    clip, stack = Clip.read(1e-3), Stack(rule, (), {}, {})
    found = clip.factor([stack], [D], [G], [0.1])
    assert found == pytest.approx((1e-3 / (0.01 * expected)) ** 0.5, rel=3e-3)
    assert found == clip.factor([stack], [D], [torch.full_like(G, torch.nan)], [0.1])


def test_a_step_of_one_s_own_hands_over_no_product():
    RULES["twice"] = lambda: Twice(scaling="running", split="trace")
    try:
        rule, state, shape = rule_and_state("twice")
    finally:
        del RULES["twice"]
    before = state["s"].clone()
    D, _ = asked(rule, state, shape, randn(2, 16, 24))
    assert D.along is None
    assert not torch.equal(state["s"], before)


@pytest.mark.parametrize("gate", [OPEN, SHUT])
def test_one_pass_is_both(gate: Tensor, monkeypatch: pytest.MonkeyPatch):
    """The same scalings and the same direction as by a pass each, whatever the direction is asked of."""
    found = []
    for apart in (False, True):
        rule, state, shape = rule_and_state("EKFAC, one pass")
        if apart:
            monkeypatch.setattr(CorrectedEigenvalues, "_in_one_pass", lambda *_: False)
        G, other = (randn(2, 16, 24, seed=seed) * gate for seed in (6, 7))
        for given in (G, other):
            context, health = context_of(shape, G, gate), Health(gate=gate)
            before = state["s"].clone()
            rule.rescale(state, None, G, context)
            assert torch.equal(state["s"], before) == (not apart or gate is SHUT)
            D = rule.scaled_direction(state, given, context, health)
            found.append((divided(D), state["s"].clone()))
            assert "rotated" not in context.memory  # used once
    for one_pass, passes in zip(found[:2], found[2:], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one_pass, passes, strict=True))


# --- in training -------------------------------------------------------------------------------------------------

MEMBERS: dict[str, Any] = {
    "SOAP": lambda m: lw.optim.SOAP(m, lr=0.003, refresh_every=1, solver="newton", weight_decay=0.1, scale="formula"),
    # eps: entries that are rounding alone are steps of ±lr without it, other ones with other numbers of threads
    "SOAP with momentum": lambda m: lw.optim.SOAP(
        m, lr=0.003, refresh_every=1, solver="newton", momentum=0.9, eps=1e-5, scale="formula"
    ),
    "EKFAC": lambda m: lw.optim.EKFAC(
        m, lr=0.003, refresh_every=1, solver="newton", scaling="running", scale="formula"
    ),
    "EKFAC, a norm": lambda m: lw.optim.EKFAC(
        m, lr=0.01, refresh_every=1, solver="newton", clip=("norm", 0.5), scale="formula"
    ),
    "Shampoo": lambda m: lw.optim.Shampoo(m, lr=0.003, refresh_every=1, solver="newton", scale="formula"),
    "Shampoo, grafted": lambda m: lw.optim.Shampoo(
        m, lr=0.003, refresh_every=1, solver="newton", graft="gradient", scale="formula"
    ),
}


@pytest.mark.parametrize("name", ["SOAP with momentum", "EKFAC, a norm", "Shampoo, grafted"])
def test_training_by_halves_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch):
    """As on a GPU, beside the plain calls of torch."""
    expected, other = zoo(), zoo()
    start = torch.cat([p.detach().flatten() for p in expected.parameters()])
    train(MEMBERS[name](expected), expected, range(4))
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))
    train(MEMBERS[name](other), other, range(4))
    end, found = (torch.cat([p.detach().flatten() for p in model.parameters()]) for model in (expected, other))
    assert float((found - end).norm() / (end - start).norm()) < 1e-2


@pytest.mark.parametrize("name", ["SOAP", "EKFAC", "Shampoo"])
def test_a_basis_has_the_fixed_scale_when_it_is_resumed(name: str, monkeypatch: pytest.MonkeyPatch):
    """Whatever scale the one that was saved had: checkpoints hold float32."""
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))
    model, resumed = zoo(), zoo()
    opt = MEMBERS[name](model)
    train(opt, model, range(3))
    saved = opt.state_dict()
    tensors = [x for of_layer in saved["state"].values() for s in of_layer.values() for n, x in s.items() if "U_" in n]
    assert tensors
    assert all(x.dtype == torch.float32 for x in tensors)
    resumed.load_state_dict(model.state_dict())
    again = MEMBERS[name](resumed)
    again.load_state_dict(saved)
    for one, its in ((opt, model), (again, resumed)):
        train(one, its, range(3, 5))
        scales = [s.state[n] for s in one._stacks or () for n in ("U_P_scale", "U_Q_scale") if n in s.state]
        assert scales
        assert all(bool((scale == BASIS_SCALE).all()) for scale in scales)
