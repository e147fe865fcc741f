"""The fast patch moment equals the product of unfolded patches."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from layerwise.layers.rules.patches import patch_moment, rows_of_patches, sliding_windows


@st.composite
def problems(draw):
    """Padded input, kernel, stride, dilation, groups and the rows known to be zero."""
    dims = draw(st.integers(1, 3))
    largest = {1: 9, 2: 6, 3: 4}[dims]
    space = [draw(st.integers(1, largest)) for _ in range(dims)]
    kernel = [draw(st.integers(1, 3 if dims < 3 else 2)) for _ in range(dims)]
    stride = [draw(st.integers(1, 3)) for _ in range(dims)]
    dilation = [draw(st.integers(1, 2)) for _ in range(dims)]
    padding = [(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in range(dims)]
    groups = draw(st.integers(1, 2))
    sizes = zip(space, kernel, dilation, padding, strict=True)
    assume(all(n + sum(p) >= d * (k - 1) + 1 for n, k, d, p in sizes))
    x = torch.randn(2, 2 * groups, *space, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return x.double(), kernel, stride, dilation, padding, groups


@settings(max_examples=80, deadline=None)
@given(problems(), st.booleans())
def test_agrees_with_the_unfolded_product(problem, tell_zeros: bool):
    x, kernel, stride, dilation, padding, groups = problem
    padded = F.pad(x, [p for pair in reversed(padding) for p in pair])
    zero_rows = padding[0] if tell_zeros else (0, 0)
    moment, sums, count = patch_moment(padded, kernel, stride, dilation, groups, zero_rows)
    rows = rows_of_patches(sliding_windows(padded, kernel, stride, dilation), len(kernel), groups)
    rows = rows.flatten(0, 1).movedim(1, 0)
    assert (moment - rows.mT @ rows).abs().max() < 1e-10
    assert (sums - rows.sum(1)).abs().max() < 1e-10
    assert count == rows.shape[1]


def test_rows_said_to_be_zero_are_left_out():
    """The promise is used: a padding that is not zero (circular) must not be announced as such."""
    x = torch.randn(1, 1, 6, dtype=torch.float64)
    told, _, _ = patch_moment(x, (3,), (1,), (1,), 1, (1, 1))
    plain, _, _ = patch_moment(x, (3,), (1,), (1,), 1, (0, 0))
    assert (told - plain).abs().max() > 1e-6


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_single(half: torch.dtype):
    """Entries that half precision holds exactly, and sums that it does not: 1024 patches of ones."""
    x = torch.ones(64, 2, 6, 6, dtype=half)
    moment, sums, count = patch_moment(x, (3, 3), (1, 1), (1, 1), 1, (0, 0))
    assert count == 64 * 16
    assert moment.dtype == sums.dtype == torch.float32
    assert (moment == count).all()
    assert (sums == count).all()
    noise = torch.randn(64, 2, 6, 6, generator=torch.Generator().manual_seed(0)).to(half)
    found, expected = (patch_moment(t, (3, 3), (2, 1), (1, 2), 1, (0, 0)) for t in (noise, noise.double()))
    for one, exact in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=1e-4)
