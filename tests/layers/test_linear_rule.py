"""Linear layers in standard form."""

import pytest
import torch
from torch import nn

from layerwise.layers.form import RULES, Part
from layerwise.layers.rules.linear import LinearRule
from layerwise.testing import check_layer_rule


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4, 3), (3, 2, 3), (3, 2, 2, 3)])
def test_contract(bias: bool, shape: tuple[int, ...]):
    check_layer_rule(nn.Linear(3, 2, bias=bias), torch.randn(shape), tol=1e-10)


def test_lazy_and_quantizable_relatives_are_found_by_their_base():
    class Deeper(nn.Linear):
        pass

    assert isinstance(RULES.find(nn.modules.linear.NonDynamicallyQuantizableLinear), LinearRule)
    assert isinstance(RULES.find(type("Deepest", (Deeper,), {})), LinearRule)


def test_form_without_its_weight_or_bias():
    module, rule = nn.Linear(3, 2), LinearRule()
    weight, bias = Part("w", (2, 3)), Part("b", (2,))
    assert rule.forms(module, {"weight": weight, "bias": bias})[""].shape == (1, 2, 4)
    assert rule.forms(module, {"weight": weight})[""].shape == (1, 2, 3)
    assert rule.forms(module, {"bias": bias})[""].shape == (1, 2, 1)
