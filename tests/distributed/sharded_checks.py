"""Run by `test_sharded_checks` in several gloo processes: what is sent, kept, saved and loaded, and what goes wrong."""

import os
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parent))
from sharded_training import MEMBERS, MODELS, Case, Transformer, loss_of, shard, train, whole

import layerwise as lw

MEMBERS_SAVED = {
    "KFAC": MEMBERS["KFAC adam"],
    "EKFAC": MEMBERS["EKFAC"],
    "SOAP": MEMBERS["SOAP"],
    "Shampoo": MEMBERS["Shampoo"],
    "Muon": MEMBERS["Muon adam"],
    "SGD": MEMBERS["SGD"],
    "Adam": MEMBERS["Adam"],
}
COLLECTIVES = ("all_reduce", "all_to_all_single", "all_gather", "all_gather_object", "broadcast", "barrier")


def mesh_of(world: int, *shape: int) -> Any:
    return init_device_mesh("cpu", shape or (world,), mesh_dim_names=("replicate", "shard")[-len(shape or (1,)) :])


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Collectives of `torch.distributed`, by name."""
    found, before = Counter[str](), {name: getattr(dist, name) for name in COLLECTIVES}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return before[name](*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, counting(name))
    try:
        yield found
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def parts(data: Any, rank: int, world: int) -> Iterator[tuple[Tensor, Tensor]]:
    for x, y in data:
        each = len(x) // world
        yield x[rank * each : (rank + 1) * each], y[rank * each : (rank + 1) * each]


def take_steps(model: nn.Module, opt: torch.optim.Optimizer, batches: Any) -> None:
    for x, y in batches:
        opt.zero_grad()
        loss_of(model(x), y).backward()
        opt.step()


# --- what is sent and kept --------------------------------------------------------------------------------


def deep(blocks: int) -> nn.Module:
    torch.manual_seed(0)
    model = Transformer()
    model.blocks = nn.ModuleList(type(model.blocks[0])(6) for _ in range(blocks))
    return model.double()


def traffic(rank: int, world: int, folder: str) -> Any:
    """Collectives of a step, for two depths and three members; bytes beside the plan's."""
    found = {}
    for member in ("KFAC adam", "EKFAC adam", "Muon adam"):
        for blocks in (2, 6):
            model = shard(deep(blocks), mesh_of(world))
            opt: Any = MEMBERS[member](model)
            batches = list(parts(MODELS["transformer"][1](4), rank, world))
            take_steps(model, opt, batches[:2])
            sharding = opt._sharding
            plan, sent = sharding.plan, sharding.traffic
            x, y = batches[2]
            opt.zero_grad()
            loss_of(model(x), y).backward()
            before, phases = sent.bytes_sent, Counter(sent.by_phase)
            with counted() as calls:
                opt.step()
            phases = Counter(sent.by_phase) - phases
            expected = plan.step_bytes(rank, "statistics" in phases, sharding.statistics_dtype.itemsize)
            found[f"{member} {blocks}"] = {
                "calls": dict(calls),
                "phases": dict(phases),
                "bytes": sent.bytes_sent - before,
                "planned": expected,
                "layers": len(plan.duties),
            }
    return found


def wide(blocks: int = 8, width: int = 12) -> nn.Module:
    torch.manual_seed(0)

    def block() -> nn.Module:
        up, down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        return nn.Sequential(nn.Linear(width, width), nn.Tanh(), up, nn.Tanh(), down)

    return nn.Sequential(*(block() for _ in range(blocks)), nn.Linear(width, 3)).double()


def held(opt: Any) -> int:
    """Bytes of state on this rank."""
    from layerwise.optim.rule import tensors

    return sum(t.numel() * t.element_size() for stack in opt._stacks for t in tensors(stack.state).values())


def state(rank: int, world: int, folder: str) -> Any:
    """Bytes of state here, and in one process."""
    found = {}
    x, y = torch.randn(12, 12, dtype=torch.float64), torch.randint(3, (12,))
    for member in ("KFAC", "KFAC adam", "EKFAC", "SOAP", "Shampoo", "Muon adam", "Adam"):
        alone = wide()
        single: Any = MEMBERS[member](alone)
        sharded = shard(wide(), mesh_of(world))
        opt: Any = MEMBERS[member](sharded)
        take_steps(sharded, opt, [(x, y)])
        if rank == 0:  # this process alone: its statistics are not reduced
            single.processes = lw.distributed.processes.Processes(dist.new_group([0], use_local_synchronization=True))
            single._accumulator.processes = single.processes
            take_steps(alone, single, [(x, y)])
        found[member] = {"here": held(opt), "single": held(single) if rank == 0 else 0}
    return found


# --- what is saved and loaded -----------------------------------------------------------------------------


def asked(folder: str) -> dict[str, Any]:
    """All members, or a few where the folder's name says so."""
    return {k: v for k, v in MEMBERS_SAVED.items() if "few" not in folder or k in ("KFAC", "Adam")}


def saved(rank: int, world: int, folder: str) -> Any:
    """Run fourteen steps; a distributed checkpoint before each of four of them, and parameters at the end."""
    found = {}
    for member, make in asked(folder).items():
        model = shard(MODELS["mlp"][0](), mesh_of(world))
        opt = make(model)
        batches = list(parts(MODELS["mlp"][1](14), rank, world))
        for step, batch in enumerate(batches):
            if step in (1, 2, 3, 4):
                content = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, opt)}
                dcp.save(content, checkpoint_id=f"{folder}/../{member}-{step}")
            take_steps(model, opt, [batch])
        found[member] = whole(model)
    return found


def resumed(rank: int, world: int, folder: str) -> Any:
    """Go on from each of those checkpoints, with as many ranks as there are here."""
    found = {}
    for member, make in asked(folder).items():
        for step in (1, 2, 3, 4):
            model = MODELS["mlp"][0]()
            model = shard(model, mesh_of(world)) if world > 1 or "sharded" in folder else model
            opt = make(model)
            content = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, opt)}
            dcp.load(content, checkpoint_id=f"{folder}/../{member}-{step}")
            model.load_state_dict(content["model"])
            set_optimizer_state_dict(model, opt, content["optim"])
            batches = list(parts(MODELS["mlp"][1](14), rank, world))
            take_steps(model, opt, batches[step:])
            found[f"{member} {step}"] = whole(model)
    return found


def full_state(rank: int, world: int, folder: str) -> Any:
    """The whole state on every rank is that of one process, and goes into one that is sharded."""
    found = {}
    options = StateDictOptions(full_state_dict=True)
    for member, make in MEMBERS_SAVED.items():
        model, batches = shard(MODELS["mlp"][0](), mesh_of(world)), list(parts(MODELS["mlp"][1](9), rank, world))
        opt = make(model)
        take_steps(model, opt, batches[:5])
        full = get_optimizer_state_dict(model, opt, options=options)
        again = shard(MODELS["mlp"][0](), mesh_of(world))
        other = make(again)
        again.load_state_dict(model.state_dict())
        set_optimizer_state_dict(again, other, full, options=options)
        take_steps(model, opt, batches[5:])
        take_steps(again, other, batches[5:])
        same = torch.equal(whole(model), whole(again))
        found[member] = {"same": same, "state": full["state"]}
    return found


def idle_step(rank: int, world: int, folder: str) -> Any:
    """A step with gradients of zero at a rate of zero, and asking for states, change nothing."""
    found = {}
    for member, make in MEMBERS_SAVED.items():
        models = [shard(MODELS["mlp"][0](), mesh_of(world)) for _ in range(2)]
        opts = [make(model) for model in models]
        batches = list(parts(MODELS["mlp"][1](6), rank, world))
        for place, (model, opt) in enumerate(zip(models, opts, strict=True)):
            take_steps(model, opt, batches[:3])
            if place:
                get_optimizer_state_dict(model, opt)
                rates = [group["lr"] for group in opt.param_groups]
                for group in opt.param_groups:
                    group["lr"] = 0.0
                    for p in group["params"]:
                        p.grad = torch.zeros_like(p)
                opt.step()
                for group, rate in zip(opt.param_groups, rates, strict=True):
                    group["lr"] = rate
            take_steps(model, opt, batches[3:])
        found[member] = torch.equal(*(whole(model) for model in models))
    return found


# --- what goes wrong, and what is odd ---------------------------------------------------------------------


def odd(rank: int, world: int, folder: str) -> Any:
    """A gradient that is missing or not finite on one rank, bfloat16 in forwards, weights that are not sharded."""
    found: dict[str, Any] = {}
    data = list(parts(MODELS["mlp"][1](6), rank, world))
    model = shard(MODELS["mlp"][0](), mesh_of(world))
    opt: Any = MEMBERS["KFAC"](model)
    take_steps(model, opt, data[:2])
    for what in ("missing", "not finite"):
        before = whole(model)
        opt.zero_grad()
        loss_of(model(data[2][0]), data[2][1]).backward()
        if rank == world - 1 and what == "missing":
            model[2].weight.grad = None
        if rank == world - 1 and what == "not finite":
            model[2].weight.grad.to_local().fill_(float("nan"))
        opt.step()
        found[what] = float((whole(model) - before).abs().max())
    found["skipped"] = opt.health().skipped_steps
    found["finite"] = bool(torch.isfinite(whole(model)).all())
    torch.manual_seed(0)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for member in ("KFAC adam", "EKFAC adam", "KFAC exact", "SOAP"):
        small = shard(MODELS["mlp"][0]().float(), mesh_of(world), mp_policy=half)
        opt = MEMBERS[member](small)
        losses = []
        for _ in range(30):
            opt.zero_grad()
            loss = loss_of(small(data[0][0].float()), data[0][1])
            loss.backward()
            opt.step()
            losses.append(float(loss.detach()))
        found[f"half {member}"] = losses[-1] / losses[0]
        found[f"half {member} type"] = str(small[0].weight.dtype)
        found[f"half {member} statistics"] = len(opt._sharding.census.seen)
    return found


def repeated(rank: int, world: int, folder: str) -> Any:
    """Print and health on every rank; a model that was sharded after its optimizer was built."""
    found: dict[str, Any] = {}
    data = list(parts(MODELS["mlp"][1](6), rank, world))
    model = MODELS["mlp"][0]()
    opt: Any = MEMBERS["KFAC"](model)
    shard(model, mesh_of(world))
    take_steps(model, opt, data)
    found["later"] = whole(model)
    other = shard(MODELS["mlp"][0](), mesh_of(world))
    opt = MEMBERS["KFAC"](other)
    found["shown before"] = repr(opt)
    take_steps(other, opt, data)
    found["at once"] = whole(other)
    found["shown"] = repr(opt)
    found["conditions"] = sorted(opt.health().condition)
    found["owned"] = sorted(opt._sharding.plan.owner_of_layer[name] == rank for name in opt.health().condition)
    return found


def tensor_parallel(rank: int, world: int, folder: str) -> Any:
    """Members of gradients beside one process; alone over all ranks, and over half of them under FSDP."""
    found: dict[str, Any] = {}

    def small() -> nn.Module:
        torch.manual_seed(0)
        first = [nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 6), nn.LayerNorm(6)]
        return nn.Sequential(*first, nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    for shape in [(world,), *([(2, world // 2)] if world > 2 else [])]:
        for member in ("Adam", "Muon adam", "Shampoo", "SOAP", "SGD clipped", "KFAC"):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])
            model, alone = small(), small()
            cuts = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(), "6": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], cuts)
            if len(shape) == 2:
                fully_shard(model[0], mesh=mesh["dp"])
                fully_shard(model, mesh=mesh["dp"])
            if member == "KFAC":
                try:
                    MEMBERS[member](model)
                except lw.LayerwiseError as error:
                    found[f"{member} {len(shape)}"] = str(error)
                continue
            data = MODELS["mlp"][1](8)
            copies = shape[0] if len(shape) == 2 else 1
            take_steps(model, MEMBERS[member](model), parts(data, rank // shape[-1] if copies > 1 else 0, copies))
            take_steps(alone, MEMBERS[member](alone), data)
            found[f"{member} {len(shape)}"] = float((whole(model) - whole(alone)).abs().max())
    return found


def one_rank(rank: int, world: int, folder: str) -> Any:
    """On a mesh of one rank, whether every member's steps are those without FSDP, bit for bit; by the GPU's path, too,
    which is the one that would see a `DTensor` in a kernel."""
    found: dict[str, Any] = {}
    cases = [Case(member, model, steps=5) for model in ("mlp", "transformer") for member in MEMBERS]
    cases = [case for case in cases if case.member != "NGD"]
    for case in cases:
        found[case.name] = torch.equal(train(case, 0, 1, True), train(case))
    waits = lw.optim.Layerwise.host_may_sync
    lw.optim.Layerwise.host_may_sync = property(lambda self: False)  # type: ignore[assignment]
    for case in cases:
        if case.model == "mlp" and case.member not in ("LocoProp", "MahalanobisSpectral"):
            found[f"asynchronous {case.name}"] = torch.equal(train(case, 0, 1, True), train(case))
    lw.optim.Layerwise.host_may_sync = waits  # type: ignore[method-assign]
    return found


def another_plan(rank: int, world: int, folder: str) -> Any:
    """Ranks that differ in an option are told so before anything is sent."""
    model = shard(MODELS["mlp"][0](), mesh_of(world))
    overrides = {"4": {"update": "fallback"}} if rank else None
    opt = lw.optim.KFAC(model, 0.02, overrides=overrides, scale="formula")
    try:
        take_steps(model, opt, parts(MODELS["mlp"][1](2), rank, world))
    except lw.LayerwiseError as error:
        return str(error)
    return "no error"


def killed(rank: int, world: int, folder: str) -> Any:
    """The last rank ends in the middle of a step."""
    model = shard(MODELS["mlp"][0](), mesh_of(world))
    opt: Any = MEMBERS["KFAC"](model)
    data = list(parts(MODELS["mlp"][1](4), rank, world))
    take_steps(model, opt, data[:2])
    if rank == world - 1:
        sharding = opt._sharding
        sharding.collect_gradients = lambda: os._exit(7)
    started = time.monotonic()
    try:
        take_steps(model, opt, data[2:])
    except lw.LayerwiseError as error:
        return {"said": str(error), "after": time.monotonic() - started}
    return {"said": "no error", "after": time.monotonic() - started}


CHECKS = {
    check.__name__: check
    for check in (
        traffic,
        state,
        saved,
        resumed,
        full_state,
        idle_step,
        odd,
        repeated,
        tensor_parallel,
        one_rank,
        another_plan,
        killed,
    )
}


def work(rank: int, world: int, folder: str, names: list[str]) -> None:
    from datetime import timedelta

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    limit = timedelta(seconds=20 if "killed" in names else 300)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world, timeout=limit)
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = CHECKS[name](rank, world, folder)
        except Exception:
            found[name] = traceback.format_exc()
            break
    torch.save(found, f"{folder}/{rank}.pt")
    if "killed" not in names:
        dist.destroy_process_group()


if __name__ == "__main__":  # number of processes, a folder, and which checks
    os.environ["OMP_NUM_THREADS"] = "1"
    world, folder, names = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    context = torch.multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(rank, world, folder, names)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(0 if "killed" in names else max(process.exitcode or 0 for process in processes))
