"""Labels drawn by the inverse of a distribution function, in one pass where there are many classes."""

import pytest
import torch
from torch import Tensor

from layerwise.foundations.likelihoods.categorical import BLOCK, Categorical, inverse_cdf


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


def drawn(f: Tensor) -> Tensor:
    """A vector for each position, of labels drawn with the same numbers whatever the precision."""
    law = Categorical(class_axis=-1)
    terms = law.standardize(f, None, None, lambda t: t)
    return law.sample(terms, torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("C", [7, 6 * BLOCK + 5])
def test_vectors_in_half_precision(C: int, dtype: torch.dtype):
    """Nearly the labels of single precision; entries are rounded once, and each vector adds up to zero."""
    f = (3 * torch.randn(64, 5, C, generator=torch.Generator().manual_seed(C))).to(dtype)
    found, expected = drawn(f), drawn(f.float())
    assert found.dtype == dtype
    same = found.argmin(-1) == expected.argmin(-1)
    assert float(same.double().mean()) > 0.9
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(found[same].float(), expected[same], rtol=2 * rounding, atol=1e-6)
    assert float(found.double().sum(-1).abs().max()) < rounding


def test_a_model_that_is_sure_keeps_small_gradients():
    """Beside p_y = 0.999 its rounding to bfloat16, a part in 512, would be more than all of ``1 − p_y``."""
    f = torch.zeros(200, 1, 10)
    f[..., 0] = 9.0
    found, expected = drawn(f.bfloat16()), drawn(f)
    assert bool((expected.argmin(-1) == 0).float().mean() > 0.9)
    torch.testing.assert_close(found.float(), expected, rtol=2.0**-7, atol=1e-6)
