"""EKFAC's step as it is computed: one rotation of the gradient, damping by a few numbers a group, a gated average."""

import pytest
import torch
from optim_tools import batches, cross_entropy, mlp
from torch import Tensor

import layerwise as lw
from layerwise.foundations.kronecker import split_spectrum
from layerwise.optim import eigenbasis
from layerwise.optim.cuda.scaled import Scaled
from layerwise.optim.eigenbasis import CorrectedEigenvalues
from layerwise.optim.rule import Context, Health, Shape, State

CPU = torch.device("cpu")


def rule_and_state(
    padding: tuple[int, int] = (0, 0), dtype: torch.dtype = torch.float64, **options: str | float
) -> tuple[CorrectedEigenvalues, State, Shape]:
    """Three groups of a 4 × 5 layer with random bases, scalings and eigenvalues."""
    rule = CorrectedEigenvalues(**options)  # type: ignore[arg-type]
    shape = Shape(3, 4 + padding[0], 5 + padding[1], dtype, CPU, padding=padding)
    state, generator = rule.init(shape), torch.Generator().manual_seed(0)
    for name, own in (("P", 4), ("Q", 5)):
        U = torch.linalg.qr(torch.randn(3, own, own, generator=generator, dtype=torch.float64)).Q
        state[f"U_{name}"][:, :own, :own] = U.to(dtype)
        state[f"s_{name}"][:, :own] = torch.rand(3, own, generator=generator, dtype=torch.float64).to(dtype)
    state["s"][:, :4, :5] = torch.rand(3, 4, 5, generator=generator, dtype=torch.float64).to(dtype)
    return rule, state, shape


def gradient(shape: Shape, seed: int = 1) -> Tensor:
    G = torch.zeros(3, shape.outputs, shape.inputs, dtype=shape.dtype)
    G[:, :4, :5] = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(G)
    return G


def context_of(shape: Shape, relative: bool = True, gate: Tensor | None = None, damping: float = 0.1) -> Context:
    return Context(7, 0.1, damping, relative, {}, examples=6, gate=gate, shape=shape)


def added_before(split: str, relative: bool, damping: float, state: State) -> Tensor:
    """What was added to every scaling, written out."""
    s, s_P, s_Q = state["s"][:, :4, :5], state["s_P"][:, :4], state["s_Q"][:, :5]
    if not relative:
        return torch.as_tensor(split_spectrum(damping, split, s_Q, s_P), dtype=s.dtype).expand(3, 4, 5)
    tiny = torch.finfo(s.dtype).tiny
    if split == "exact":
        mean = s.mean((-2, -1), keepdim=True)
        return torch.where(mean > 0, (damping * mean).clamp_min(tiny), 1.0).expand(3, 4, 5)
    d = damping**0.5
    left, right = d * s_P.mean(-1).view(3, 1, 1), d * s_Q.mean(-1).view(3, 1, 1)
    added = left * s_Q.unsqueeze(-2) + s_P.unsqueeze(-1) * right + left * right
    return torch.where(left * right > 0, added.clamp_min(tiny), 1.0)


@pytest.mark.parametrize("padding", [(0, 0), (2, 3)])
@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("split", ["exact", "equal", "trace"])
def test_what_damping_adds(split: str, relative: bool, padding: tuple[int, int]):
    rule, state, shape = rule_and_state(padding, split=split)
    for name in ("s", "s_P", "s_Q"):
        state[name][0] = 0.0  # a group without statistics
    state["s_P"][1] = 1e-300  # the product of means underflows
    context, G = context_of(shape, relative), gradient(shape)
    found = rule.direction(state, G, context, Health())
    added = added_before(split, relative, 0.1, state)
    Y = rule.rotate(state, G)
    Y[:, :4, :5] /= state["s"][:, :4, :5] + added
    torch.testing.assert_close(found, rule.unrotate(state, Y), rtol=1e-12, atol=1e-12)
    assert not found[:, 4:].any()
    assert not found[:, :, 5:].any()
    conditions = rule.conditions(state, context)
    assert conditions is not None
    torch.testing.assert_close(conditions[1], added.flatten(1).amax(1), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scaling", ["running", "none"])
def test_the_gradient_is_rotated_once(scaling: str, monkeypatch: pytest.MonkeyPatch):
    count, rotate = [0], eigenbasis.scaled_rotate

    def counted(state: State, X: Tensor, largest: Tensor | None = None, *, rough: bool = False) -> Tensor | Scaled:
        count[0] += 1
        return rotate(state, X, largest, rough=rough)

    monkeypatch.setattr(eigenbasis, "scaled_rotate", counted)
    rule, state, shape = rule_and_state(scaling=scaling)
    context, G = context_of(shape), gradient(shape)
    rule.rescale(state, None, G, context)
    rule.direction(state, G, context, Health())
    assert count == [1]
    assert "rotated" not in context.memory


@pytest.mark.parametrize("change", ["another", "in place", "refresh", "step", "again"])
def test_no_stale_rotation_is_used(change: str):
    rule, state, shape = rule_and_state(scaling="running")
    context, G = context_of(shape), gradient(shape)
    rule.rescale(state, None, G, context)
    if change == "another":
        G = gradient(shape, seed=2)
    elif change == "in place":
        G.mul_(-2.0)
    elif change == "refresh":
        state["P"].copy_(torch.diag(torch.arange(1.0, 5.0)))
        state["Q"].copy_(torch.diag(torch.arange(1.0, 6.0)))
        rule.refresh(state, slice(0, 3), context, Health())
    elif change == "step":
        context.step += 1
        kept = context.memory["rotated"][-1]
        kept.fill_(torch.nan)  # as a buffer that a kernel has filled anew behind autograd's back
    else:
        rule.direction(state, G, context, Health())
    expected = rule.unrotate(state, rule.rotate(state, G) / rule._damped(state, context))
    torch.testing.assert_close(rule.direction(state, G, context, Health()), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_gated_average_is_the_plain_one_or_none(is_open: bool):
    rule, plain, shape = rule_and_state(dtype=torch.float32, scaling="running", scaling_decay=0.3)
    gated, G = {name: x.clone() for name, x in plain.items()}, gradient(shape)
    before = plain["s"].clone()
    rule.rescale(plain, None, G, context_of(shape))
    rule.rescale(gated, None, G if is_open else G * torch.nan, context_of(shape, gate=torch.tensor(is_open)))
    torch.testing.assert_close(gated["s"], plain["s"] if is_open else before, rtol=1e-6, atol=1e-6)


def test_a_group_that_is_not_finite_keeps_its_scalings():
    rule, state, shape = rule_and_state(scaling="running")
    G, before = gradient(shape), state["s"].clone()
    G[1, 2, 3] = torch.inf
    rule.rescale(state, None, G, context_of(shape))
    assert torch.equal(state["s"][1], before[1])
    assert not torch.equal(state["s"][0], before[0])
    assert state["s"].isfinite().all()


@pytest.mark.parametrize("positions", [(), (40,)])
def test_examples_in_half_precision_train_alike(positions: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    """The route of a GPU, on a CPU: the scalings are near those of float64."""
    found = []
    for by_halves in (False, True):
        monkeypatch.setattr(CorrectedEigenvalues, "_by_halves", lambda rule, device, calls, on=by_halves: on)
        model = mlp(5, 6, 6, 3)
        opt = lw.optim.EKFAC(model, 0.01, 0.1, 0.0, refresh_every=1, clip=None, scale="formula")
        for x, y in batches(3, *positions, 5, positions=positions):
            opt.zero_grad()
            cross_entropy(model(x), y).backward()
            opt.step()
        assert opt._stacks is not None
        found.append([stack.state["s"].clone() for stack in opt._stacks])
    for exact, half in zip(*found, strict=True):
        assert not torch.equal(exact, half)
        assert float((exact - half).norm() / exact.norm()) < 2e-2
