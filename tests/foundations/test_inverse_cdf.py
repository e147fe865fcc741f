"""Labels drawn by the inverse of a distribution function, in one pass where there are many classes."""

import pytest
import torch
from torch import Tensor

from layerwise.foundations.likelihoods.categorical import BLOCK, inverse_cdf


def plain(p: Tensor, u: Tensor) -> Tensor:
    return (p.double().cumsum(-1) < u.double()).sum(-1, keepdim=True).clamp_max(p.shape[-1] - 1)


@pytest.mark.parametrize("C", [1, 3, 4 * BLOCK, 4 * BLOCK + 1, 6 * BLOCK, 9 * BLOCK - 1])
@pytest.mark.parametrize("sharp", [1.0, 30.0])
def test_blocks_draw_what_one_sum_draws(C: int, sharp: float):
    generator = torch.Generator().manual_seed(C)
    p = (sharp * torch.randn(3, 50, C, generator=generator)).softmax(-1)
    u = torch.rand(3, 50, 1, generator=generator)
    u[0, 0], u[0, 1] = 0.0, 1 - 2**-24
    found = inverse_cdf(p, u)
    assert found.shape == u.shape
    assert torch.equal(found, plain(p, u))


def test_frequencies_are_probabilities():
    p = torch.zeros(5 * BLOCK)
    p[[3, 2 * BLOCK, 5 * BLOCK - 1]] = torch.tensor([0.2, 0.5, 0.3])
    u = (torch.arange(1000) + 0.5).div(1000).unsqueeze(-1)
    drawn = inverse_cdf(p.expand(1000, -1), u).squeeze(-1)
    assert drawn.unique(return_counts=True)[1].tolist() == [200, 500, 300]
    assert drawn.unique().tolist() == [3, 2 * BLOCK, 5 * BLOCK - 1]
