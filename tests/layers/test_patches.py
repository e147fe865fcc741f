"""Sliding windows see what a convolution's kernel sees."""

import doctest

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from layerwise.layers.rules import patches
from layerwise.layers.rules.patches import rows_of_patches, sliding_windows


def test_the_example_in_the_docstring_runs():
    assert doctest.testmod(patches).failed == 0


@settings(max_examples=25, deadline=None)
@given(
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
)
def test_two_dimensions_agree_with_unfold(kernel, stride, dilation):
    x = torch.randn(2, 3, 6, 5, dtype=torch.float64)
    rows = rows_of_patches(sliding_windows(x, kernel, stride, dilation), 2, 1)
    expected = F.unfold(x, kernel, dilation=dilation, stride=stride).mT
    assert torch.equal(rows[:, :, 0], expected)


def test_windows_are_a_view_of_any_strides():
    x = torch.randn(5, 2, 4).transpose(0, 2)  # [4, 2, 5], not contiguous
    seen = sliding_windows(x, (2,), (1,), (2,))
    assert seen.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert torch.equal(seen[..., 0], x[..., :3])
    assert torch.equal(seen[..., 1], x[..., 2:])


def test_groups_split_the_channels():
    x = torch.randn(2, 4, 6)
    rows = rows_of_patches(sliding_windows(x, (3,), (1,), (1,)), 1, 2)
    assert rows.shape == (2, 4, 2, 6)
    assert torch.equal(rows[1, 2, 1], x[1, 2:, 2:5].flatten())
