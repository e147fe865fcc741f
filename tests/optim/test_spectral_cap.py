"""The largest singular value of an update is bounded: one that has its norm in a single direction is cut there."""

import copy
from typing import Any

import pytest
import torch
from optim_tools import flat
from torch import Tensor, nn

import layerwise as lw
from layerwise.optim.engine import Layerwise
from layerwise.optim.step.spectral_cap import TIMES, capped, right_singular_vectors
from random_tensors import randn

pytestmark = [
    pytest.mark.usefixtures("untyped"),
    pytest.mark.filterwarnings("ignore:.*the empirical Fisher matrix"),
]


def norms(D: Tensor) -> Tensor:
    return D.flatten(1).norm(dim=1)


def peaked(K: int, O: int, I: int, share: float, seed: int = 0) -> Tensor:
    """Noise of norm 1, and one direction with `share` of its square in addition."""
    noise = randn(K, O, I, seed=seed).double()
    u, v = randn(K, O, 1, seed=seed + 1).double(), randn(K, 1, I, seed=seed + 2).double()
    return noise / norms(noise).view(-1, 1, 1) + share**0.5 * u @ v / norms(u @ v).view(-1, 1, 1)


@pytest.mark.parametrize(("O", "I"), [(128, 128), (40, 300), (300, 40), (129, 513)])
def test_what_a_decomposition_would_cut(O: int, I: int):
    D = peaked(3, O, I, share=4.0)
    U, S, Vh = torch.linalg.svd(D, full_matrices=False)
    bound = TIMES * norms(D) / min(O, I) ** 0.5
    assert bool((S[:, 0] > 1.2 * bound).all())
    assert bool((S[:, 1] < bound).all())
    expected = (U * torch.minimum(S, bound[:, None])[:, None, :]) @ Vh
    found = capped(D, norms(D), (O, I))
    assert bool((norms(found - expected) < 0.05 * norms(D - expected)).all())
    assert bool((torch.linalg.matrix_norm(found, ord=2) < 1.02 * bound).all())


@pytest.mark.parametrize("seed", range(5))
def test_nothing_gets_longer(seed: int):
    """Whatever singular vectors were found: of noise, none stands out."""
    D = peaked(2, 64, 96, share=0.3 * seed, seed=seed)
    found = capped(D, norms(D), (64, 96))
    before, after = torch.linalg.svdvals(D), torch.linalg.svdvals(found)
    assert bool((after <= before * (1 + 1e-9)).all())
    cut = D @ D.mT - found @ found.mT
    assert float(torch.linalg.eigvalsh(cut).min()) > -1e-9


def test_flat_spectra_small_matrices_and_zeros_stay():
    eye = torch.eye(64).expand(2, -1, -1).contiguous()
    assert torch.equal(capped(eye, norms(eye), (64, 64)), eye)
    line = peaked(2, 8, 300, share=9.0)
    assert capped(line, norms(line), (8, 300)) is line
    zeros = torch.zeros(2, 64, 64)
    assert torch.equal(capped(zeros, norms(zeros), (64, 64)), zeros)
    assert right_singular_vectors(zeros).abs().max() == 0


def test_padding_is_not_counted():
    """A side of 8 that is padded to 64 is a small matrix."""
    D = torch.zeros(1, 64, 64)
    D[:, :8] = peaked(1, 8, 64, share=9.0).float()
    assert capped(D, norms(D), (8, 64)) is D
    assert capped(D, norms(D), (64, 64)) is not D


@pytest.mark.parametrize("size", [1e-3, 3e4])
def test_half_precision(size: float):
    """Entries as large as half precision holds, whose singular values it does not."""
    D = peaked(2, 256, 384, share=4.0)
    D = (D * size / D.abs().amax((1, 2), keepdim=True)).half()
    exact = capped(D.double(), norms(D.double()), (256, 384))
    found = capped(D, norms(D.float()), (256, 384))
    assert found.dtype == torch.float16
    assert bool(found.isfinite().all())
    assert bool((norms(found.double() - exact) < 2e-3 * norms(exact)).all())


# --- in a step --------------------------------------------------------------------------------------------------


def wide(side: int = 64) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(side, side, bias=False), nn.Tanh(), nn.Linear(side, side), nn.Tanh(), nn.Linear(side, 4)
        )


def train(opt: Any, model: nn.Module, steps: range, examples: int) -> None:
    for step in steps:
        opt.zero_grad()
        x, y = randn(examples, 64, seed=step), randn(examples, 4, seed=100 + step)
        (model(x) - y).square().mean().backward()
        opt.step()


@pytest.mark.parametrize("name", ["KFAC", "EKFAC", "FOOF", "Shampoo"])
def test_an_update_of_rank_one(name: str):
    """One example has a gradient of rank one, and so has its update; AdamW's has the same norm but for the cut."""
    model, rate = wide(), 1e-3
    before, twin = model[0].weight.detach().clone(), copy.deepcopy(model)
    train(getattr(lw.optim, name)(model, lr=rate, weight_decay=0.0), model, range(1), examples=1)
    train(torch.optim.AdamW(twin.parameters(), lr=rate, weight_decay=0.0), twin, range(1), examples=1)
    ours, adamw = model[0].weight.detach() - before, twin[0].weight.detach() - before
    assert float(ours.norm()) == pytest.approx(float(adamw.norm()) * TIMES / 64**0.5, rel=2e-2)


def test_muon_has_nothing_to_cut(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("layerwise.optim.step.update.capped", None)
    model = wide()
    before = flat(model)
    train(lw.optim.Muon(model), model, range(2), examples=4)
    assert not torch.equal(before, flat(model))


@pytest.mark.parametrize("name", ["FOOF", "KFAC"])
def test_asynchronous_steps_cut_the_same(name: str, monkeypatch: pytest.MonkeyPatch):
    """With two examples every update is cut."""
    options: dict[str, Any] = {"solver": "products", "refresh_every": 1, "weight_decay": 0.1, "lr": 3e-3}
    if name == "KFAC":
        options["estimator"] = "empirical"
    ends = []
    for asynchronous in (False, True):
        if asynchronous:
            monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))
        model = wide()
        train(getattr(lw.optim, name)(model, **options), model, range(5), examples=2)
        ends.append(flat(model))
    way = float((ends[0] - flat(wide())).norm())
    assert float((ends[1] - ends[0]).norm()) < 1e-3 * way
