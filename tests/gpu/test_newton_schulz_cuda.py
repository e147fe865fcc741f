"""Muon's iteration in fp16 on a GPU, at the sizes of a model: against float64, and beside bfloat16."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layerwise as lw
from layerwise.optim import newton_schulz as module
from layerwise.optim.newton_schulz import COEFFICIENTS, newton_schulz
from random_tensors import cuda_randn as randn
from tensor_cores import quintic, relative, spectra
from waiting import nothing_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = [(768, 3072), (3072, 768), (768, 1536), (768, 1000), (1000, 768), (768, 768)]
NAMES = list(spectra(4, 8))
drawn = cache(spectra)


def turned(X: Tensor, shape: tuple[int, int]) -> Tensor:
    return X if shape[0] <= shape[1] else X.mT.contiguous()


def squares(X: Tensor) -> Tensor:
    return X.square().sum((-2, -1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_fp16_is_nearer_than_bfloat16(shape: tuple[int, int], name: str):
    """bfloat16 as it was before: what it is given is rounded before its norm is known."""
    X = drawn(min(shape), max(shape), "cuda")[name]
    exact = turned(quintic(X, 5, COEFFICIENTS), shape)
    X = turned(X, shape).unsqueeze(0)
    found = newton_schulz(X, squares=squares(X), keep_dtype=False)[0]
    before = newton_schulz(X.bfloat16(), dtype=torch.bfloat16, squares=squares(X))[0]
    assert found.dtype == torch.float16
    assert found.is_contiguous()
    assert relative(found, exact) < relative(before, exact)
    values, former, expected = (torch.linalg.svdvals(each.double()) for each in (found, before, exact))
    assert (values - expected).abs().max() < max(5e-3, float((former - expected).abs().max()))
    assert values.max() < 1.22


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_stack_whose_norms_are_not_known(shape: tuple[int, int], dtype: torch.dtype):
    """As MahalanobisSpectral calls it. A matrix of zeros among others, and transposed views."""
    X = randn(3, *shape).to(dtype)
    X[1] = 0.0
    found = newton_schulz(X, factor=3.0)
    assert found.dtype == dtype
    assert (found[1] == 0).all()
    assert relative(found[::2], 3.0 * quintic(X[::2], 5, COEFFICIENTS)) < (5e-3 if dtype != torch.bfloat16 else 1e-2)
    view = X.mT.contiguous().mT
    assert relative(newton_schulz(view, factor=3.0), found.double()) < 1e-2


def test_a_scalar_is_added_to_fp16_before_it_is_rounded():
    """As the emulation on a CPU has it: a of the polynomial's diagonal keeps its digits."""
    x = torch.full((4,), -3.443, dtype=torch.float16, device="cuda")
    assert torch.equal(x.clone().add_(3.4445), (x.float() + 3.4445).half())


@pytest.mark.parametrize("shape", [(256, 1024), (1024, 256), (256, 256)])
def test_it_is_captured_and_waits_for_nothing(shape: tuple[int, int]):
    X = randn(2, *shape)
    expected = newton_schulz(X)
    with nothing_waits():
        newton_schulz(X)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = newton_schulz(X)
    graph.replay()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("scale", ["adam", "formula"])
@pytest.mark.parametrize("member", ["Muon", "MahalanobisSpectral"])
def test_a_members_step_is_that_in_float32(member: str, scale: str, monkeypatch: pytest.MonkeyPatch):
    """The first step of wide, tall and square layers; later ones would compare trainings."""

    def first_step(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        monkeypatch.setattr(module, "dtype_of_products", lambda device: dtype)
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(128, 512, bias=False), nn.Tanh(), nn.Linear(512, 128, bias=False), nn.Tanh(), nn.Linear(128, 128)
        ).cuda()
        start = torch.cat([p.detach().flatten() for p in model.parameters()])
        opt = getattr(lw.optim, member)(model, lr=1e-3, scale=scale, orthogonalize="newton_schulz")
        x = randn(1024, 128)
        F.cross_entropy(model(x), x.roll(1, 1).argmax(1)).backward()
        opt.step()
        return start, torch.cat([p.detach().flatten() for p in model.parameters()])

    start, found = first_step(torch.float16)
    _, expected = first_step(torch.float32)
    assert relative(found - start, (expected - start).double()) < 0.03
