"""Bad input: one clear error each, and nothing is left changed."""

import pytest
import torch
from hessian_models import batch, mlp
from torch import nn

from layerwise.foundations.errors import InputError, InteractionError, NameLookupError, UnsupportedError
from layerwise.structure import decoupled, layer_hessian

CALLS = [layer_hessian, decoupled]


@pytest.mark.parametrize("call", CALLS)
def test_names_of_layers(call):
    net, data = nn.Sequential(), batch()
    for name, layer in zip(("first", "act", "second"), mlp()[2:], strict=True):
        net.add_module(name, layer)
    data = torch.rand(12, 5, dtype=torch.float64), data[1]
    with pytest.raises(NameLookupError, match="Did you mean 'second'"):
        call(net, data, "secnd")
    with pytest.raises(InputError, match=r"matches 2 layers.*first, second"):
        call(net, data, "*")
    assert call(net, data, "sec*").matrix_shape == call(net, data, "second.weight").matrix_shape == (4, 5)


@pytest.mark.parametrize("call", CALLS)
def test_values_that_are_not_finite(call):
    net, (x, y) = mlp(), batch()
    with pytest.raises(InputError, match="NaN or infinite"):
        call(net, (x / 0, y), "2")
    net[4].weight.data[0, 0] = float("nan")
    with pytest.raises(InputError, match=r"'4\.weight'"):
        call(net, (x, y), "0")


@pytest.mark.parametrize("call", CALLS)
def test_no_data(call):
    net, (x, y) = mlp(), batch()
    with pytest.raises(InputError, match="without a single batch"):
        call(net, [], "2")
    with pytest.raises(InputError, match="0 examples"):
        call(net, (x[:0], y[:0]), "2")


@pytest.mark.parametrize("call", CALLS)
def test_what_is_not_trained(call):
    net, data = mlp(), batch()
    net[2].requires_grad_(False)
    with pytest.raises(InputError, match="frozen"):
        call(net, data, "2")
    net[2].bias.requires_grad_(True)
    with pytest.raises(InputError, match="only the bias"):
        call(net, data, "2")
    net[2].weight.requires_grad_(True)
    net[2].bias.requires_grad_(False)
    assert call(net, data, "2", bias=True).matrix_shape == (5, 5)
    assert not net[2].bias.requires_grad


def test_batch_norm():
    net, data = mlp(), batch()
    net.insert(2, nn.BatchNorm1d(5).double())
    with pytest.raises(InteractionError, match=r"model\.eval\(\)"):
        layer_hessian(net, data, "0")
    net.eval()
    assert layer_hessian(net, data, "0").agreement < 1e-10
    with pytest.raises(UnsupportedError, match="layer_hessian works"):
        decoupled(net, data, "2")


def test_a_layer_that_takes_no_part():
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    net, data = Idle().double(), batch()
    assert float(layer_hessian(net, data, "idle").trace()) == 0
    with pytest.raises(InputError, match="takes no part"):
        decoupled(net, data, "idle")
