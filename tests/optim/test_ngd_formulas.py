"""NGD: one solve with the whole matrix of the batch, by three methods."""

import pytest
import torch
import torch.nn.functional as F
from optim_tools import Record, Reference, assert_same_steps, batches, convnet, cross_entropy, flat, mlp, train_step
from test_kfac_formulas import softmax_roots
from torch import Tensor, nn

import layerwise as lw
from layerwise.testing import oracles
from thinning import thinned

pytestmark = pytest.mark.usefixtures("untyped")
LR, DAMPING = 0.05, 0.1


def whole(relative: bool):
    """``(F + λI)⁻¹ ∇L`` with F from per-example gradients of all layers side by side."""

    def direction(t: int, grads: dict[str, Tensor], records: dict[str, Record]) -> dict[str, Tensor]:
        R = torch.cat([records[name].rows().flatten(0, 1).flatten(1) for name in grads], 1)
        n = next(iter(records.values())).a.shape[0]
        Fisher = R.T @ R / n
        shift = DAMPING * (Fisher.trace() / min(n, len(Fisher)) if relative else 1.0)
        g = torch.cat([G.reshape(-1) for G in grads.values()])
        x = torch.linalg.inv(Fisher + shift * torch.eye(len(Fisher), dtype=g.dtype)) @ g
        pieces = x.split([G.numel() for G in grads.values()])
        return {name: piece.view_as(G) for (name, G), piece in zip(grads.items(), pieces, strict=True)}

    return direction


@pytest.mark.parametrize(
    ("method", "estimator", "shape"), thinned(["dense", "woodbury", "cg"], ["empirical", "exact"], ["dense", "conv"])
)
def test_ngd(shape: str, estimator: str, method: str):
    model, data = (mlp(), batches(20, 5, n=6)) if shape == "dense" else (convnet(), batches(20, 2, 4, 4, n=6))
    options = {} if estimator == "empirical" else {"likelihood": "categorical", "estimator": "exact"}
    opt = lw.optim.NGD(model, LR, DAMPING, 0.5, method=method, tol=1e-13, max_iterations=1000, **options, clip=None)
    cotangents = None if estimator == "empirical" else softmax_roots
    reference = Reference(model, whole(True), cross_entropy, LR, momentum=0.5, cotangents=cotangents)
    assert_same_steps(opt, model, reference, data, tol=1e-8)


@pytest.mark.parametrize("method", ["dense", "woodbury", "cg"])
def test_absolute_damping_and_sequences(method: str):
    model, data = mlp(), batches(20, 4, 5, n=6, positions=(4,))
    opt = lw.optim.NGD(
        model, LR, DAMPING, method=method, damping_scale="absolute", tol=1e-13, max_iterations=1000, clip=None
    )
    assert_same_steps(opt, model, Reference(model, whole(False), cross_entropy, LR), data, tol=1e-8)


class Tokens(nn.Module):
    """An embedding, norms and a head used twice: layers without a Kronecker form take part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.mix = nn.Embedding(6, 4), nn.LayerNorm(4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(self.norm(self.embed(x))).tanh()
        return self.head(self.mix(h).tanh().mean(1))


@pytest.mark.parametrize("method", ["dense", "woodbury", "cg"])
def test_all_layer_types_take_part(method: str):
    """Against the oracle's dense matrix: embeddings, norms, a layer that is called twice."""
    torch.manual_seed(0)
    model = Tokens().double()
    x, y = torch.randint(6, (5, 4)), torch.randint(3, (5,))
    expected = oracles.fisher(model, x, likelihood="categorical")
    g = torch.cat([t.reshape(-1) for t in torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))])
    d = torch.linalg.solve(expected + 0.2 * torch.eye(len(g), dtype=g.dtype), g)
    before = flat(model)
    opt = lw.optim.NGD(
        model,
        0.5,
        0.2,
        method=method,
        likelihood="categorical",
        estimator="exact",
        damping_scale="absolute",
        tol=1e-13,
        clip=None,
    )
    train_step(model, opt, (x, y), cross_entropy)
    assert (flat(model) - (before - 0.5 * d)).abs().max() < 1e-9


class Branches(nn.Module):
    """The second layer is left out when `short` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.short = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.head(h if self.short else self.second(h).tanh())


@pytest.mark.parametrize("method", ["dense", "woodbury", "cg"])
def test_a_layer_that_one_forward_of_the_step_leaves_out(method: str):
    """Its rows are zero there: compared with per-example gradients over both forwards."""
    torch.manual_seed(0)
    model = Branches().double()
    x, y = torch.randn(10, 4, dtype=torch.float64), torch.randint(3, (10,))
    opt = lw.optim.NGD(model, lr=0.1, damping=0.3, damping_scale="absolute", method=method, accumulate=2, clip=None)
    parts = ((True, slice(0, 5)), (False, slice(5, 10)))
    rows = []
    for short, cut in parts:
        model.short = short
        for a, b in zip(x[cut], y[cut], strict=True):
            loss = nn.functional.cross_entropy(model(a[None]), b[None])
            grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            rows.append(torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten()
                                   for p, g in zip(model.parameters(), grads, strict=True)]))  # fmt: skip
    R = torch.stack(rows)
    F, g = R.T @ R / 10, R.mean(0)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    opt.zero_grad()
    for short, cut in parts:
        model.short = short
        (nn.functional.cross_entropy(model(x[cut]), y[cut]) / 2).backward()
    opt.step()
    step = before - torch.cat([p.detach().flatten() for p in model.parameters()])
    expected = 0.1 * torch.linalg.solve(F + 0.3 * torch.eye(len(g), dtype=torch.float64), g)
    assert (step - expected).norm() < 1e-6 * expected.norm()
