"""Models whose parameters are sharded over processes: what `torch.distributed.fsdp.fully_shard` does with them.

Between steps a module holds its shards, as `DTensor` parameters; these have the gradients, and optimizers get them.
While the module runs it holds other parameters in their place, gathered and whole, which autograd's graph is about.
Everything that torch keeps of this in private attributes is read in this file and nowhere else.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.foundations.errors import UnsupportedError, describe


def is_sharded(t: Tensor) -> bool:
    """Whether a tensor is a `DTensor`. Whoever has made one has imported its module, which takes a while."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def local(t: Tensor) -> Tensor:
    """What this process holds of a tensor, sharing its memory: its shard, or all of it.

    Without `DTensor.to_local`, which costs a view of every parameter and, with gradients, a node of the graph.
    """
    return getattr(t, "_local_tensor", t)


def whole(t: Tensor) -> Tensor:
    """All of a tensor, gathered from the processes that hold it. A collective, where it is sharded."""
    return t.full_tensor() if is_sharded(t) else t  # type: ignore[attr-defined]


def _states(model: Any) -> list[Any]:
    """FSDP's own object of each module, or of several that are sharded together."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    found = {}
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            state = module._get_fsdp_state()
            found[id(state)] = state
    return list(found.values())


def _groups(model: nn.Module) -> Iterator[Any]:
    """FSDP's groups of parameters that are gathered together."""
    for state in _states(model):
        several = getattr(state, "_fsdp_param_groups", None)  # torch 2.12 on; before, one group a module
        yield from [state._fsdp_param_group] * (state._fsdp_param_group is not None) if several is None else several


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on this very module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def successors(model: nn.Module) -> dict[int, nn.Parameter]:
    """From the identity of each gathered parameter to the sharded one that it stands in for."""
    found = {}
    for group in _groups(model):
        for p in group.fsdp_params:
            gathered = getattr(p, "_unsharded_param", None)
            if gathered is not None:
                found[id(gathered)] = p.sharded_param
    return found


def all_agree(model: nn.Module, value: bool) -> bool:
    """Whether something is so in every process that holds a part of the model. A collective, where several do.

    For what decides whether a process takes part in collectives.
    """
    meshes: list[Any] = [p.device_mesh for p in model.parameters() if is_sharded(p)]  # type: ignore[attr-defined]
    if not meshes:
        return value
    mesh = max(meshes, key=lambda m: m.size())
    found = torch.tensor(float(value), device=mesh.device_type)
    for axis in range(mesh.ndim):
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN, group=mesh.get_group(axis))
    return bool(found)


class Swapped:
    """`successors` by identities alone, for who asks before every forward: the model is walked through once.

    Modules that are sharded later have other parameters from then on, by which the model is seen to have changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held = [p for group in _groups(model) for p in group.fsdp_params]

    def now(self) -> dict[int, int]:
        """From the identity of each gathered parameter to that of the sharded one."""
        found = {}
        for p in self._held:
            gathered = getattr(p, "_unsharded_param", None)
            if gathered is not None:
                found[id(gathered)] = id(p.sharded_param)
        return found


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """``dict(model.named_parameters())``, with sharded parameters also where they are gathered at present."""
    instead = successors(model)
    return {name: instead.get(id(p), p) for name, p in model.named_parameters()}


def in_graph(model: nn.Module) -> dict[int, nn.Parameter]:
    """From the identity of each sharded parameter to the one that autograd's graph is about."""
    found = {}
    for group in _groups(model):
        for p in group.fsdp_params:
            gathered = getattr(p, "_unsharded_param", None)
            if gathered is not None:
                found[id(p.sharded_param)] = gathered
    return found


def offloaded(model: nn.Module) -> list[str]:
    """Parameters that are kept on another kind of device than the one on which the model runs (`CPUOffloadPolicy`)."""
    named = ((name, p) for name, p in named_parameters(model).items() if is_sharded(p))
    return [name for name, p in named if local(p).device.type not in (p.device_mesh.device_type, "meta")]  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Division:
    """How tensor parallelism (`parallelize_module`) divides a parameter while its layer runs."""

    axis: int | None
    """Of the parameter, which is cut along it; None: every rank has a copy."""
    ranks: tuple[int, ...]
    """That hold the parts, by their numbers among all: they train on the same batch."""

    def bounds(self, size: int) -> list[tuple[int, int]]:
        """First and last entry of each part of an axis of this size, as `torch.chunk` cuts it."""
        each = -(-size // len(self.ranks))
        return [(min(i * each, size), min((i + 1) * each, size)) for i in range(len(self.ranks))]


def tensor_parallel(model: nn.Module) -> dict[str, Division]:
    """Parameters of which a layer has no more than a part while it runs, by name."""
    axes = {
        id(p.sharded_param): len(group.mesh_info.mesh.mesh.shape) for group in _groups(model) for p in group.fsdp_params
    }
    by_fsdp = {id(p.sharded_param) for group in _groups(model) for p in group.fsdp_params if not p.is_dtensor}
    found = {}
    for name, p in named_parameters(model).items():
        if is_sharded(p) and id(p) not in by_fsdp:
            held: Any = p
            mesh = held.device_mesh
            if mesh.ndim - axes.get(id(p), 0) != 1:
                raise UnsupportedError(
                    describe(
                        f"parameter {name!r} divided along several axes of {mesh}",
                        "tensor parallelism along one axis of a mesh",
                        "parallelize_module(module, mesh[axis], ...) with one axis",
                    )
                )
            where, placement = mesh.get_coordinate(), held.placements[-1]  # FSDP puts its own axes before
            ranks = mesh.mesh[tuple(where[:-1])].tolist()
            found[name] = Division(placement.dim if placement.is_shard() else None, tuple(ranks))
    return found


def whole_input(x: Tensor, blocks: bool) -> tuple[Tensor, bool]:
    """The input of a divided layer for its second moments, plain and of full size; and whether it is the user's memory.

    A collective where x is divided; with `blocks` zeros stand for the others' parts instead (`in_zeros`).
    """
    held: Any = x
    with torch.no_grad():
        placement = held.placements[0]
        if placement.is_replicate():
            return held._local_tensor, True
        if blocks and placement.is_shard() and placement.dim % x.ndim == x.ndim - 1:
            return in_zeros(held._local_tensor, held.device_mesh, x.shape[-1]), False
        return held.full_tensor(), False


def whole_gradient(g: Tensor, mesh: Any, shape: torch.Size, blocks: bool) -> Tensor:
    """The gradient of a divided layer's whole output, of this shape; likewise."""
    if is_sharded(g):
        held: Any = g
        g = held._local_tensor
    cut = [axis for axis, (here, size) in enumerate(zip(g.shape, shape, strict=True)) if here != size]
    if not cut:
        return g
    if len(cut) > 1:
        raise UnsupportedError(
            describe(
                f"an output of shape {tuple(g.shape)} of a layer whose whole output has {tuple(shape)}",
                "one that tensor parallelism divides along one axis",
                "use one output_layouts of ColwiseParallel or RowwiseParallel",
            )
        )
    axis = cut[0]
    if blocks and axis == g.ndim - 1:
        return in_zeros(g, mesh, shape[-1])
    from torch.distributed.tensor import DTensor, Shard

    stride = torch.empty(shape, device="meta").stride()
    with torch.no_grad():
        return DTensor.from_local(g, mesh, [Shard(axis)], run_check=False, shape=shape, stride=stride).full_tensor()


def in_zeros(part: Tensor, mesh: Any, size: int) -> Tensor:
    """A rank's features among zeros for those of the others, times √(number of ranks).

    Second moments of these, averaged over the ranks, are the diagonal blocks of that of all features.
    """
    count, place = mesh.size(), mesh.get_local_rank()
    start, stop = Division(-1, tuple(range(count))).bounds(size)[place]
    whole = part.new_zeros(*part.shape[:-1], size)
    whole[..., start:stop] = part * count**0.5
    return whole


@contextmanager
def _undivided(model: nn.Module) -> Iterator[None]:
    """Tensor parallelism taken off for a while: whole parameters, and none of the hooks that divide activations."""
    divided = tensor_parallel(model) if "torch.distributed.tensor" in sys.modules else {}
    if not divided:
        yield
        return
    params, hooks = list[tuple[dict[str, Any], str, Any]](), list[tuple[Any, Any]]()
    known: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, p in module._parameters.items():
            if p is not None and is_sharded(p):
                if id(p) not in known:
                    known[id(p)] = nn.Parameter(whole(p.detach()), requires_grad=p.requires_grad)
                params.append((module._parameters, key, p))
        for held in (module._forward_pre_hooks, module._forward_hooks):
            hooks.append((held, dict(held)))
    for own, key, p in params:
        own[key] = known[id(p)]
    for held, before in hooks:
        for key, hook in before.items():
            if str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("torch.distributed.tensor"):
                del held[key]
    try:
        yield
    finally:
        for own, key, p in params:
            own[key] = p
        for held, before in hooks:
            later = {key: hook for key, hook in held.items() if key not in before}
            held.clear()
            held.update(before)
            held.update(later)


@contextmanager
def gathered(model: Any) -> Iterator[None]:
    """The whole model in every process for a while, with hooks of FSDP that leave it so, and none that divide layers.

    For forwards and backwards that look at a model and are not the user's. Nothing happens where nothing is sharded.
    """
    states = _states(model)
    if not states:
        with _undivided(model):
            yield
        return
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    fsdp = sys.modules["torch.distributed.fsdp"]
    modules = [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
    whole = {id(group) for group in _groups(model) if group.is_unsharded}
    for module in modules:
        module.unshard()
    before = [state._training_state for state in states]
    for state in states:
        # As in the backward of a checkpoint: hooks cast inputs and outputs, and neither gather nor free parameters.
        state._training_state = TrainingState.PRE_BACKWARD
    try:
        with _undivided(model):
            yield
    finally:
        for state, training in zip(states, before, strict=True):
            state._training_state = training
        for group in _groups(model):
            if id(group) not in whole:
                group.reshard()
