"""Trained and initial weights, and what else a prior must not have seen."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.vectors import ParamVector, trainable, unwrap

COPY = "make it before training: init = copy.deepcopy(model)"


def inner(model: Any) -> nn.Module:
    """The model itself, if it was wrapped for compilation or for several devices."""
    if not isinstance(model, nn.Module):
        raise InputError(describe(f"a model of type {type(model).__name__}", "an nn.Module", "give the network"))
    found = unwrap(model)
    parallel = isinstance(found, nn.DataParallel | nn.parallel.DistributedDataParallel)
    return unwrap(found.module) if parallel else found


def flat_weights(model: nn.Module, init: Any) -> tuple[Tensor, Tensor]:
    """Trained and initial parameters, flat; whatever else the function depends on must be the same in both."""
    now = {name: p.detach() for name, p in trainable(model).items()}
    if not now:
        raise InputError(describe("a model without trainable parameters", "at least one", "unfreeze some"))
    before = _by_name(init)
    for name, p in now.items():
        if name not in before or before[name].shape != p.shape:
            what = f"shape {tuple(before[name].shape)}" if name in before else "nothing of that name"
            given = f"an init whose {name!r} has {what}, while the model's has {tuple(p.shape)}"
            raise InputError(describe(given, "the same network before training", COPY))
    _check_rest(rest(model), before)
    _check_own({**now, **rest(model)}, before, list(now))
    for what, found in (("model", now), ("init", {name: before[name] for name in now})):
        bad = [name for name, p in found.items() if not bool(torch.isfinite(p).all())]
        if bad:
            raise InputError(describe(f"a {what} whose {bad[0]!r} is not finite", "finite weights", "train it anew"))
    dtype, device = _kind(now)
    flat = [torch.cat([found[n].detach().to(device, dtype).reshape(-1) for n in now]) for found in (now, before)]
    return flat[0], flat[1]


def rest(model: nn.Module) -> dict[str, Tensor]:
    """Frozen weights and buffers."""
    return {**{name: p for name, p in model.named_parameters() if not p.requires_grad}, **dict(model.named_buffers())}


def _by_name(init: Any) -> Mapping[str, Tensor]:
    if isinstance(init, nn.Module):
        first = inner(init)
        return {**dict(first.named_parameters()), **dict(first.named_buffers())}
    if not isinstance(init, Mapping | ParamVector):
        given = f"an init of type {type(init).__name__}"
        raise InputError(describe(given, "the network before training, or its tensors by name", COPY))
    return init.dict() if isinstance(init, ParamVector) else init


def _kind(parameters: Mapping[str, Tensor]) -> tuple[torch.dtype, torch.device]:
    kinds = {(p.dtype, p.device) for p in parameters.values()}
    if len(kinds) > 1:
        given = f"parameters of {len(kinds)} dtypes or devices"
        raise InputError(describe(given, "one of each", "move the model, e.g. model.float()"))
    dtype, device = kinds.pop()
    if dtype not in (torch.float32, torch.float64):
        given = f"parameters of {dtype}"
        raise InputError(describe(given, "float32 or float64", "give model.float(), and inputs of that dtype"))
    return dtype, device


def _check_rest(now: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> None:
    """Frozen weights and buffers, such as running statistics: if training changed them, the prior has seen the data."""
    for name, tensor in now.items():
        if name.endswith("num_batches_tracked"):
            continue
        if name not in before:
            given = f"an init without {name!r}, which the model has and which is not trained by gradients"
            raise InputError(
                describe(given, "all that the network's function depends on", f"give the module, and {COPY}")
            )
        if before[name].shape != tensor.shape or not torch.equal(before[name].to(tensor), tensor):
            given = f"{name!r}, which is not trained by gradients and differs between model and init"
            expected = "a function of the trained parameters alone: the prior may not depend on the data"
            raise InputError(describe(given, expected, "use another norm than batch norm, or unfreeze it"))


def _check_own(now: Mapping[str, Tensor], before: Mapping[str, Tensor], trained: list[str]) -> None:
    """The prior's mean must be of before training: a `state_dict` is no copy, and training changes what it holds."""
    shared = [n for n, t in now.items() if n in before and t.numel() and t.data_ptr() == before[n].data_ptr()]
    if shared:
        given = f"an init whose {shared[0]!r} is the model's own tensor, which training changes"
        raise InputError(describe(given, "the weights before training, in memory of their own", COPY))
    if all(torch.equal(before[n].to(now[n]), now[n]) for n in trained):
        given = "an init with the same weights as the model"
        raise InputError(describe(given, "the weights before training", COPY))
