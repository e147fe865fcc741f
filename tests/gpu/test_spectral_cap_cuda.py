"""The bound on singular values of updates, on a GPU: in half precision, and in a captured step."""

import pytest
import torch
from torch import Tensor

from layerwise.optim.step.spectral_cap import capped

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


def test_in_a_graph(no_synchronisation: None) -> None:
    D = peaked(torch.float16)
    expected = capped(D, norms(D), (768, 2304))
    graph = torch.cuda.CUDAGraph()
    other = torch.zeros_like(D)
    with torch.cuda.graph(graph):
        found = capped(other, norms(other), (768, 2304))
    other.copy_(D)
    graph.replay()
    torch.testing.assert_close(found, expected)
