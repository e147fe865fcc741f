"""The bound on singular values of updates, on a GPU: by torch and by kernels, and in a captured step."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from layerwise.optim.cuda.triton import spectral_cap as triton_spectral_cap
from layerwise.optim.cuda.triton.device import available
from layerwise.optim.step.spectral_cap import capped, most_of_norm
from waiting import nothing_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def norms(D: Tensor) -> Tensor:
    return torch.linalg.vector_norm(D.flatten(1), dim=1, dtype=torch.promote_types(D.dtype, torch.float32))


def peaked(dtype: torch.dtype) -> Tensor:
    """Noise, and one direction with twice its norm in addition; entries up to 1e4."""
    g = torch.Generator("cuda").manual_seed(0)
    D, u, v = (torch.randn(*size, generator=g, device="cuda") for size in ((3, 768, 2304), (3, 768, 1), (3, 1, 2304)))
    D = D / D.flatten(1).norm(dim=1).view(-1, 1, 1) + 2 * u @ v / (u @ v).flatten(1).norm(dim=1).view(-1, 1, 1)
    return (1e4 * D / D.abs().amax()).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_as_in_double_precision(dtype: torch.dtype) -> None:
    D = peaked(dtype)
    expected = capped(D.double(), norms(D.double()), (768, 2304))
    found = capped(D, norms(D), (768, 2304))
    assert found.dtype == dtype
    assert bool((norms(expected) < 0.9 * norms(D.double())).all())
    assert bool((norms(found.double() - expected) < 2e-3 * norms(expected)).all())


def by_kernels(D: Tensor) -> Tensor:
    found = D.clone()
    triton_spectral_cap.cap_(found, most_of_norm((768, 2304)))
    return found


needs_triton = pytest.mark.skipif(
    not (torch.cuda.is_available() and available(torch.device("cuda"))), reason="needs triton"
)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_kernels_cut_the_same(dtype: torch.dtype) -> None:
    D = peaked(dtype)
    assert triton_spectral_cap.fits(D)
    expected, found = capped(D.double(), norms(D.double()), (768, 2304)), by_kernels(D)
    assert bool((norms(found.double() - expected) < 5e-3 * norms(expected)).all())
    assert torch.equal(found, by_kernels(D))  # the same numbers every time
    before = triton_spectral_cap.cap_(D.clone(), most_of_norm((768, 2304)))
    torch.testing.assert_close(before.double(), norms(D.double()), rtol=1e-5, atol=0)
    flat = torch.randn(2, 512, 640, device="cuda", dtype=dtype)
    assert torch.equal(by_kernels(flat), flat)


@pytest.mark.parametrize(
    "cut", [pytest.param(by_kernels, marks=needs_triton), lambda D: capped(D, norms(D), (768, 2304))]
)
def test_in_a_graph(cut: Callable[[Tensor], Tensor]) -> None:
    D = peaked(torch.float16)
    expected, other = cut(D), torch.zeros_like(D)
    cut(other)
    graph = torch.cuda.CUDAGraph()
    with nothing_waits(), torch.cuda.graph(graph):
        found = cut(other)
    other.copy_(D)
    graph.replay()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernels_give_the_same_numbers_every_time(dtype: torch.dtype) -> None:
    """With tiles on their way that were read twice, half of these differed."""
    D = torch.randn(12, 3072, 768, device="cuda").to(dtype)
    D[:, :, 0] += 3
    expected = by_kernels(D)
    for _ in range(40):
        assert torch.equal(by_kernels(D), expected)
