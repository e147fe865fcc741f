"""Packed factors on a GPU: the kernels against whole matrices, and steps with and without packing."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.optim.cuda import factor
from layerwise.optim.cuda.linalg import packed, split_fp16
from layerwise.optim.cuda.triton import products as triton_products
from layerwise.optim.cuda.triton.columns import average_grams_
from random_tensors import cuda_randn as randn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and triton_products.available(torch.device("cuda"))),
        reason="needs triton and a GPU of capability 8.0; run `make test-gpu` on one",
    ),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # torch, at the first product of a thread
]
MEMBERS: dict[str, Callable[[nn.Module], lw.optim.Layerwise]] = {
    "KFAC": lambda m: lw.optim.KFAC(m, lr=0.01, refresh_every=2, scale="formula"),
    "EKFAC": lambda m: lw.optim.EKFAC(m, lr=0.01, scaling="running", refresh_every=2, scale="formula"),
    "FOOF": lambda m: lw.optim.FOOF(m, lr=0.01, refresh_every=2, scale="formula"),
    "LocoProp": lambda m: lw.optim.LocoProp(m, lr=0.01, refresh_every=2),
    "Shampoo": lambda m: lw.optim.Shampoo(m, lr=0.01, refresh_every=2, scale="formula"),
    "SOAP": lambda m: lw.optim.SOAP(m, lr=0.01, refresh_every=2, scale="formula"),
}


def definite(K: int, n: int, seed: int = 0) -> Tensor:
    X = randn(K, n, n + 5, seed=seed)
    M = X.double() @ X.double().mT / n
    return (M + M.mT).div(2).float()


@pytest.mark.parametrize("n", [16, 272, 784])
def test_kernels_against_whole_matrices(n: int):
    M, new = definite(3, n), definite(3, n - 15, seed=1)
    weight, shift = torch.tensor([0.25, 0.0, 1.0], device="cuda"), torch.tensor([0.1, 1e-6, 3.0], device="cuda")
    P, mean = packed.pack(M), M.diagonal(dim1=1, dim2=2).mean(-1)
    assert torch.equal(packed.unpack(P), M)
    assert torch.equal(packed.unpack(P[1:]), M[1:])
    assert torch.equal(packed.diagonal(P), M.diagonal(dim1=1, dim2=2))
    damped = M + shift.view(-1, 1, 1) * torch.eye(n, device="cuda")
    damped.diagonal(dim1=1, dim2=2)[:, n - 15 :] = mean.unsqueeze(-1)
    assert torch.equal(packed.unpack(P, shift, n - 15, mean), damped)
    pair, expected = packed.split(P), split_fp16.split(M)
    torch.testing.assert_close(pair.value(), expected.value(), rtol=1e-6, atol=0)
    assert torch.equal(packed.split(P, 1).hi, pair.hi)
    padded = torch.nn.functional.pad(new, (0, 15, 0, 15))
    packed.ema_(P, new, weight)
    torch.testing.assert_close(packed.unpack(P), torch.lerp(M, padded, weight.view(-1, 1, 1)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [256, 768, 3072])
@pytest.mark.parametrize("border", [True, False])
def test_means_of_listed_matrices(n: int, border: bool):
    X = [randn(1000, n, seed=k).bfloat16() for k in range(3)]
    whole = definite(3, n + 16)
    P, counts = packed.pack(whole), [torch.ones(3, device="cuda") for _ in range(2)]
    for mean, count in zip((whole, P), counts, strict=True):
        average_grams_(mean, count, X, 1e-3, 0.9, border=border)
    torch.testing.assert_close(packed.unpack(P), whole, rtol=1e-6, atol=1e-6)
    assert torch.equal(*counts)


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("name", MEMBERS)
def test_steps_are_the_same(name: str, half: bool, monkeypatch: pytest.MonkeyPatch):
    """Bases may come to rest elsewhere where eigenvalues are nearly equal. Under autocast K-FAC magnifies a last bit
    that differs to more than that: by how much is seen from weights that begin 1e-6 beside the others."""
    ends, kept = [], []
    for on, beside in ((True, 0.0), (False, 0.0), (False, 1e-6)):
        if not on:
            monkeypatch.setattr(factor, "packs", lambda shape, size: False)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 304), nn.Tanh(), nn.Linear(304, 256)).cuda()
        start = torch.cat([p.detach().flatten() for p in model.parameters()])
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + beside * torch.randn_like(p))
        opt = MEMBERS[name](model)
        for step in range(12):
            opt.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=half):
                y = model(randn(512, 256, seed=step))
            (y.float() - randn(512, 256, seed=100)).square().mean().backward()
            opt.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        kept.append(sum(packed.is_packed(s.state[x].mean) for s in opt._stacks or [] for x in "PQ" if x in s.state))
        assert opt.health().fallbacks == 0
    assert kept[0] > 0
    assert kept[1] == 0
    way, noise = float((ends[1] - start).norm()), float((ends[2] - ends[1]).norm())
    bound = {"KFAC": 2e-3, "FOOF": 1e-3, "LocoProp": 1e-3}.get(name, 5e-2)  # inverses are exact, bases are not
    assert float((ends[0] - ends[1]).norm()) < max(bound * way, 2 * noise if half else 0.0)
