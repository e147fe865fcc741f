"""Convolutions in one, two and three dimensions: stride, padding and its modes, dilation, groups.

S = output pixels, K = groups, I = C_in/K · kernel, O = C_out/K.
"""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.foundations.linalg import gram
from layerwise.foundations.types import multiplied_in, statistics_dtype
from layerwise.layers.form import Form, LayerRule, Moment, Part, layer_rule
from layerwise.layers.rules.patches import patch_moment, rows_of_patches, sliding_windows

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


def _padded(module: Conv, x: Tensor) -> Tensor:
    """The input as the kernel sees it; torch keeps the padding of every mode in this one attribute."""
    padding = module._reversed_padding_repeated_twice
    if not any(padding):
        return x
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(x, padding, mode=mode)


@layer_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvRule(LayerRule[Conv]):
    """Every output pixel is a position that shares the kernel."""

    rounds_inputs = True

    def forms(self, module: Conv, parts: dict[str, Part]) -> dict[str, Form]:
        """Kernel and bias together."""
        k, taps = module.groups, math.prod(module.kernel_size)
        weight = parts.get("weight")
        inputs = module.in_channels // k * taps if weight else 0
        return {"": Form(k, module.out_channels // k, inputs, weight, parts.get("bias"), taps=taps)}

    def lead(self, module: Conv, site: str, x: Tensor) -> int:
        """The batch axis, if there is one."""
        return x.ndim - len(module.kernel_size) - 1

    def inputs(self, module: Conv, site: str, x: Tensor) -> Tensor:
        """Unfolded patches."""
        windows = sliding_windows(_padded(module, x), module.kernel_size, module.stride, module.dilation)
        return rows_of_patches(windows, len(module.kernel_size), module.groups)

    def outgrads(self, module: Conv, site: str, dy: Tensor) -> Tensor:
        """``[V, *lead, C_out, *out] -> [V, *lead, S, K, O]``."""
        dims = len(module.kernel_size)
        pixels = dy.flatten(dy.ndim - dims).mT
        return pixels.unflatten(-1, (module.groups, -1))

    def copies_of_input(self, module: Conv) -> int:
        """Padded, and unfolded along all axes but the first."""
        return 1 + math.prod(module.kernel_size[1:])

    def input_moment(self, module: Conv, site: str, x: Tensor) -> Moment | None:
        """Patch second moment without unfolding the first spatial axis."""
        if x.ndim != len(module.kernel_size) + 2:
            return None
        padding = module._reversed_padding_repeated_twice
        zero_rows = (padding[-2], padding[-1]) if module.padding_mode == "zeros" else (0, 0)
        signal = _padded(module, x.to(multiplied_in(x, statistics_dtype(x.dtype))))
        return patch_moment(
            signal, module.kernel_size, module.stride, module.dilation, module.groups, zero_rows=zero_rows
        )

    def channel_moment(self, module: Conv, site: str, x: Tensor) -> Moment | None:
        """Second moment of the channels over all input positions; those the kernel visits if it is 1 × 1."""
        if x.ndim != len(module.kernel_size) + 2:
            return None
        x = x.to(multiplied_in(x, statistics_dtype(x.dtype)))
        if math.prod(module.kernel_size) == 1:
            rows = self.inputs(module, site, x)
        else:
            rows = x.flatten(2).mT.unflatten(-1, (module.groups, -1))
        rows = rows.flatten(0, 1).movedim(1, 0)
        moment = gram(rows)
        return moment, rows.sum(1, dtype=moment.dtype), rows.shape[1]
