"""Steps in a basis that is kept in halves: how they get back, what is searched and split, and how precise they are."""

import importlib.util
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from test_listed import train, zoo
from torch import Tensor

import layerwise as lw
from layerwise.foundations import fused
from layerwise.foundations.fused_adam import corrections_
from layerwise.foundations.fused_scaled import Scaled
from layerwise.foundations.linalg import half_pairs, orthogonal, triton_products, triton_splits
from layerwise.foundations.linalg.halves import Half
from layerwise.foundations.linalg.orthogonal import BASIS_SCALE
from layerwise.optim import stored
from layerwise.optim.eigenbasis import CorrectedEigenvalues
from layerwise.optim.engine import Layerwise
from layerwise.optim.factors import Factors
from layerwise.optim.rotated_adam import RotatedAdam, step_bound
from layerwise.optim.rule import Context, Health, Shape, State

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NUMPY = tuple(int(part) for part in np.__version__.split(".")[:2])
pytestmark = [
    pytest.mark.usefixtures("untyped"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
ROUNDING, DAMPING = 1e-3, 1e-2
OPEN, SHUT = torch.tensor(True), torch.tensor(False)
RULES: dict[str, Any] = {
    "SOAP": RotatedAdam,
    "EKFAC": lambda: CorrectedEigenvalues(scaling="running"),
    "Shampoo": lambda: Factors("gradient", "gradient", (0.25, 0.25)),
    "Shampoo, power ½": lambda: Factors("gradient", "gradient", (0.5, 0.5)),
}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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
    else:
        a, b = (
            (s + DAMPING * s.mean(-1, keepdim=True)).pow(-rule.power[0])
            for s in (state["s_P"].double(), state["s_Q"].double())
        )
        Y = a.unsqueeze(-1) * R * b.unsqueeze(-2)
    return U @ Y @ V.mT


def directions(name: str, steps: int = 3, gate: Tensor = OPEN) -> tuple[Tensor | Scaled, Tensor]:
    """The last of a few steps' directions, as found and exactly."""
    rule, state, shape = rule_and_state(name)
    found, G = torch.empty(0), torch.empty(0)
    for step in range(steps):
        G = randn(2, 16, 24, seed=10 + step) * torch.logspace(0, -3, 24)
        context, health = context_of(shape, G, gate), Health(gate=gate)
        rule.rescale(state, None, G, context)
        found = rule.scaled_direction(state, G, context, health)
    return found, exact(name, rule, state, G)


def divided(D: Tensor | Scaled) -> Tensor:
    if isinstance(D, Tensor):
        return D.double()
    return D.C.double() / torch.stack(D.scales).double().prod(0).view(-1, 1, 1)


# --- precision -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_directions_are_precise(name: str):
    found, expected = directions(name)
    assert isinstance(found, Scaled)
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


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton: pip install triton")
@pytest.mark.skipif(NUMPY >= (2, 4), reason="Triton's interpreter needs numpy < 2.4 (loops of its range)")
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_launches_in_the_interpreter():
    """In a process of its own, because Triton reads the variable when it is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "searched or kernels", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


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
    if INTERPRETED:  # the gradient, what one product leaves of it in pairs, and a quotient; no step of Adam
        assert found["splits"] == {"SOAP": 2, "EKFAC": 3, "Shampoo": 2, "Shampoo, power ½": 3}[name]


@pytest.mark.skipif(not INTERPRETED, reason="run by `test_launches_in_the_interpreter`")
@pytest.mark.parametrize("name", RULES)
def test_kernels_make_the_same_directions(name: str, monkeypatch: pytest.MonkeyPatch):
    by_torch, _ = directions(name)
    use_kernels(monkeypatch)
    by_kernels, _ = directions(name)
    expected = divided(by_torch)
    assert float((divided(by_kernels) - expected).norm() / expected.norm()) < ROUNDING


# --- in training -------------------------------------------------------------------------------------------------

MEMBERS: dict[str, Any] = {
    "SOAP": lambda m: lw.optim.SOAP(m, lr=0.003, refresh_every=1, solver="newton", weight_decay=0.1),
    "SOAP with momentum": lambda m: lw.optim.SOAP(m, lr=0.003, refresh_every=1, solver="newton", momentum=0.9),
    "EKFAC": lambda m: lw.optim.EKFAC(m, lr=0.003, refresh_every=1, solver="newton", scaling="running"),
    "EKFAC, a norm": lambda m: lw.optim.EKFAC(m, lr=0.01, refresh_every=1, solver="newton", clip=("norm", 0.5)),
    "Shampoo": lambda m: lw.optim.Shampoo(m, lr=0.003, refresh_every=1, solver="newton"),
    "Shampoo, grafted": lambda m: lw.optim.Shampoo(m, lr=0.003, refresh_every=1, solver="newton", graft="gradient"),
}


@pytest.mark.parametrize("name", ["SOAP with momentum", "EKFAC, a norm", "Shampoo, grafted"])
def test_training_by_halves_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch):
    """As on a GPU, beside the plain calls of torch."""
    expected, other = zoo(), zoo()
    start = torch.cat([p.detach().flatten() for p in expected.parameters()])
    train(MEMBERS[name](expected), expected, range(4))
    monkeypatch.setattr(Layerwise, "_waits", property(lambda self: False))
    train(MEMBERS[name](other), other, range(4))
    end, found = (torch.cat([p.detach().flatten() for p in model.parameters()]) for model in (expected, other))
    assert float((found - end).norm() / (end - start).norm()) < 1e-2


@pytest.mark.parametrize("name", ["SOAP", "EKFAC", "Shampoo"])
def test_a_basis_has_the_fixed_scale_when_it_is_resumed(name: str, monkeypatch: pytest.MonkeyPatch):
    """Whatever scale the one that was saved had: checkpoints hold float32."""
    monkeypatch.setattr(Layerwise, "_waits", property(lambda self: False))
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
