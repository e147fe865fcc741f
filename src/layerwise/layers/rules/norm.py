"""Scale-and-shift of normalisation layers: every feature is a group of its own, ``y = γ x̂ + β``.

The standard form sees x̂, the normalised input without γ and β, and K = features, O = 1, I = 1 (+1).
"""

import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.layers.form import Form, LayerRule, Part, layer_rule


def _affine(parts: dict[str, Part]) -> dict[str, Form]:
    weight, bias = parts.get("weight"), parts.get("bias")
    features = (weight or bias).numel()  # type: ignore[union-attr]  # a rule is asked only if one takes part
    return {"": Form(features, 1, 1 if weight else 0, weight, bias, kronecker=False)}


def _channels_last(t: Tensor, axis: int) -> Tensor:
    """``[*lead, C, *positions] -> [*lead, S, C, 1]`` with the channels on `axis`."""
    moved = t.movedim(axis, -1)
    return moved.reshape(*t.shape[:axis], -1, t.shape[axis]).unsqueeze(-1)


@layer_rule(nn.LayerNorm, nn.RMSNorm)
class LastAxesNormRule(LayerRule[nn.LayerNorm | nn.RMSNorm]):
    """Normalises the last axes; every leading axis is a position."""

    def forms(self, module: nn.LayerNorm | nn.RMSNorm, parts: dict[str, Part]) -> dict[str, Form]:
        """One group a normalised entry."""
        return _affine(parts)

    def lead(self, module: nn.LayerNorm | nn.RMSNorm, site: str, x: Tensor) -> int:
        """All but the normalised axes."""
        return x.ndim - len(module.normalized_shape)

    def inputs(self, module: nn.LayerNorm | nn.RMSNorm, site: str, x: Tensor) -> Tensor:
        """x̂."""
        shape = list(module.normalized_shape)
        if isinstance(module, nn.LayerNorm):
            normalized = F.layer_norm(x, shape, None, None, module.eps)
        else:
            normalized = F.rms_norm(x, shape, None, module.eps)
        return normalized.flatten(-len(shape)).unsqueeze(-2).unsqueeze(-1)

    def outgrads(self, module: nn.LayerNorm | nn.RMSNorm, site: str, dy: Tensor) -> Tensor:
        """One output a group."""
        return dy.flatten(-len(module.normalized_shape)).unsqueeze(-2).unsqueeze(-1)


@layer_rule(nn.GroupNorm)
class GroupNormRule(LayerRule[nn.GroupNorm]):
    """Channels on axis 1."""

    def forms(self, module: nn.GroupNorm, parts: dict[str, Part]) -> dict[str, Form]:
        """One group a channel."""
        return _affine(parts)

    def lead(self, module: nn.GroupNorm, site: str, x: Tensor) -> int:
        """The batch axis."""
        return 1

    def inputs(self, module: nn.GroupNorm, site: str, x: Tensor) -> Tensor:
        """x̂."""
        return _channels_last(F.group_norm(x, module.num_groups, None, None, module.eps), 1)

    def outgrads(self, module: nn.GroupNorm, site: str, dy: Tensor) -> Tensor:
        """One output a channel and position."""
        return _channels_last(dy, 2)


@layer_rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
class InstanceNormRule(LayerRule[nn.modules.instancenorm._InstanceNorm]):
    """Channels just before the spatial axes; an input without a batch axis is allowed."""

    def forms(self, module: nn.modules.instancenorm._InstanceNorm, parts: dict[str, Part]) -> dict[str, Form]:
        """One group a channel."""
        return _affine(parts)

    def _channel_axis(self, module: nn.modules.instancenorm._InstanceNorm, ndim: int) -> int:
        return ndim - int(module._get_no_batch_dim())

    def lead(self, module: nn.modules.instancenorm._InstanceNorm, site: str, x: Tensor) -> int:
        """The batch axis, if there is one."""
        return self._channel_axis(module, x.ndim)

    def inputs(self, module: nn.modules.instancenorm._InstanceNorm, site: str, x: Tensor) -> Tensor:
        """x̂ from the input's own statistics, or the running ones in eval mode."""
        axis = self._channel_axis(module, x.ndim)
        batch = x if axis == 1 else x.unsqueeze(0)
        use_input = module.training or not module.track_running_stats
        mean, variance = (None, None) if use_input else (module.running_mean, module.running_var)
        normalized = F.instance_norm(batch, mean, variance, None, None, use_input, 0.0, module.eps)
        return _channels_last(normalized if axis == 1 else normalized[0], axis)

    def outgrads(self, module: nn.modules.instancenorm._InstanceNorm, site: str, dy: Tensor) -> Tensor:
        """One output a channel and position."""
        return _channels_last(dy, 1 + self._channel_axis(module, dy.ndim - 1))


@layer_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
class BatchNormRule(LayerRule[nn.modules.batchnorm._BatchNorm]):
    """Eval mode only: in train mode the examples of a batch interact (refused where the model is recorded)."""

    def forms(self, module: nn.modules.batchnorm._BatchNorm, parts: dict[str, Part]) -> dict[str, Form]:
        """One group a channel."""
        return _affine(parts)

    def lead(self, module: nn.modules.batchnorm._BatchNorm, site: str, x: Tensor) -> int:
        """The batch axis."""
        return 1

    def inputs(self, module: nn.modules.batchnorm._BatchNorm, site: str, x: Tensor) -> Tensor:
        """x̂ from the running statistics."""
        normalized = F.batch_norm(x, module.running_mean, module.running_var, None, None, False, 0.0, module.eps)
        return _channels_last(normalized, 1)

    def outgrads(self, module: nn.modules.batchnorm._BatchNorm, site: str, dy: Tensor) -> Tensor:
        """One output a channel and position."""
        return _channels_last(dy, 2)
