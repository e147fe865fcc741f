"""Scale and shift of normalisation layers: every feature is a group of its own."""

import pytest
import torch
from torch import nn

import layerwise as lw
from layerwise.foundations.errors import InteractionError
from layerwise.layers.table import LayerTable
from layerwise.testing import check_layer_rule


def _trained(norm):
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 1.5)
    return norm


NORMS = {
    "layer": (lambda: nn.LayerNorm(5), (3, 4, 5)),
    "layer_two_axes": (lambda: nn.LayerNorm([4, 5]), (3, 4, 5)),
    "layer_no_bias": (lambda: nn.LayerNorm(5, bias=False), (4, 5)),
    "rms": (lambda: nn.RMSNorm(5), (3, 4, 5)),
    "rms_eps": (lambda: nn.RMSNorm([4, 5], eps=0.1), (3, 4, 5)),
    "group": (lambda: nn.GroupNorm(2, 4, eps=0.1), (3, 4, 2, 3)),
    "group_no_positions": (lambda: nn.GroupNorm(2, 4), (3, 4)),
    "batch1d": (lambda: _trained(nn.BatchNorm1d(4)), (3, 4)),
    "batch1d_positions": (lambda: _trained(nn.BatchNorm1d(4)), (3, 4, 2)),
    "batch2d": (lambda: _trained(nn.BatchNorm2d(4)), (3, 4, 2, 2)),
    "batch3d": (lambda: _trained(nn.BatchNorm3d(2)), (3, 2, 2, 2, 1)),
    "instance1d": (lambda: nn.InstanceNorm1d(4, affine=True), (3, 4, 5)),
    "instance2d_running": (
        lambda: _trained(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
        (3, 4, 2, 2),
    ),
    "instance3d": (lambda: nn.InstanceNorm3d(2, affine=True), (3, 2, 2, 2, 2)),
}


@pytest.mark.parametrize("name", NORMS)
def test_contract(name: str):
    make, shape = NORMS[name]
    check_layer_rule(make(), torch.randn(shape), tol=1e-10)


def test_every_feature_is_a_group():
    table = LayerTable.from_model(nn.Sequential(nn.LayerNorm([2, 3])))
    assert table.layers[0].form.shape == (6, 1, 2)
    assert table.layers[0].structure("kfac") == "group"


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4).train(), nn.BatchNorm1d(4, track_running_stats=False).eval()])
def test_batch_statistics_are_refused_by_name(norm: nn.Module):
    model = nn.Sequential(nn.Linear(4, 4), norm)
    with pytest.raises(InteractionError, match="layer '1', a BatchNorm1d"):
        lw.fisher(model, (torch.randn(3, 4), torch.randint(4, (3,))))
