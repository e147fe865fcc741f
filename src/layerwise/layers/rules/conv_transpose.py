"""Transposed convolutions: roles exchanged. The input's pixels are the positions; gradients are unfolded.

Weight: S = input pixels, K = groups, I = C_in/K, O = C_out/K · kernel. The bias meets other positions (output
pixels), so it is a block of its own.
"""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.layers.form import Form, LayerRule, Part, layer_rule
from layerwise.layers.rules.patches import rows_of_patches, sliding_windows

ConvTranspose = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


@layer_rule(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class ConvTransposeRule(LayerRule[ConvTranspose]):
    """Sites "weight" and "bias"."""

    rounds_inputs = True

    def forms(self, module: ConvTranspose, parts: dict[str, Part]) -> dict[str, Form]:
        """Two forms."""
        forms = {}
        k, taps = module.groups, math.prod(module.kernel_size)
        if "weight" in parts:
            o, i = module.out_channels // k * taps, module.in_channels // k
            forms["weight"] = Form(k, o, i, parts["weight"], None, transposed=True)
        if "bias" in parts:
            forms["bias"] = Form(1, module.out_channels, 0, None, parts["bias"], kronecker=False)
        return forms

    def lead(self, module: ConvTranspose, site: str, x: Tensor) -> int:
        """The batch axis, if there is one."""
        return x.ndim - len(module.kernel_size) - 1

    def inputs(self, module: ConvTranspose, site: str, x: Tensor) -> Tensor:
        """Channels at every input pixel."""
        dims = len(module.kernel_size)
        return x.flatten(x.ndim - dims).mT.unflatten(-1, (module.groups, -1))

    def outgrads(self, module: ConvTranspose, site: str, dy: Tensor) -> Tensor:
        """What each input pixel has sent out through the kernel."""
        dims = len(module.kernel_size)
        if site == "bias":
            return dy.flatten(dy.ndim - dims).mT.unsqueeze(-2)
        padding = [int(p) for size in reversed(module.padding) for p in (size, size)]
        windows = sliding_windows(F.pad(dy, padding), module.kernel_size, module.stride, module.dilation)
        return rows_of_patches(windows, dims, module.groups)
