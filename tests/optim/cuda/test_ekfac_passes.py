"""EKFAC's step as it is computed: one rotation of the gradient, damping by a few numbers a group, average squares."""

import pytest
import torch
from optim_tools import batches, cross_entropy, mlp
from torch import Tensor

import layerwise as lw
from layerwise.foundations.kronecker import split_spectrum
from layerwise.optim.backend import Backend
from layerwise.optim.cuda import backend as cuda_backend
from layerwise.optim.cuda.backend import CudaBackend
from layerwise.optim.cuda.device_step import DeviceStep
from layerwise.optim.cuda.scaled import unscaled
from layerwise.optim.engine import Layerwise
from layerwise.optim.members.ekfac import CorrectedEigenvalues
from layerwise.optim.reference import DenseBasis, Reference
from layerwise.optim.rule import Context, Shape, State

CPU = torch.device("cpu")
BACKENDS = pytest.mark.parametrize("backend", [Reference(), CudaBackend()], ids=["reference", "cuda"])


def rule_and_state(
    backend: Backend, padding: tuple[int, int] = (0, 0), dtype: torch.dtype = torch.float64, **options: str | float
) -> tuple[CorrectedEigenvalues, State, Shape]:
    """Three groups of a 4 × 5 layer with random bases, scalings and eigenvalues."""
    rule = CorrectedEigenvalues(**options)  # type: ignore[arg-type]
    shape = Shape(3, 4 + padding[0], 5 + padding[1], dtype, CPU, padding=padding)
    state, generator = rule.init(shape, backend), torch.Generator().manual_seed(0)
    basis = state["basis"]
    for U, values, own in ((basis.U_P, basis.values_P, 4), (basis.U_Q, basis.values_Q, 5)):
        vectors = torch.linalg.qr(torch.randn(3, own, own, generator=generator, dtype=torch.float64)).Q
        U[:, :own, :own] = vectors.to(dtype)
        values[:, :own] = torch.rand(3, own, generator=generator, dtype=torch.float64).to(dtype)
    state["s"][:, :4, :5] = torch.rand(3, 4, 5, generator=generator, dtype=torch.float64).to(dtype)
    return rule, state, shape


def gradient(shape: Shape, seed: int = 1) -> Tensor:
    G = torch.zeros(3, shape.outputs, shape.inputs, dtype=shape.dtype)
    G[:, :4, :5] = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(G)
    return G


def context_of(
    backend: Backend, shape: Shape, relative: bool = True, finite: Tensor | None = None, damping: float = 0.1
) -> Context:
    step = None if finite is None else DeviceStep(finite)
    return Context(7, 0.1, damping, relative, {}, backend, examples=6, shape=shape, device_step=step)


def added_before(split: str, relative: bool, damping: float, state: State) -> Tensor:
    """What was added to every scaling, written out."""
    basis = state["basis"]
    s, s_P, s_Q = state["s"][:, :4, :5], basis.values_P[:, :4], basis.values_Q[:, :5]
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


@BACKENDS
@pytest.mark.parametrize("padding", [(0, 0), (2, 3)])
@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("split", ["exact", "equal", "trace"])
def test_what_damping_adds(split: str, relative: bool, padding: tuple[int, int], backend: Backend):
    rule, state, shape = rule_and_state(backend, padding, split=split)
    basis = state["basis"]
    for numbers in (state["s"], basis.values_P, basis.values_Q):
        numbers[0] = 0.0  # a group without statistics
    basis.values_P[1] = 1e-300  # the product of means underflows
    context, G = context_of(backend, shape, relative), gradient(shape)
    found = rule.direction(state, G, context)
    added = added_before(split, relative, 0.1, state)
    Y = basis.rotate(G)
    Y[:, :4, :5] /= state["s"][:, :4, :5] + added
    torch.testing.assert_close(found, basis.unrotate(Y, context), rtol=1e-12, atol=1e-12)
    assert not found[:, 4:].any()
    assert not found[:, :, 5:].any()
    conditions = rule.conditions(state, context)
    assert conditions is not None
    torch.testing.assert_close(conditions[1], added.flatten(1).amax(1), rtol=1e-9, atol=1e-12)


@BACKENDS
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("scaling", ["running", "none"])
def test_the_gradient_is_rotated_once(scaling: str, own: bool, backend: Backend, monkeypatch: pytest.MonkeyPatch):
    """Of an average in the gradient's place (`scale="adam"`), both are: squares are of the gradient itself."""
    rotations, rotate = [], DenseBasis.rotate

    def counted(self: DenseBasis, X: Tensor, context: Context | None = None) -> Tensor:
        rotations.append(X)
        return rotate(self, X, context)

    monkeypatch.setattr(DenseBasis, "rotate", counted)
    rule, state, shape = rule_and_state(backend, scaling=scaling)
    context, G = context_of(backend, shape), gradient(shape)
    context.gradient = G
    rule.direction(state, G if own else gradient(shape, seed=2), context)
    assert len(rotations) == (1 if own or scaling == "none" else 2)


@BACKENDS
@pytest.mark.parametrize("change", ["nothing", "another", "refresh", "again"])
@pytest.mark.parametrize("split", ["exact", "trace"])
def test_every_direction_is_of_the_present_basis_and_scalings(split: str, change: str, backend: Backend):
    """Scalings are averages of the step's own gradient, whatever is divided by them."""
    rule, state, shape = rule_and_state(backend, scaling="running", split=split)
    context, G = context_of(backend, shape), gradient(shape)
    context.gradient = G
    if change == "refresh":
        rule.direction(state, G, context)
        state["P"].mean.copy_(torch.diag(torch.arange(1.0, 5.0)))
        state["Q"].mean.copy_(torch.diag(torch.arange(1.0, 6.0)))
        rule.refresh(state, slice(0, 3), context)
    elif change == "again":
        rule.direction(state, G, context)
    before, basis = state["s"].clone(), state["basis"]
    X = gradient(shape, seed=2) if change == "another" else G
    found = rule.direction(state, X.clone() if change == "again" else X, context)
    averaged = rule.scaling_decay * before + (1 - rule.scaling_decay) * 6 * basis.rotate(G).square()
    torch.testing.assert_close(state["s"], averaged, rtol=1e-12, atol=1e-12)
    damped = averaged + added_before(split, True, 0.1, state)
    expected = basis.unrotate(basis.rotate(X) / damped, context)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("split", ["exact", "trace"])
def test_an_asynchronous_average_is_the_plain_one_or_none(split: str, finite: bool):
    plain, cuda = Reference(), CudaBackend()
    options = {"scaling": "running", "scaling_decay": 0.3, "split": split}
    rule, state, shape = rule_and_state(plain, dtype=torch.float32, **options)
    other, G = rule_and_state(cuda, dtype=torch.float32, **options)[1], gradient(shape)
    before = state["s"].clone()
    given = G if finite else torch.full_like(G, torch.nan)
    for of, backend, X, flag in ((state, plain, G, None), (other, cuda, given, torch.tensor(finite))):
        context = context_of(backend, shape, finite=flag)
        context.gradient = X
        rule.direction(of, X, context)
    torch.testing.assert_close(other["s"], state["s"] if finite else before, rtol=1e-6, atol=1e-6)


@BACKENDS
def test_a_group_that_is_not_finite_keeps_its_scalings(backend: Backend):
    rule, state, shape = rule_and_state(backend, scaling="running")
    G, before = gradient(shape), state["s"].clone()
    G[1, 2, 3] = torch.inf
    context = context_of(backend, shape)
    backend.average_squares_(state["s"], state["basis"].rotate(G, context), rule.scaling_decay, context)
    assert torch.equal(state["s"][1], before[1])
    assert not torch.equal(state["s"][0], before[0])
    assert state["s"].isfinite().all()


@pytest.mark.parametrize("positions", [(), (40,)])
def test_examples_in_half_precision_train_alike(positions: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    """The route of a GPU, on a CPU: the scalings are near those of float64."""
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))
    found = []
    for by_halves in (False, True):
        monkeypatch.setattr(cuda_backend, "in_half_precision", lambda device, calls, on=by_halves: on)
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


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("finite", [None, True], ids=["eager", "asynchronous"])
@pytest.mark.parametrize("solver", ["eigh", "products"])
def test_an_average_in_bfloat16_is_divided_as_one_in_float32(solver: str, finite: bool | None, nesterov: bool):
    """Also where no kernel moves it: with Nesterov's momentum, and where several processes take steps together."""
    backend = CudaBackend(solver)
    rule = CorrectedEigenvalues(averages=True, scaling="running", split="trace")
    shape, generator = Shape(3, 16, 32, torch.float32, CPU), torch.Generator().manual_seed(0)
    ways = []
    for dtype in (torch.float32, torch.bfloat16):
        state = rule.init(shape, backend)
        state["M"] = state["M"].to(dtype)
        for seed in (1, 2, 3):
            G = torch.randn(3, 16, 32, generator=generator.manual_seed(seed))
            context = context_of(backend, shape, finite=None if finite is None else torch.tensor(finite))
            context.options.update(momentum=0.9, nesterov=nesterov)
            D = unscaled(rule.direction(state, G, context))
        assert state["M"].dtype == dtype
        ways.append(D)
    assert float((ways[1] - ways[0]).norm()) < 5e-3 * float(ways[0].norm())
