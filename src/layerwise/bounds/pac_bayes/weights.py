"""Trained and initial weights, and what else a prior must not have seen."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.vectors import ParamVector, trainable, unwrap


def flat_weights(model: nn.Module, init: nn.Module | Mapping[str, Tensor] | ParamVector) -> tuple[Tensor, Tensor]:
    """Trained and initial parameters, flat; whatever else the function depends on must be the same in both."""
    now = {name: p.detach() for name, p in trainable(model).items()}
    if not now:
        raise InputError(describe("a model without trainable parameters", "at least one", "unfreeze"))
    if isinstance(init, nn.Module):
        first = unwrap(init)
        before: Mapping[str, Tensor] = dict(first.named_parameters())
        _check_rest(model, first)
    else:
        before = init.dict() if isinstance(init, ParamVector) else init
    for name, p in now.items():
        if name not in before or before[name].shape != p.shape:
            what = f"shape {tuple(before[name].shape)}" if name in before else "nothing of that name"
            given = f"an init whose {name!r} has {what}, while the model's has {tuple(p.shape)}"
            raise InputError(describe(given, "the same network before training", "copy.deepcopy it before you train"))
    for what, found in (("model", now), ("init", {name: before[name] for name in now})):
        bad = [name for name, p in found.items() if not bool(torch.isfinite(p).all())]
        if bad:
            raise InputError(describe(f"a {what} whose {bad[0]!r} is not finite", "finite weights", "train it anew"))
    dtype, device = _kind(now)
    flat = [torch.cat([found[n].detach().to(device, dtype).reshape(-1) for n in now]) for found in (now, before)]
    return flat[0], flat[1]


def _kind(parameters: Mapping[str, Tensor]) -> tuple[torch.dtype, torch.device]:
    kinds = {(p.dtype, p.device) for p in parameters.values()}
    if len(kinds) > 1:
        given = f"parameters of {len(kinds)} dtypes or devices"
        raise InputError(describe(given, "one of each", "move the model, e.g. model.float()"))
    return kinds.pop()


def _check_rest(model: nn.Module, init: nn.Module) -> None:
    """Frozen weights and buffers, such as running statistics: if training changed them, the prior has seen the data."""
    own = trainable(model)

    def rest(m: nn.Module) -> dict[str, Tensor]:
        frozen = {name: p for name, p in m.named_parameters() if name not in own}
        return {**frozen, **dict(m.named_buffers())}

    now, before = rest(model), rest(init)
    for name, tensor in now.items():
        if name.endswith("num_batches_tracked"):
            continue
        if name not in before or before[name].shape != tensor.shape or not torch.equal(before[name].to(tensor), tensor):
            given = f"{name!r}, which is not trained by gradients and differs between model and init"
            expected = "a function of the trained parameters alone: the prior may not depend on the data"
            raise InputError(describe(given, expected, "use another norm than batch norm, or unfreeze it"))
