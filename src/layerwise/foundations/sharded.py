"""Models whose parameters are sharded over processes: what `torch.distributed.fsdp.fully_shard` does with them.

Between steps a module holds its shards, as `DTensor` parameters; these have the gradients, and optimizers get them.
While the module runs it holds other parameters in their place, gathered and whole, which autograd's graph is about.
Everything that torch keeps of this in private attributes is read in this file and nowhere else.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


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


def tensor_parallel(model: nn.Module) -> list[str]:
    """Names of parameters of which a layer has no more than a part while it runs (`parallelize_module`)."""
    by_fsdp = {id(p.sharded_param): p.is_dtensor for group in _groups(model) for p in group.fsdp_params}
    return [name for name, p in named_parameters(model).items() if is_sharded(p) and by_fsdp.get(id(p), True)]


@contextmanager
def gathered(model: Any) -> Iterator[None]:
    """The whole model in every process for a while, with hooks of FSDP that leave it so.

    For forwards and backwards that look at a model and are not the user's. Nothing happens where nothing is sharded.
    """
    states = _states(model)
    if not states:
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
        yield
    finally:
        for state, training in zip(states, before, strict=True):
            state._training_state = training
        for group in _groups(model):
            if id(group) not in whole:
                group.reshard()
