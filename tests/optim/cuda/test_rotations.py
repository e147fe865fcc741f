"""Steps in a basis that is kept in fp16: how they get back, what is searched and split, and how precise they are."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gpu_objects import FALSE, NEWTON, TRUE, context_at, device_step, initial_state, matrix, refined, set_factors
from test_asynchronous_executor import Times
from test_pieces import train, zoo
from torch import Tensor, nn

import layerwise as lw
from interpreter import INTERPRETED, only_interpreted
from layerwise.optim.cuda import elementwise, storage
from layerwise.optim.cuda.backend import step_bound
from layerwise.optim.cuda.elementwise import corrections_
from layerwise.optim.cuda.executor import AsynchronousExecutor
from layerwise.optim.cuda.linalg import orthogonal, split_fp16
from layerwise.optim.cuda.linalg.fp16 import Half
from layerwise.optim.cuda.linalg.orthogonal import BASIS_SCALE
from layerwise.optim.cuda.scaled import Scaled
from layerwise.optim.cuda.triton import products as triton_products
from layerwise.optim.cuda.triton import splits as triton_splits
from layerwise.optim.engine import Layerwise
from layerwise.optim.kronecker import KroneckerRoots
from layerwise.optim.members.ekfac import CorrectedEigenvalues
from layerwise.optim.members.soap import RotatedAdam
from layerwise.optim.rule import Context, Requirements, Shape, State, tensors
from layerwise.optim.step.clip import Clip
from random_tensors import randn

pytestmark = pytest.mark.usefixtures("untyped")
ROUNDING, DAMPING = 1e-3, 1e-2
TINY = 2.0**-104
"""Gradients whose scale, times that of a basis, is near the largest number."""
SQUARE_ROOT = "Shampoo, power ½"
RULES: dict[str, Any] = {
    "SOAP": RotatedAdam,
    "EKFAC": lambda: CorrectedEigenvalues(scaling="running"),
    "EKFAC, trace": lambda: CorrectedEigenvalues(scaling="running", split="trace"),
    "Shampoo": lambda: KroneckerRoots("gradient", "gradient", (0.25, 0.25)),
    SQUARE_ROOT: lambda: KroneckerRoots("gradient", "gradient", (0.5, 0.5)),
}


def rule_and_state(name: str, size: tuple[int, int] = (16, 24)) -> tuple[Any, State, Shape]:
    """A rule with bases of random factors, kept in fp16."""
    rule, (O, I) = RULES[name](), size
    shape = Shape(2, O, I, torch.float32, torch.device("cpu"))
    state = initial_state(rule, shape)
    for side, n in (("P", O), ("Q", I)):
        X = randn(2, n, 2 * n, seed=n) * torch.logspace(0, -2, n)[:, None]
        set_factors(state, **{side: X @ X.mT})
    if "begun" in state:
        state["begun"].fill_(1)
    rule.refresh(state, slice(0, 2), context_of(shape))
    return rule, state, shape


def context_of(shape: Shape, G: Tensor | None = None, finite: Tensor | None = None) -> Context:
    """Of a step whose gradient is G."""
    found = context_at(200, DAMPING, shape, gradient=G, device_step=device_step(finite, G), observes=False)
    found.lr = 0.1
    return found


def exact(name: str, rule: Any, state: State, G: Tensor) -> Tensor:
    """The direction in float64, from the bases and moments as they are."""
    U, V = (matrix(state, side).double() for side in ("P", "Q"))
    values = [refined(state)[side].values.double() for side in ("P", "Q")]  # type: ignore[union-attr]
    R = U.mT @ G.double() @ V
    if name == "SOAP":
        b1, b2 = rule.betas
        t = state["steps"].double().view(-1, 1, 1)
        Y = state["M"].double() / (state["V"].double().sqrt() + rule.eps) * (1 - b2**t).sqrt() / (1 - b1**t)
    elif name == "EKFAC":
        s = state["s"].double()
        Y = R / (s + DAMPING * s.mean((-2, -1), keepdim=True))
    elif name == "EKFAC, trace":
        s_P, s_Q = values[0].unsqueeze(-1), values[1].unsqueeze(-2)
        left, right = (DAMPING**0.5 * s.mean((-2, -1), keepdim=True) for s in (s_P, s_Q))
        Y = R / (state["s"].double() + left * s_Q + s_P * right + left * right)
    else:
        a, b = ((s + DAMPING * s.mean(-1, keepdim=True)).pow(-rule.power[0]) for s in values)
        Y = a.unsqueeze(-1) * R * b.unsqueeze(-2)
    return U @ Y @ V.mT


def directions(name: str, steps: int = 3, size: float = 1.0) -> tuple[Tensor | Scaled, Tensor]:
    """The last of a few steps' directions, as found and exactly."""
    rule, state, shape = rule_and_state(name)
    found, G = torch.empty(0), torch.empty(0)
    for step in range(steps):
        G = size * randn(2, 16, 24, seed=10 + step) * torch.logspace(0, -3, 24)
        found = rule.direction(state, G, context_of(shape, G, TRUE))
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


@pytest.mark.parametrize("finite", [TRUE, FALSE])
def test_an_adam_step_is_written_in_fp16(finite: Tensor):
    rule, state, shape = rule_and_state("SOAP")
    before = {name: x.clone() for name, x in tensors(state).items()}
    G = randn(2, 16, 24)
    context = context_of(shape, G, finite)
    floor = lambda correction: rule.floor(state, correction, context)  # noqa: E731
    R = state["basis"].rotate(G, context)
    Y = NEWTON.adam_in_basis_(state, R, G, rule.betas, rule.eps, floor, context)
    assert isinstance(Y, Half)
    assert Y.hi.dtype == torch.float16
    assert Y.scale.tolist() == [64.0, 64.0]
    if finite is FALSE:
        assert not Y.hi.any()
        assert all(torch.equal(x, before[name]) for name, x in tensors(state).items())
    else:
        assert Y.hi.any()


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
        step = elementwise.rotated_adam_(M, V, g.view(1, 1, 4), beta1=b1, beta2=b2, eps=1e-300, **corrections)
        largest = max(largest, float(step.abs().max()))
    assert 0.4 * step_bound(b1, b2) <= largest <= 1.0001 * step_bound(b1, b2)


def test_momentum_that_lasts_longer_than_second_moments_has_no_bound():
    assert step_bound(0.99, 0.9) == step_bound(0.5, 0.0) == 2.0**7


# --- passes that are not made ----------------------------------------------------------------------------------


def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (elementwise, storage, orthogonal, triton_products):
        monkeypatch.setattr(module, "available", lambda device: True)
    tiles = triton_products.Tiles(m=16, n=16, depth=16, warps=1, stages=1)
    for name in ("PAIR_TILES", "ROUGH_TILES"):
        monkeypatch.setattr(triton_products, name, tiles)


def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Searches for the largest entry, and splits by kernels, from now on."""
    found = {"searches": 0, "splits": 0}
    for module, name, kind in (
        (triton_splits, "_launch", "splits"),
        (triton_splits, "largest_of", "searches"),
        (split_fp16, "pair_scale", "searches"),
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
    rule.direction(state, G, context_of(shape, G, TRUE))
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


# --- what is clipped ------------------------------------------------------------------------------------------


def clip_factor(clip: Clip, D: Scaled, G: Tensor) -> float:
    """As an asynchronous executor finds it for one stack, at a rate of 0.1."""
    part = SimpleNamespace(lr=0.1, grad=G, stack=SimpleNamespace(requires=Requirements()))
    return float(AsynchronousExecutor._clip_factor(SimpleNamespace(clip=clip), [part], [D]))  # type: ignore[arg-type]


@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["EKFAC", "EKFAC, trace", "Shampoo", SQUARE_ROOT])
def test_directions_that_are_not_divided_yet_are_clipped(name: str, monkeypatch: pytest.MonkeyPatch):
    rule, state, shape = rule_and_state(name)
    if INTERPRETED:
        use_kernels(monkeypatch)
    G = randn(2, 16, 24, seed=5)
    D = rule.direction(state, G, context_of(shape, G, TRUE))
    assert isinstance(D, Scaled)
    expected = float((divided(D) * G.double()).sum())
    assert clip_factor(Clip.read(1e-3), D, G) == pytest.approx((1e-3 / (0.01 * expected)) ** 0.5, rel=3e-3)


@pytest.mark.parametrize("split", ["exact", "trace"])
def test_a_rule_of_one_s_own_is_clipped_by_its_own_product(split: str, monkeypatch: pytest.MonkeyPatch):
    """Not by that of the rule that it is made of: twice the direction, clipped, is √2 times the step."""
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))
    ways = []
    for factor in (1.0, 2.0):
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        start = model.weight.detach().clone()
        rule = Times(CorrectedEigenvalues(scaling="running", split=split), factor)
        opt = Layerwise(model, rule=rule, lr=0.1, clip=1e-5, solver="products")
        model(randn(32, 6)).square().sum().backward()
        opt.step()
        assert opt.health().clipped_steps == 1
        ways.append(float((model.weight.detach() - start).norm()))
    assert ways[1] == pytest.approx(2**0.5 * ways[0], rel=3e-3)


# --- in training -------------------------------------------------------------------------------------------------

MEMBERS: dict[str, Any] = {
    "SOAP": lambda m: lw.optim.SOAP(m, lr=0.003, refresh_every=1, solver="products", weight_decay=0.1, scale="formula"),
    # eps: entries that are rounding alone are steps of ±lr without it, other ones with other numbers of threads
    "SOAP with momentum": lambda m: lw.optim.SOAP(
        m, lr=0.003, refresh_every=1, solver="products", momentum=0.9, eps=1e-3, scale="formula"
    ),
    "EKFAC": lambda m: lw.optim.EKFAC(
        m, lr=0.003, refresh_every=1, solver="products", scaling="running", scale="formula"
    ),
    "EKFAC, a norm": lambda m: lw.optim.EKFAC(
        m, lr=0.01, refresh_every=1, solver="products", clip=("norm", 0.5), scale="formula"
    ),
    "Shampoo": lambda m: lw.optim.Shampoo(m, lr=0.003, refresh_every=1, solver="products", scale="formula"),
    "Shampoo, grafted": lambda m: lw.optim.Shampoo(
        m, lr=0.003, refresh_every=1, solver="products", graft="gradient", scale="formula"
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
    bases = [
        x for of_layer in saved["state"].values() for s in of_layer.values() for n, x in s.items() if n.startswith("U_")
    ]
    assert bases
    assert all(x.dtype == torch.float32 for x in bases)
    resumed.load_state_dict(model.state_dict())
    again = MEMBERS[name](resumed)
    again.load_state_dict(saved)
    for one, its in ((opt, model), (again, resumed)):
        train(one, its, range(3, 5))
        scales = [side.matrix.scale for stack in one._stacks or () for side in refined(stack.state).values()]
        assert scales
        assert all(scale is not None and bool((scale == BASIS_SCALE).all()) for scale in scales)
