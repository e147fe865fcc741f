"""Packed inverses on a GPU: the kernels and the steps against those of whole ones, and the state."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.optim.cuda import factor
from layerwise.optim.cuda.inverse import DeviceRoots
from layerwise.optim.cuda.linalg import packed_fp16, split_fp16
from layerwise.optim.cuda.storage import StoredMatrix, between
from layerwise.optim.cuda.triton import packed as triton_packed
from layerwise.optim.cuda.triton import products as triton_products
from layerwise.optim.rule import tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and triton_products.available(torch.device("cuda"))),
        reason="needs triton and a GPU of capability 8.0; run `make test-gpu` on one",
    ),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # torch, at the first product of a thread
]
Make = Callable[[nn.Module], lw.optim.Layerwise]
MEMBERS: dict[str, Make] = {
    "KFAC": lambda m: lw.optim.KFAC(m, lr=0.01, refresh_every=2, scale="formula"),
    "every step": lambda m: lw.optim.KFAC(m, lr=0.01, refresh_every=1, scale="formula"),
    "half": lambda m: lw.optim.KFAC(m, lr=0.01, refresh_every=2, precision="half", scale="formula"),
}
STEPS = 24
"""More than are exact, and than it takes until steps and refreshes are replayed."""


def symmetric_matrices(K: int, n: int, seed: int = 0) -> Tensor:
    X = torch.randn(K, n, n, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
    return (X + X.mT) * torch.logspace(-12, 9, K, device="cuda").view(-1, 1, 1)


def squares(X: Tensor, halves: int) -> tuple[Tensor, Tensor]:
    pair = split_fp16.split(X)
    return torch.stack([pair.hi, pair.lo][:halves], 1), pair.scale


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("n", [16, 272, 768, 784, 3088])
def test_kernels_against_whole_matrices(n: int, halves: int):
    X, new = symmetric_matrices(3, n), symmetric_matrices(3, n, seed=1)
    H, scale = packed_fp16.zeros(3, halves, n, X.device), torch.ones(3, device="cuda")
    packed_fp16.put_(H, scale, X)
    whole, numbers = squares(X, halves)
    assert torch.equal(packed_fp16.unpack(H), whole)
    assert torch.equal(packed_fp16.unpack(H[1:]), whole[1:])
    assert torch.equal(scale, numbers)
    replaced, others = squares(new, halves)
    replaced[1], others[1] = whole[1], numbers[1]
    new[1] = torch.nan  # not looked at
    packed_fp16.put_(H, scale, new, torch.tensor([True, False, True], device="cuda"))
    assert torch.equal(packed_fp16.unpack(H), replaced)
    assert torch.equal(scale, others)


@pytest.mark.parametrize(("tile", "block", "warps"), [(64, 64, 4), (64, 128, 8), (16, 64, 4)])
def test_other_tiles_and_blocks(tile: int, block: int, warps: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(triton_packed, "MIRROR_BLOCK", block)
    monkeypatch.setattr(triton_packed, "MIRROR_WARPS", warps)
    X, across = symmetric_matrices(2, 784), -(-784 // tile)
    H = torch.full((2, 2, across * (across + 1) // 2, tile, tile), torch.nan, device="cuda").half()
    triton_packed.put_(H, torch.ones(2, device="cuda"), X)
    assert torch.equal(triton_packed.mirrored(H, 784), squares(X, 2)[0])


def spectrum(K: int, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """A basis, and eigenvalues of condition 1e6 with a damping of 1e-3 of their mean."""
    g = torch.Generator("cuda").manual_seed(seed)
    U = torch.linalg.qr(torch.randn(K, n, n, generator=g, device="cuda", dtype=torch.float64))[0]
    return U, torch.logspace(0, -6, n, device="cuda", dtype=torch.float64)


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("size", [(2, 768, 784), (2, 2304, 784), (2, 784, 3088)])
def test_directions_are_precise(size: tuple[int, int, int], alike: bool):
    """Directions ``P⁻¹ G Q⁻¹`` of a gradient that is like the factors, ``P^½ Z Q^½``, or random."""
    K, O, I = size
    sides, G = [], torch.randn(*size, device="cuda", dtype=torch.float64, generator=torch.Generator("cuda"))
    for n, left in ((O, True), (I, False)):
        U, s = spectrum(K, n, n)
        inverse = (U / (s + 1e-3 * s.mean())) @ U.mT
        root = (U * s.sqrt()) @ U.mT
        if alike:
            G = root @ G if left else G @ root
        X = inverse.float()
        sides.append((inverse, StoredMatrix.keep((X + X.mT) / 2, 2, triangle=True).matrix()))
    (P, left), (Q, right) = sides
    expected = P @ G @ Q
    found = between(left, G.float(), right)
    assert float((found.double() - expected).norm() / expected.norm()) < 3e-3


def train(model: nn.Module, opt: lw.optim.Layerwise, start: int, stop: int, half: bool = False) -> None:
    for step in range(start, stop):
        g = torch.Generator("cuda").manual_seed(step)
        opt.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            y = model(torch.randn(512, 256, generator=g, device="cuda"))
        (y.float() - torch.randn(512, 256, generator=g, device="cuda")).square().mean().backward()
        opt.step()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 304), nn.Tanh(), nn.Linear(304, 304), nn.Tanh(), nn.Linear(304, 256)).cuda()


def roots(opt: lw.optim.Layerwise) -> list[Tensor]:
    """As they are stored."""
    entries = [entry for s in opt._stacks or [] for entry in s.state.values() if isinstance(entry, DeviceRoots)]
    return [X for entry in entries for name, X in entry.tensors().items() if name in ("P_root", "Q_root")]


def numbers(model: nn.Module, opt: lw.optim.Layerwise) -> list[Tensor]:
    of_layers = [of_layer for of_param in opt.state_dict()["state"].values() for of_layer in of_param.values()]
    return [*(p.detach() for p in model.parameters()), *(X for of_layer in of_layers for X in of_layer.values())]


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Factors are packed in any case, inverses on demand."""
    return lambda on: monkeypatch.setattr(factor, "packs_inverse", factor.packs if on else lambda *_: False)


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("name", MEMBERS)
def test_steps_are_the_same_bit_for_bit(name: str, half: bool, packing: Callable[[bool], None]):
    found = []
    for on in (True, False):
        packing(on)
        model = net()
        opt = MEMBERS[name](model)
        train(model, opt, 0, STEPS, half)
        assert {packed_fp16.is_packed(X) for X in roots(opt)} == {on}
        assert opt.health().fallbacks == 0
        found.append(numbers(model, opt))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("kinds", [(False, True), (True, False)])
def test_a_checkpoint_goes_from_one_to_the_other(kinds: tuple[bool, bool], packing: Callable[[bool], None]):
    found = []
    for first, second in ((False, False), kinds):
        packing(first)
        model = net()
        opt = MEMBERS["KFAC"](model)
        train(model, opt, 0, 12)
        saved = opt.state_dict()
        packing(second)
        opt = MEMBERS["KFAC"](model)
        opt.load_state_dict(saved)
        train(model, opt, 12, 16)
        found.append(numbers(model, opt))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("whole", [False, True])
def test_state_of_square_layers(whole: bool, packing: Callable[[bool], None]):
    """In units of AdamW's, 8 n² bytes: momentum ½, each of two factors and two inverses ½ of what is kept of it, a
    little over half. Below 2; above it, if inverses are squares."""
    packing(not whole)
    n, K = 768, 2
    model = nn.Sequential(*(nn.Linear(n, n, bias=False) for _ in range(K))).cuda()
    opt = lw.optim.KFAC(model, lr=0.01, scale="formula")
    model(torch.randn(64, n, device="cuda")).square().mean().backward()
    opt.step()
    held = sum(X.untyped_storage().nbytes() for s in opt._stacks or [] for X in tensors(s.state).values())
    ratio, part = held / (8 * K * n**2), (1 + 16 / n) / 2
    assert ratio == pytest.approx(0.5 + part + (1.0 if whole else part), rel=1e-3)
    assert (ratio > 2) == whole
