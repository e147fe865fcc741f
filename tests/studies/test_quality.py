"""Measures of structures against matrices by autograd and plain products, with nothing of the library."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from error_sentences import WORDED
from layerwise import data
from layerwise.curvature.build import fisher
from layerwise.foundations.errors import InputError
from layerwise.studies.fisher_geometry.character_transformer import FILE, Characters, text
from layerwise.studies.fisher_geometry.convolutional import ResNet
from layerwise.studies.fisher_geometry.quality import (
    BY_LAYER,
    FACTORED,
    Quality,
    ResNet18,
    digits,
    memory_peak,
    products,
    seeded,
)

DAMPING = 0.01


def mlp() -> nn.Sequential:
    with seeded(0, "mlp"):
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def batch(*shape: int, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, dtype=torch.float64, generator=generator)
    return x, torch.randint(classes, shape[:1], generator=generator)


def plain_fisher(model: nn.Module, x: Tensor) -> Tensor:
    """``1/N Σ_n J_nᵀ (diag p − ppᵀ) J_n``, parameters in the order in which the model has them."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    jacobians = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(params)
    J = torch.cat([jacobian.flatten(2) for jacobian in jacobians.values()], dim=2)
    p = model(x).softmax(-1).detach()
    H = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    return torch.einsum("nci,ncd,ndj->ij", J, H, J) / len(x)


def plain_kfac(model: nn.Sequential, x: Tensor, damping: float = 0.0) -> Tensor:
    """``(G + √λ/π I) ⊗ (A + π√λ I)`` of both layers, ``π² = (tr A / I) / (tr G / O)``."""
    first, last = model[0], model[2]
    hidden = model[:2](x).detach()
    p = model(x).softmax(-1).detach()
    H = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    back = torch.einsum("oh,nh->noh", last.weight.detach(), 1 - hidden.square())
    blocks = []
    for layer, a, g in ((first, x, torch.einsum("noh,nop,npk->hk", back, H, back)), (last, hidden, H.sum(0))):
        ones = torch.ones(len(x), 1, dtype=x.dtype)
        a, g = torch.cat([a, ones], 1), g / len(x)
        A, (o, i) = a.T @ a / len(x), layer.weight.shape
        pi = (A.trace() / (i + 1) / (g.trace() / o)).sqrt()
        A = A + pi * damping**0.5 * torch.eye(i + 1, dtype=x.dtype)
        g = g + damping**0.5 / pi * torch.eye(o, dtype=x.dtype)
        weight_first = [row * (i + 1) + column for row in range(o) for column in range(i)]
        order = [*weight_first, *(row * (i + 1) + i for row in range(o))]
        blocks.append(torch.kron(g, A)[order][:, order])
    return torch.block_diag(*blocks)


def test_measures_are_those_of_the_formulas():
    model, (x, y) = mlp(), batch(12, 3)
    F, K = plain_fisher(model, x), plain_kfac(model, x)
    cut = model[0].weight.numel() + model[0].bias.numel()
    block = torch.block_diag(F[:cut, :cut], F[cut:, cut:])
    eye = torch.eye(len(F), dtype=F.dtype)
    quality = Quality(directions=6, together=4, dampings=(DAMPING,))
    found = quality.of(model, (x, y), seed=3)
    v = torch.cat(list(quality._directions(fisher(model, (x, y), structure="dense", estimator="exact"), 3)), 1)
    right = (F + DAMPING * eye) @ v
    torch.testing.assert_close(v.norm(dim=0), torch.ones(6, dtype=v.dtype))
    for name, M in {"diag": F.diagonal().diag(), "block": block, "kfac": K}.items():
        off = ((v * (M @ v)).sum(0) / (v * (F @ v)).sum(0) - 1).abs()
        cos = torch.cosine_similarity(M @ v, F @ v, dim=0)
        solved = torch.cosine_similarity(torch.linalg.solve(M + DAMPING * eye, right), v, dim=0)
        expected = {
            "trace": (M.trace() / F.trace() - 1).abs(),
            "frobenius": (M - F).norm() / F.norm(),
            "quad": off.mean(),
            "cos": cos.mean(),
            "cos/se": cos.std() / 6**0.5,
            f"solve/{DAMPING}": solved.mean(),
        }
        for what, value in expected.items():
            assert found[f"{name}/{what}"] == pytest.approx(float(value), rel=1e-8, abs=1e-12), (name, what)
    factored = torch.linalg.solve(plain_kfac(model, x, DAMPING), right)
    cosine = float(torch.cosine_similarity(factored, v, dim=0).mean())
    assert found[f"{FACTORED}/solve/{DAMPING}"] == pytest.approx(cosine, rel=1e-8)
    assert found["ekfac/trace"] < 1e-12
    assert found["ekfac/frobenius"] <= found["kfac/frobenius"]


@pytest.mark.parametrize("truth", ["implicit", "products"])
def test_a_matrix_that_is_never_formed_gives_the_same(truth: str):
    model, given = mlp(), batch(12, 3)
    dense, found = (Quality(truth=t, directions=4, together=3).of(model, given, 0) for t in ("dense", truth))
    assert set(dense) - set(found) == {f"{name}/frobenius" for name in ("diag", "quasidiag", "block", "kfac", "ekfac")}
    assert found == pytest.approx({name: dense[name] for name in found}, abs=1e-9)


def test_products_with_convolutions(device: str):
    """Some examples at a time, and the model is left alone."""
    with seeded(0, "convolutions"):
        model = ResNet((1, 1, 1, 1), 2).double().to(device)
    x, y = (t.to(device) for t in batch(5, 3, 8, 8, classes=10))
    d = sum(p.numel() for p in model.parameters())
    v = torch.randn(d, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device)
    found = products(model, x, v, at_once=2)
    torch.testing.assert_close(found, fisher(model, (x, y), structure="implicit", estimator="exact") @ v)
    torch.testing.assert_close(found.cpu(), plain_fisher(model, x).cpu() @ v.cpu())
    assert not found.requires_grad
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_traces_of_drawn_labels_agree_with_each_other_and_change_with_the_seed():
    model, given = mlp(), batch(12, 3)
    quality = Quality(structures=BY_LAYER, truth="implicit", samples=2, directions=2, dampings=(0.1,))
    found, again, other = (quality.of(model, given, seed) for seed in (0, 0, 1))
    assert found == again
    assert max(found[f"{name}/trace"] for name in ("diag", "quasidiag", "ekfac")) < 1e-12
    assert found["kfac/trace"] > 1e-3
    assert found["kfac/trace"] != other["kfac/trace"]


def test_a_small_damping_is_not_lost_in_float32():
    """Eigenvalues beside which it is below the rounding of float32: the solve is done in float64."""
    model, (x, y) = mlp().float(), batch(12, 3)
    found = Quality(directions=2, dampings=(1e-6,)).of(model, (100 * x.float(), y), 0)
    assert all(-1 <= value <= 1 for name, value in found.items() if name.endswith("solve/1e-06"))


@pytest.mark.parametrize("wrong", [{"truth": "implict"}, {"directions": 1}, {"together": 0}])
def test_what_cannot_be_asked(wrong: dict):
    with pytest.raises(InputError, match=WORDED):
        Quality(**wrong)


# --- networks ------------------------------------------------------------------------------------------------------


def test_digits_are_those_of_the_reference():
    """Loss 2.3 before training and 0.38 after 50 steps; 1510 parameters; the mean image is taken off."""
    pytest.importorskip("sklearn")
    first, later = digits((50, 0), 100, seed=0)
    assert [first.step, later.step] == [0, 50]
    assert sum(p.numel() for p in first.model.parameters()) == 1510
    assert first.loss() == pytest.approx(2.3, abs=0.2)
    assert later.loss() == pytest.approx(0.38, abs=0.1)


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text that a small network can learn."""
    (tmp_path / "text").mkdir()
    (tmp_path / FILE).write_text("to be or not to be, that is the question\n" * 20)
    monkeypatch.setenv("LAYERWISE_DATA", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("words")
def test_the_transformer_learns_and_does_not_look_ahead():
    size = Characters(width=8, length=8)
    losses = [shot.loss() for shot in size.snapshots((0, 60), 20, seed=0)]
    assert losses[1] < 0.9 * losses[0]
    (shot,) = size.snapshots((0,), 20, seed=0)
    x, y = shot.batch
    assert torch.equal(x[:, 1:], y[:, :-1])
    changed = torch.cat([x[:, :-1], (x[:, -1:] + 1) % 5], 1)
    torch.testing.assert_close(shot.model(changed)[:, :-1], shot.model(x)[:, :-1])


@pytest.mark.usefixtures("words")
def test_examples_are_the_same_for_all_seeds_and_networks_are_not():
    before = torch.get_rng_state()
    shots = [next(Characters(width=4, length=4).snapshots((0,), 6, seed=seed)) for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    weights = [shot.model.head.weight for shot in shots]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert torch.equal(shots[0].batch[0], shots[2].batch[0])


@pytest.mark.parametrize("folder", [None, "."])
def test_a_missing_text_is_named(folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LAYERWISE_DATA", raising=False)
    if folder:
        monkeypatch.setenv("LAYERWISE_DATA", folder)
    with pytest.raises(
        FileNotFoundError, match=r"LAYERWISE_DATA.*text/tinyshakespeare\.txt|tinyshakespeare.*LAYERWISE"
    ):
        text()


def test_heads_divide_the_width():
    with pytest.raises(InputError, match="multiple of the heads"):
        Characters(width=9)


def test_a_small_residual_network_trains(monkeypatch: pytest.MonkeyPatch):
    x, y = torch.rand(40, 3, 8, 8), torch.arange(40) % 10
    monkeypatch.setattr(
        data, "cifar10", lambda *_, limit, **__: data.Images(x + y.view(-1, 1, 1, 1) / 5, y).first(limit)
    )
    network = ResNet18(blocks=(1, 1, 1, 1), channels=4, images=40, batch=20, lr=0.01)
    losses = [shot.loss() for shot in network.snapshots((0, 100), 30, seed=0)]
    assert losses[1] < losses[0]


def test_a_cpu_has_no_peak():
    assert memory_peak("cpu") == {}
