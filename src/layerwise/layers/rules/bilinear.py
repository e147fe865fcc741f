"""Bilinear layers: a linear map of the products of two inputs' entries."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.layers.form import Form, LayerRule, Part, layer_rule

MOST_PRODUCTS = 4096
"""Products of entries that are formed for one pair of inputs; beyond, the layer falls back."""


@layer_rule(nn.Bilinear)
class BilinearRule(LayerRule[nn.Bilinear]):
    """K = 1, I = in1 · in2, O = out: ``y = W vec(x₁ x₂ᵀ) + b``."""

    own_forward = True

    def refuses(self, module: nn.Bilinear) -> str | None:
        """Inputs with too many products: the layer itself never forms them."""
        products = module.in1_features * module.in2_features
        if products > MOST_PRODUCTS:
            return f"its two inputs have {products} products of entries, more than {MOST_PRODUCTS}"
        return None

    def forms(self, module: nn.Bilinear, parts: dict[str, Part]) -> dict[str, Form]:
        """Weight and bias together."""
        weight, products = parts.get("weight"), module.in1_features * module.in2_features
        return {"": Form(1, module.out_features, products if weight else 0, weight, parts.get("bias"))}

    def lead(self, module: nn.Bilinear, site: str, x: Tensor) -> int:
        """All but the products."""
        return x.ndim - 1

    def inputs(self, module: nn.Bilinear, site: str, x: Tensor) -> Tensor:
        """``[*lead, 1, 1, in1 · in2]``."""
        return x.unsqueeze(-2).unsqueeze(-2)

    def outgrads(self, module: nn.Bilinear, site: str, dy: Tensor) -> Tensor:
        """``[V, *lead, 1, 1, out]``."""
        return dy.unsqueeze(-2).unsqueeze(-2)

    def forward(
        self, module: nn.Bilinear, record: Callable[[str, Tensor, Tensor], None], input1: Tensor, input2: Tensor
    ) -> Tensor:
        """torch's own; what is recorded as its input are the products ``x₁ᵢ x₂ⱼ``, of which it is a linear map."""
        y = F.bilinear(input1, input2, module.weight, module.bias)
        record("", (input1.detach().unsqueeze(-1) * input2.detach().unsqueeze(-2)).flatten(-2), y)
        return y
