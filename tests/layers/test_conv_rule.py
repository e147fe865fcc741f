"""Convolutions in standard form: padding modes, strides, dilations and groups in one to three dimensions."""

import warnings

import pytest
import torch
from torch import nn

from layerwise.layers.rules.conv import ConvRule
from layerwise.testing import check_layer_rule

CONVS = {
    "1d": (lambda: nn.Conv1d(2, 4, 3, 2, 2, 2, groups=2), (3, 2, 7)),
    "2d": (lambda: nn.Conv2d(2, 3, (3, 2), (2, 1), (1, 2), (1, 2)), (3, 2, 5, 4)),
    "3d": (lambda: nn.Conv3d(2, 2, (1, 2, 2), (1, 2, 1), 1), (2, 2, 2, 3, 3)),
    "depthwise": (lambda: nn.Conv2d(3, 6, 2, groups=3, bias=False), (3, 3, 3, 4)),
    "pointwise_strided": (lambda: nn.Conv2d(2, 3, 1, stride=2), (3, 2, 4, 3)),
    "pointwise_padded": (lambda: nn.Conv2d(2, 3, 1, padding=1), (3, 2, 2, 3)),
    "circular": (lambda: nn.Conv1d(2, 2, 4, 2, padding=3, padding_mode="circular"), (3, 2, 6)),
    "reflect": (lambda: nn.Conv2d(2, 2, 3, padding=(2, 1), padding_mode="reflect"), (3, 2, 4, 3)),
    "replicate": (lambda: nn.Conv2d(2, 2, 3, padding=(1, 2), padding_mode="replicate"), (3, 2, 3, 3)),
    "same_even": (lambda: nn.Conv2d(2, 2, (4, 2), padding="same"), (3, 2, 4, 3)),
    "same_even_circular": (lambda: nn.Conv1d(2, 2, 4, padding="same", padding_mode="circular"), (3, 2, 6)),
    "kernel_as_large_as_input": (lambda: nn.Conv2d(2, 3, 3), (3, 2, 3, 3)),
}


@pytest.mark.parametrize("name", CONVS)
def test_contract(name: str):
    make, shape = CONVS[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using padding='same'")
        check_layer_rule(make(), torch.randn(shape), tol=1e-10)


def test_channel_moment_takes_every_input_position_once():
    module, x = nn.Conv2d(4, 2, 3, padding=1, groups=2), torch.randn(3, 4, 5, 4, dtype=torch.float64)
    found = ConvRule().channel_moment(module, "", x)
    assert found is not None
    moment, sums, count = found
    rows = x.movedim(1, -1).reshape(-1, 2, 2)
    assert count == 3 * 5 * 4
    assert (moment - torch.einsum("mkc,mkd->kcd", rows, rows)).abs().max() < 1e-10
    assert (sums - rows.sum(0)).abs().max() < 1e-10


def test_an_input_without_a_batch_axis_has_no_leading_axis_and_no_fast_route():
    module, rule, x = nn.Conv1d(2, 3, 2), ConvRule(), torch.randn(2, 5)
    assert rule.lead(module, "", x) == 0
    assert rule.inputs(module, "", x).shape == (4, 1, 4)
    assert rule.input_moment(module, "", x) is None
    assert rule.channel_moment(module, "", x) is None


def test_moments_of_half_precision_inputs_are_in_float32():
    module, x = nn.Conv1d(2, 3, 2).bfloat16(), torch.randn(3, 2, 5).bfloat16()
    found = ConvRule().input_moment(module, "", x)
    assert found is not None
    assert found[0].dtype == torch.float32
