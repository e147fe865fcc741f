"""Linear layers, with any number of leading axes: every position shares the weight."""

from torch import Tensor, nn

from layerwise.layers.form import Form, LayerRule, Part, layer_rule


@layer_rule(nn.Linear)
class LinearRule(LayerRule[nn.Linear]):
    """K = 1, I = in, O = out, S = 1 a leading position."""

    rounds_inputs = True

    def forms(self, module: nn.Linear, parts: dict[str, Part]) -> dict[str, Form]:
        """Weight and bias together."""
        weight = parts.get("weight")
        return {"": Form(1, module.out_features, module.in_features if weight else 0, weight, parts.get("bias"))}

    def lead(self, module: nn.Module, site: str, x: Tensor) -> int:
        """All but the features."""
        return x.ndim - 1

    def inputs(self, module: nn.Module, site: str, x: Tensor) -> Tensor:
        """``[*lead, 1, 1, in]``."""
        return x.unsqueeze(-2).unsqueeze(-2)

    def outgrads(self, module: nn.Module, site: str, dy: Tensor) -> Tensor:
        """``[V, *lead, 1, 1, out]``."""
        return dy.unsqueeze(-2).unsqueeze(-2)
