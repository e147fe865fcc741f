"""What an optimizer keeps on the device."""

import gc

import torch
from torch import Tensor

from gpu.marks import synchronize
from gpu.optimizers import Made
from layerwise.optim.rule import tensors


def state(device: str, parameters: int, made: Made, before: int) -> dict:
    """GiB of the tensors kept from step to step, and of all that is held since before the optimizer was made."""
    held = None
    if device.startswith("cuda"):
        gc.collect()
        synchronize(device)
        held = torch.cuda.memory_allocated() - before
    kept = sum(storage_bytes(state_of(opt)) for opt in made.optimizers)
    adamw = 8 * parameters
    return {
        "state_gib": round(kept / 2**30, 4),
        "state_of_adamw": round(kept / adamw, 3),
        "held_gib": None if held is None else round(held / 2**30, 4),
        "held_of_adamw": None if held is None else round(held / adamw, 3),
    }


def state_of(opt: torch.optim.Optimizer) -> object:
    """The state as it lies on the device: `state_dict()` of a layer-wise optimizer unpacks fp16 and triangles."""
    stacks = getattr(opt, "_stacks", None)
    return opt.state_dict()["state"] if stacks is None else [tensors(stack.state) for stack in stacks]


def storage_bytes(tree: object) -> int:
    """Bytes behind all tensors, each storage once."""
    found: dict[tuple, int] = {}

    def visit(node: object) -> None:
        if isinstance(node, Tensor):
            storage = node.untyped_storage()
            found[node.device, storage.data_ptr()] = storage.nbytes()
        elif isinstance(node, dict):
            for child in node.values():
                visit(child)
        elif isinstance(node, list | tuple):
            for child in node:
                visit(child)

    visit(tree)
    return sum(found.values())
