"""K-FAC: every step equals ``P⁻¹ ∇L Q⁻¹`` with matrices formed explicitly, for each estimator, damping and schedule."""

import math
from collections.abc import Callable

import pytest
import torch
from optim_tools import (
    Mean,
    Record,
    Reference,
    assert_same_steps,
    batches,
    convnet,
    cross_entropy,
    eye,
    gaussian,
    mean_eigenvalue,
    mlp,
)
from torch import Tensor, nn

import layerwise as lw
from layerwise.foundations.random import stream

pytestmark = pytest.mark.usefixtures("untyped")
STEPS = 20
DAMPING = 0.03


def damped_solve(split: str, relative: bool, damping: float, P: Tensor, Q: Tensor, G: Tensor) -> Tensor:
    """The damped natural direction of one layer, group by group."""
    if split == "exact":
        found = []
        for p, q, g in zip(P, Q, G, strict=True):
            M = torch.kron(p, q)
            shift = damping * M.trace() / len(M) if relative else damping
            found.append(torch.linalg.solve(M + shift * eye(M), g.reshape(-1)).view_as(g))
        return torch.stack(found)
    mp, mq = mean_eigenvalue(P), mean_eigenvalue(Q)
    root = math.sqrt(damping)
    if relative:
        left, right = root * mp, root * mq
    else:
        pi = (mq / mp).sqrt() if split == "trace" else torch.ones_like(mp)
        left, right = root / pi, root * pi
    return torch.linalg.inv(P + left * eye(P)) @ G @ torch.linalg.inv(Q + right * eye(Q))


def kfac_direction(
    split: str = "trace", relative: bool = True, decay: float = 0.95, reduce: bool = False, damping: float = DAMPING
) -> Callable[[int, dict[str, Tensor], dict[str, Record]], dict[str, Tensor]]:
    P: dict[str, Mean] = {}
    Q: dict[str, Mean] = {}

    def direction(t: int, grads: dict[str, Tensor], records: dict[str, Record]) -> dict[str, Tensor]:
        found = {}
        for name, G in grads.items():
            seen = records[name].reduced() if reduce else records[name]
            p = P.setdefault(name, Mean(decay)).add(seen.P())
            q = Q.setdefault(name, Mean(decay)).add(seen.Q())
            found[name] = damped_solve(split, relative, damping, p, q, G)
        return found

    return direction


def check(model: nn.Module, data, options: dict, tol: float = 1e-9, cotangents=None, **reference) -> None:
    opt = lw.optim.KFAC(
        model, lr=0.005, momentum=0.9, damping=DAMPING, **{"refresh_every": 1, **options}, clip=None, scale="formula"
    )
    own = Reference(model, kfac_direction(**reference), cross_entropy, 0.005, momentum=0.9, cotangents=cotangents)
    assert_same_steps(opt, model, own, data, tol)


@pytest.mark.parametrize("scale", ["relative", "absolute"])
@pytest.mark.parametrize("split", ["trace", "equal", "exact"])
def test_damping(split: str, scale: str):
    options = {"damping_split": split, "damping_scale": scale}
    check(mlp(), batches(STEPS, 5), options, split=split, relative=scale == "relative")


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99])
def test_the_average_of_the_factors_has_no_bias(decay: float):
    check(mlp(), batches(STEPS, 5), {"factor_decay": decay}, decay=decay)


@pytest.mark.parametrize("split", ["trace", "exact"])
def test_convolutions(split: str):
    check(convnet(), batches(STEPS, 2, 4, 4), {"damping_split": split}, split=split)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("shape", ["sequence", "convolution"])
def test_weight_sharing(sharing: str, shape: str):
    model, data = convnet(), batches(STEPS, 2, 4, 4)
    if shape == "sequence":
        model, data = mlp(), batches(STEPS, 4, 5, positions=(4,))
    check(model, data, {"sharing": sharing}, 1e-6, reduce=sharing == "reduce")


# --- labels of the model ----------------------------------------------------------------------------------


def softmax_roots(f: Tensor, y: Tensor, number: int) -> list[Tensor]:
    """``√p_c (e_c − p)``, one position at a time: ``Σ v vᵀ = diag p − p pᵀ``."""
    p = f.softmax(-1)
    columns = [p[..., c : c + 1].sqrt() * (torch.eye(f.shape[-1], dtype=f.dtype)[c] - p) for c in range(f.shape[-1])]
    if f.ndim == 2:
        return columns
    found = []
    for s in range(f.shape[1]):
        for column in columns:
            v = torch.zeros_like(f)
            v[:, s] = column[:, s]
            found.append(v)
    return found


@pytest.mark.parametrize("positions", [(), (4,)])
def test_exact_labels(positions: tuple[int, ...]):
    data = batches(STEPS, *positions, 5, positions=positions)
    likelihood = lw.likelihoods.Categorical(class_axis=-1)
    check(mlp(), data, {"likelihood": likelihood, "estimator": "exact"}, cotangents=softmax_roots)


def test_exact_labels_through_convolutions():
    options = {"likelihood": "categorical", "estimator": "exact"}
    check(convnet(), batches(STEPS, 2, 4, 4), options, cotangents=softmax_roots)


@pytest.mark.parametrize("samples", [1, 3])
def test_sampled_labels(samples: int):
    """The labels are those of the documented stream: named by the seed, the forward and the sample."""

    def drawn(f: Tensor, y: Tensor, number: int) -> list[Tensor]:
        law = lw.likelihoods.Categorical()
        terms = law.standardize(f, None, None, lambda t: t)
        rows = [law.sample(terms, stream(7, "labels", number, v))[:, 0] for v in range(samples)]
        p = f.softmax(-1)
        for row in rows:  # p − e_y for some label y
            y_drawn = (p - row).argmax(-1)
            assert torch.allclose(row, p - torch.nn.functional.one_hot(y_drawn, 3), atol=1e-12)
        return [row / samples**0.5 for row in rows]

    options = {"likelihood": "categorical", "samples": samples, "seed": 7}
    check(mlp(), batches(STEPS, 5), options, cotangents=drawn)


def test_sampled_factors_are_the_exact_ones_in_the_mean():
    """300 labels for each of 12 examples: the standard error is below 1/√3600 = 2 % of the largest entry; 5 of them."""
    found = {}
    for estimator, samples in (("exact", 1), ("sampled", 300)):
        model = mlp(4, 4, 3)
        opt = lw.optim.KFAC(
            model, lr=0.0, likelihood="categorical", estimator=estimator, samples=samples, clip=None, scale="formula"
        )
        x, y = batches(1, 4)[0]
        cross_entropy(model(x), y).backward()
        opt.step()
        found[estimator] = next(iter(opt.state_dict()["state"].values()))["0"]["P"]
    assert (found["exact"] - found["sampled"]).abs().max() < 0.1 * found["exact"].abs().max()


# --- schedules --------------------------------------------------------------------------------------------


def test_statistics_are_taken_every_few_steps():
    P: dict[str, Mean] = {}
    Q: dict[str, Mean] = {}

    def direction(t: int, grads: dict[str, Tensor], records: dict[str, Record]) -> dict[str, Tensor]:
        found = {}
        for name, G in grads.items():
            if (t - 1) % 3 == 0:
                P.setdefault(name, Mean(0.95)).add(records[name].P())
                Q.setdefault(name, Mean(0.95)).add(records[name].Q())
            found[name] = damped_solve("trace", True, DAMPING, P[name].value(), Q[name].value(), G)
        return found

    model = mlp()
    opt = lw.optim.KFAC(
        model, lr=0.05, momentum=0.0, damping=DAMPING, factor_every=3, refresh_every=1, clip=None, scale="formula"
    )
    assert_same_steps(opt, model, Reference(model, direction, cross_entropy, 0.05), batches(24, 5))


@pytest.mark.parametrize("every", [1, 2, 5, 10])
def test_decompositions_are_renewed_in_turns(every: int):
    """All at the doublings 1, 2, 4, … below `every`; each layer also in its turn, every `every` steps."""
    turn = {"0": 0, "2": 1, "4": 1}  # layers 0 and 2 are one stack, 4 the next
    P: dict[str, Mean] = {}
    Q: dict[str, Mean] = {}
    inverses: dict[str, tuple[Tensor, Tensor]] = {}
    refreshed: list[tuple[int, str]] = []

    def direction(t: int, grads: dict[str, Tensor], records: dict[str, Record]) -> dict[str, Tensor]:
        found = {}
        for name, G in grads.items():
            p = P.setdefault(name, Mean(0.95)).add(records[name].P())
            q = Q.setdefault(name, Mean(0.95)).add(records[name].Q())
            young = t < every and t in (1, 2, 4, 8, 16)
            if t == 1 or young or (t - 1 - turn[name]) % every == 0:
                refreshed.append((t, name))
                root = math.sqrt(DAMPING)
                inverses[name] = (
                    torch.linalg.inv(p + root * mean_eigenvalue(p) * eye(p)),
                    torch.linalg.inv(q + root * mean_eigenvalue(q) * eye(q)),
                )
            found[name] = inverses[name][0] @ G @ inverses[name][1]
        return found

    model = mlp()
    opt = lw.optim.KFAC(model, lr=0.01, momentum=0.0, damping=DAMPING, refresh_every=every, clip=None, scale="formula")
    assert_same_steps(opt, model, Reference(model, direction, cross_entropy, 0.01), batches(24, 5))
    assert opt.health().refreshes == len(refreshed)


def test_a_damping_schedule():
    model = mlp()
    inner = {}

    def direction(t: int, grads: dict[str, Tensor], records: dict[str, Record]) -> dict[str, Tensor]:
        found = {}
        for name, G in grads.items():
            means = inner.setdefault(name, (Mean(0.95), Mean(0.95)))
            P, Q = means[0].add(records[name].P()), means[1].add(records[name].Q())
            found[name] = damped_solve("trace", True, 1.0 / t, P, Q, G)
        return found

    opt = lw.optim.KFAC(
        model, lr=0.05, momentum=0.0, damping=lambda step: 1.0 / step, refresh_every=1, clip=None, scale="formula"
    )
    assert_same_steps(opt, model, Reference(model, direction, cross_entropy, 0.05), batches(STEPS, 5))


# --- the paper's identities -------------------------------------------------------------------------------


def _two_layers(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(6, 3, bias=False), nn.Linear(3, 4, bias=False)).double()
    with torch.no_grad():
        model[0].weight.copy_(gaussian(3, 6, seed=seed))
        model[1].weight.copy_(gaussian(4, 3, seed=seed + 1))
    return model, gaussian(40, 6, seed=seed + 2), gaussian(40, 4, seed=seed + 3)


def half_squares(f: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (f - y).square().sum() / len(f)


@pytest.mark.parametrize("damping", [0.0, 1e-3])
def test_kfac_on_two_linear_layers_is_the_stylised_update(damping: float):
    """``G − η (FᵀF)⁻¹ ∇_G Σx⁻¹`` for the representation, ``F − η ∇_F Σz⁻¹`` for the head (eq. 5); 20 steps."""
    model, x, y = _two_layers(0)
    opt = lw.optim.KFAC(
        model, 0.1, damping, 0.0, likelihood="gaussian", estimator="exact", damping_scale="absolute",
        damping_split="equal", factor_decay=0.0, refresh_every=1, clip=None, scale="formula",
    )  # fmt: skip
    root = damping**0.5
    for _ in range(20):
        G, F = model[0].weight.detach().clone(), model[1].weight.detach().clone()
        Sx, z, R = x.T @ x / len(x), x @ G.T, x @ G.T @ F.T - y
        grad_G, grad_F = F.T @ R.T @ x / len(x), R.T @ z / len(x)
        opt.zero_grad()
        half_squares(model(x), y).backward()
        opt.step()
        P, Sz, I = F.T @ F, z.T @ z / len(x), torch.eye(4, dtype=x.dtype)
        step = torch.linalg.inv(P + root * eye(P)) @ grad_G @ torch.linalg.inv(Sx + root * eye(Sx))
        head = torch.linalg.inv(I + root * I) @ grad_F @ torch.linalg.inv(Sz + root * eye(Sz))
        assert (model[0].weight - (G - 0.1 * step)).abs().max() < 1e-10
        assert (model[1].weight - (F - 0.1 * head)).abs().max() < 1e-10
