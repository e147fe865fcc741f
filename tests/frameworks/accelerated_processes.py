"""Run by `test_accelerate` with torchrun: a loop of accelerate in several processes, each with its part of a batch."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, FullyShardedDataParallelPlugin
from framework_training import batch, loss_of, net, undrawn, warmup
from torch.distributed.tensor import DTensor

STEPS = 12


def fsdp2() -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
        cpu_offload=False,
    )


def accelerator_of(kind: str) -> Accelerator:
    if kind == "fsdp2":
        return Accelerator(cpu=True, fsdp_plugin=fsdp2())
    unused = DistributedDataParallelKwargs(find_unused_parameters=kind == "ddp-unused")
    return Accelerator(cpu=True, kwargs_handlers=[unused])


def train(name: str, accelerator: Accelerator, sharded: bool) -> list[torch.Tensor]:
    """The weights after the steps."""
    model: Any = net().double()
    opt: Any = undrawn(name)(model)
    if sharded:
        # On CPUs accelerate puts DistributedDataParallel in FSDP's place, without a word, and again after a `prepare`:
        # this has it take its own way of FSDP2, which exchanges the parameters of an optimizer that was built before.
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, fsdp2()
    model, opt, schedule = accelerator.prepare(model, opt, warmup(opt))
    of_mesh = [isinstance(p, DTensor) for group in opt.param_groups for p in group["params"]]
    assert all(of_mesh) if sharded else not any(of_mesh)
    schedule.split_batches = True  # one step of the schedule for each of ours
    for step in range(STEPS):
        x, y = (part.chunk(accelerator.num_processes)[accelerator.process_index] for part in batch(step, STEPS))
        accelerator.backward(loss_of(model, (x.double(), y)))
        opt.step()
        schedule.step()
        opt.zero_grad()
        with torch.no_grad():
            model.eval()(x.double())
            model.train()
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in map(torch.detach, model.parameters())]
    accelerator.free_memory()
    return weights


def main(kind: str, folder: Path, names: list[str]) -> None:
    accelerator = accelerator_of(kind)
    for name in names:
        weights = train(name, accelerator, kind == "fsdp2")
        if accelerator.is_main_process:
            torch.save(weights, folder / f"{name}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
    # Without the interpreter's own end, where torch may lock up: DistributedDataParallel's Reducer waits there for a
    # thread of gloo that waits for Python.
    os._exit(0)
