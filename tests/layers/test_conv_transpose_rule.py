"""Transposed convolutions: the weight's positions are input pixels, the bias's are output pixels."""

import pytest
import torch
from torch import nn

from layerwise.layers.table import LayerTable
from layerwise.testing import check_layer_rule

CONVS = {
    "1d": (lambda: nn.ConvTranspose1d(3, 2, 3, 2, 1, output_padding=1), (3, 3, 4)),
    "2d": (
        lambda: nn.ConvTranspose2d(4, 4, (2, 3), 2, 1, output_padding=(0, 1), groups=2, dilation=(1, 2)),
        (3, 4, 2, 2),
    ),
    "3d": (lambda: nn.ConvTranspose3d(2, 2, 2, (1, 2, 1), bias=False), (2, 2, 2, 1, 2)),
    "overlapping": (lambda: nn.ConvTranspose2d(2, 2, 3), (3, 2, 2, 2)),
    "stride_larger_than_kernel": (lambda: nn.ConvTranspose1d(2, 2, 2, 3, output_padding=2), (3, 2, 3)),
}


@pytest.mark.parametrize("name", CONVS)
def test_contract(name: str):
    make, shape = CONVS[name]
    check_layer_rule(make(), torch.randn(shape), tol=1e-10)


def test_weight_and_bias_are_blocks_of_their_own():
    table = LayerTable.from_model(nn.Sequential(nn.ConvTranspose2d(4, 6, (2, 3), groups=2)))
    assert {spec.name: spec.form.shape for spec in table} == {"0.weight": (2, 18, 2), "0.bias": (1, 6, 1)}
    assert [spec.structure("kfac") for spec in table] == ["kfac", "group"]
