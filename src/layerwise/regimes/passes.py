"""What two passes of one model need: a frozen copy, the same noise, the same kernels, and enough precision."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from layerwise.foundations.errors import InputError, describe


def rounding(dtype: torch.dtype, device: str, convolves: bool) -> tuple[float, str]:
    """The relative rounding error of products of a dtype, and what it is called: autocast and TF32 are coarser."""
    if torch.is_autocast_enabled(device):
        other = torch.get_autocast_dtype(device)
        dtype = max(dtype, other, key=lambda kind: torch.finfo(kind).eps)
    if dtype == torch.float32 and device == "cuda":
        products = torch.get_float32_matmul_precision() != "highest"
        if products or (convolves and torch.backends.cudnn.allow_tf32):
            return 2.0**-10, "TF32"
    return torch.finfo(dtype).eps, str(dtype).removeprefix("torch.")


def frozen_copy(model: nn.Module) -> nn.Module:
    """A copy whose parameters are buffers; without hooks of backward passes and of this library."""
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        given = "a model with lazy parameters"
        raise InputError(describe(given, "parameters that have their shape", "pass one batch through the model first"))
    try:
        copied = copy.deepcopy(model)
    except RuntimeError as error:
        given = f"a model that cannot be copied ({error})"
        raise InputError(describe(given, "one that copy.deepcopy takes", "see the module's tensors")) from error
    made: dict[int, Tensor] = {}  # one for all places that share a parameter
    for module in copied.modules():
        for hooks in (module._backward_hooks, module._backward_pre_hooks):
            hooks.clear()
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for number, hook in list(hooks.items()):  # others may change what a module returns
                if str(getattr(hook, "__module__", type(hook).__module__)).startswith("layerwise."):
                    del hooks[number]
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                del module._parameters[name]
                if id(parameter) not in made:
                    made[id(parameter)] = parameter.detach()
                module.register_buffer(name, made[id(parameter)])
    return copied


def random_state(module: nn.Module) -> tuple[bytes, ...]:
    """Of the generators that a pass of the module draws from."""
    devices = {t.device for t in module.buffers() if t.device.type == "cuda"}
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
    return tuple(state.numpy().tobytes() for state in states)


def works(pushed: Callable[[], Any]) -> bool:
    """Whether a pass in forward mode is possible with the kernels that torch would take."""
    try:
        pushed()
    except NotImplementedError:  # recurrent layers
        return False
    return True


@contextmanager
def slow_path() -> Iterator[None]:
    """torch's transformer layers as they are when they train; their fast path rounds differently."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Without the fused kernels of oneDNN and cuDNN."""
    with torch.backends.mkldnn.flags(enabled=False), torch.backends.cudnn.flags(enabled=False):
        yield


@contextmanager
def same_noise(inputs: Sequence[Any], named: dict[str, Any], module: nn.Module) -> Iterator[None]:
    """Random numbers drawn inside are drawn again afterwards."""
    tensors = (*tree_leaves((inputs, named)), *module.buffers())
    devices = {t.device for t in tensors if isinstance(t, Tensor) and t.device.type not in ("cpu", "meta")}
    kinds = {device.type for device in devices}
    if len(kinds) > 1:
        raise InputError(
            describe(f"devices {', '.join(sorted(kinds))}", "the CPU and one other kind", "move the model")
        )
    kind = next(iter(kinds), "cuda")
    with torch.random.fork_rng(devices=sorted(d.index or 0 for d in devices), device_type=kind):
        yield
