"""Run by `test_sharded_checks` in several gloo processes: what is sent, kept, saved and loaded, and what goes wrong."""

import os
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parent))
from sharded_training import EXACT, MEMBERS, MODELS, Case, Transformer, loss_of, shard, train, whole

import layerwise as lw
from layerwise.distributed.processes import Processes
from layerwise.optim.sharding.one_rank import LocalParameters
from layerwise.optim.statistics.accumulate import Accumulator

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


def saved(rank: int, world: int, folder: str) -> Any:
    """Run fourteen steps; a distributed checkpoint before each of four of them, and parameters at the end."""
    found = {}
    for member, make in MEMBERS_SAVED.items():
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
    """Go on from each of those checkpoints, with as many ranks as there are here; one, with a mesh and without."""
    found = {}
    for member, make in MEMBERS_SAVED.items():
        for step, sharded in product((1, 2, 3, 4), (True,) if world > 1 else (True, False)):
            model = shard(MODELS["mlp"][0](), mesh_of(world)) if sharded else MODELS["mlp"][0]()
            opt = make(model)
            content = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, opt)}
            dcp.load(content, checkpoint_id=f"{folder}/../{member}-{step}")
            model.load_state_dict(content["model"])
            set_optimizer_state_dict(model, opt, content["optim"])
            batches = list(parts(MODELS["mlp"][1](14), rank, world))
            take_steps(model, opt, batches[step:])
            found[f"{member} {step} {'sharded' if sharded else 'plain'}"] = whole(model)
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


# --- tensor parallelism -----------------------------------------------------------------------------------

DIVIDED = {"0": 0, "2": 1, "4": 0, "6": 1, "8": 0}
"""Linear layers of `divisible` and the axis of their weight that is cut: 0 outputs, 1 inputs."""
OF_STATISTICS: dict[str, Any] = {
    "KFAC": lambda m, **how: lw.optim.KFAC(m, 0.02, scale="formula", refresh_every=3, **how),
    "KFAC adam": lambda m, **how: lw.optim.KFAC(m, 0.01, refresh_every=3, estimator="empirical", **how),
    "KFAC labels": lambda m, **how: lw.optim.KFAC(m, 0.02, scale="formula", refresh_every=3, **EXACT, **how),
    "EKFAC": lambda m, **how: lw.optim.EKFAC(m, 0.005, scale="formula", refresh_every=1, **how),
    "EKFAC running": lambda m, **how: lw.optim.EKFAC(
        m, 0.005, scale="formula", refresh_every=1, scaling="running", **how
    ),
    "FOOF": lambda m, **how: lw.optim.FOOF(m, 0.02, scale="formula", refresh_every=3, **how),
    "FOOF adam": lambda m, **how: lw.optim.FOOF(m, 0.01, refresh_every=3, **how),
    "LocoProp": lambda m, **how: lw.optim.LocoProp(m, 0.3, **how),
    "MahalanobisSpectral": lambda m, **how: lw.optim.MahalanobisSpectral(
        m, 0.003, scale="formula", refresh_every=3, **how
    ),
}
OF_GRADIENTS = ("Adam", "Muon adam", "Shampoo", "SOAP", "SGD clipped")


def divisible(sequence: bool) -> nn.Module:
    """Of Linear layers and a norm; the last has fewer outputs than four ranks."""
    torch.manual_seed(0)
    first = [nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 6), nn.LayerNorm(6)]
    last = [] if sequence else [nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)]
    return nn.Sequential(*first, nn.Linear(6, 3 if sequence else 8), *last).double()


def divide(model: nn.Module, mesh: Any, sequence: bool) -> None:
    """With `sequence`, activations between the layers are divided along their positions."""
    if sequence:
        down = RowwiseParallel(output_layouts=Shard(1))
        up = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        styles: Any = {"0": ColwiseParallel(), "2": down, "3": SequenceParallel(), "4": up}
    else:
        styles = {name: (RowwiseParallel if axis else ColwiseParallel)() for name, axis in DIVIDED.items()}
        styles["8"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, styles)


def positions(steps: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(steps, 12, 4, 5, generator=draw, dtype=torch.float64)
    return list(zip(x, torch.randint(3, (steps, 12, 4), generator=draw), strict=True))


@contextmanager
def block_diagonal(opt: Any, ranks: int) -> Iterator[None]:
    """One process whose factors are block-diagonal where those of so many ranks would be."""

    def blocks(M: Tensor, size: int) -> Tensor:
        """Blocks of this many features, as torch.chunk cuts them; what is beyond (a bias) is one more."""
        each, label = -(-size // ranks), torch.full((M.shape[-1],), -1)
        label[:size] = torch.arange(size) // each
        return M * (label.unsqueeze(0) == label.unsqueeze(1))

    def observed(self: Any, stack: Any, sums: dict[str, Any]) -> Any:
        for spec in stack.specs:
            own, axis = sums.get(spec.name), DIVIDED.get(spec.name)
            if own is not None and axis == 0 and own.G is not None:
                own.G = blocks(own.G, spec.form.outputs)
            if own is not None and axis == 1 and own.A is not None:
                own.A = blocks(own.A, spec.form.weight_inputs)
        return before(self, stack, sums)

    before = Accumulator.observation
    Accumulator.observation = observed  # type: ignore[method-assign]
    try:
        yield
    finally:
        Accumulator.observation = before  # type: ignore[method-assign]


def tensor_parallel_cases(shape: tuple[int, ...]) -> list[tuple[str, dict[str, str]]]:
    """Members with their options: all of them over two ranks, a few over more, which take their time to start."""
    few = ("Adam", "KFAC", "EKFAC", "FOOF adam")
    cases: list[tuple[str, dict[str, str]]] = [(member, {}) for member in OF_GRADIENTS]
    cases += [(member, {"tensor_parallel": how}) for how in ("exact", "blocks") for member in OF_STATISTICS]
    cases += [(f"sequence {member}", {}) for member in ("Adam", "KFAC adam", "EKFAC", "FOOF")]
    return cases if shape == (2,) else [(name, how) for name, how in cases if name.removeprefix("sequence ") in few]


def tensor_parallel(rank: int, world: int, folder: str) -> Any:
    """Every member beside one process; alone over all ranks, and over half of them under FSDP."""
    found: dict[str, Any] = {}
    for shape in [(world,), *([(2, world // 2)] if world > 2 else [])]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])
        copies = shape[0] if len(shape) == 2 else 1
        place = rank // shape[-1] if copies > 1 else 0
        for name, how in tensor_parallel_cases(shape):
            sequence = name.startswith("sequence ")
            member = name.removeprefix("sequence ")
            model, alone = divisible(sequence), divisible(sequence)
            data = positions(20) if sequence else MODELS["mlp"][1](20)
            divide(model, mesh["tp"], sequence)
            if len(shape) == 2:
                fully_shard(model[0], mesh=mesh["dp"])
                fully_shard(model, mesh=mesh["dp"])
            make = OF_STATISTICS.get(member) or MEMBERS[member]
            opt = make(model, **how)
            take_steps(model, opt, parts(data, place, copies))
            single = make(alone)
            single.processes = Processes(own_group(rank))
            single._accumulator.processes = single.processes
            with block_diagonal(single, shape[-1]) if how.get("tensor_parallel") == "blocks" else nullcontext():
                take_steps(alone, single, data)
            key = " ".join([name, *how.values(), f"{len(shape)}d"])
            found[key] = float((whole(model) - whole(alone)).abs().max())
            if member in OF_STATISTICS:
                found[f"seen {key}"] = len(opt._sharding.census.seen)
    model, mesh = divisible(False), init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    divide(model, mesh, False)
    try:
        MEMBERS["NGD"](model)
    except lw.LayerwiseError as error:
        found["NGD"] = str(error)
    fixed = nn.Sequential(nn.Linear(5, 8), nn.Unflatten(-1, (2, 4 // world)), nn.Flatten(-2)).double()
    parallelize_module(fixed, mesh, {"0": ColwiseParallel()})
    try:
        take_steps(fixed, lw.optim.KFAC(fixed, 0.01), [(torch.randn(6, 5, dtype=torch.float64), torch.zeros(6).long())])
    except lw.LayerwiseError as error:
        found["own heads"] = str(error)
    table = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 8)).double()
    parallelize_module(table, mesh, {"0": ColwiseParallel(output_layouts=Replicate()), "1": ColwiseParallel()})
    found["embedding"] = repr(lw.optim.KFAC(table, 0.01, scale="formula"))
    return found


_OWN_GROUPS: dict[int, Any] = {}


def own_group(rank: int) -> Any:
    """Of this process alone: a run that is compared with others takes part in no sum."""
    if rank not in _OWN_GROUPS:
        _OWN_GROUPS[rank] = dist.new_group([rank], use_local_synchronization=True)
    return _OWN_GROUPS[rank]


def one_rank(rank: int, world: int, folder: str) -> Any:
    """On a mesh of one rank, whether every member's steps are those without FSDP, bit for bit; by the GPU's path, too,
    which is the one that would see a `DTensor` in a kernel."""
    found: dict[str, Any] = {}
    cases = [Case(member, model, steps=5) for model in ("mlp", "transformer") for member in MEMBERS]
    cases = [case for case in cases if case.member != "NGD"]
    half = {"dtype": "float32", "autocast": True}
    cases += [
        Case(m, model, (), 5, half) for model in ("mlp", "transformer") for m in ("KFAC adam", "EKFAC adam", "SOAP")
    ]
    for case in cases:
        found[case.name] = torch.equal(train(case, 0, 1, True), train(case))
    waits = lw.optim.Layerwise.host_may_sync
    lw.optim.Layerwise.host_may_sync = property(lambda self: False)  # type: ignore[assignment]
    for case in cases:
        if case.model == "mlp" and case.member not in ("LocoProp", "MahalanobisSpectral"):
            found[f"asynchronous {case.name}"] = torch.equal(train(case, 0, 1, True), train(case))
    lw.optim.Layerwise.host_may_sync = waits  # type: ignore[method-assign]
    model = shard(MODELS["mlp"][0](), mesh_of(1))
    own = LocalParameters(dict(model.named_parameters()))
    versions = {name: p._version for name, p in own.params.items()}
    own.begin()
    found["nothing is written"] = all(p._version == versions[name] for name, p in own.params.items())
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0)
    own.begin()
    found["writes are seen"] = all(p._version > versions[name] for name, p in own.params.items())
    return found


def decided_alike(rank: int, world: int, folder: str) -> Any:
    """Adaptive damping by losses that differ, batches of other sizes, a first batch that is not finite on one rank."""
    found: dict[str, Any] = {}
    data, adaptive = list(parts(MODELS["mlp"][1](12), rank, world)), {"damping": "adaptive", "momentum": 0.0}
    for kind in ("fsdp", "ddp"):
        model = MODELS["mlp"][0]()
        made = shard(model, mesh_of(world)) if kind == "fsdp" else nn.parallel.DistributedDataParallel(model)
        opt = lw.optim.KFAC(model, 0.05, scale="formula", refresh_every=2, clip=None, estimator="empirical", **adaptive)
        dampings = []
        for x, y in data:

            def closure(x: Tensor = x, y: Tensor = y, made: Any = made, opt: Any = opt) -> Tensor:
                opt.zero_grad()
                loss = loss_of(made(x), y)
                loss.backward()
                return loss

            opt.step(closure)
            dampings.append(opt.param_groups[0]["damping"])
        found[f"adaptive {kind}"], found[f"dampings {kind}"] = whole(model), dampings
    for kind in ("fsdp", "ddp"):  # losses that are sums, of five examples on one rank and seven on the other
        for member in ("KFAC", "EKFAC running"):
            model = MODELS["mlp"][0]()
            made = shard(model, mesh_of(world)) if kind == "fsdp" else nn.parallel.DistributedDataParallel(model)
            make = lw.optim.KFAC if member == "KFAC" else partial(lw.optim.EKFAC, scaling="running", refresh_every=1)
            opt = make(model, 0.005, scale="formula", loss_average=None)
            for x, y in MODELS["mlp"][1](6):
                part = slice(0, 5) if rank == 0 else slice(5, 12)
                opt.zero_grad()
                (loss_of(made(x[part]), y[part]) * len(x[part])).backward()
                opt.step()
            found[f"uneven {member} {kind}"] = whole(model)
    model = shard(MODELS["mlp"][0](), mesh_of(world))
    opt = lw.optim.KFAC(model, 0.02, scale="formula")
    x, y = data[0]
    take_steps(model, opt, [(x * float("nan") if rank else x, y), *data])
    found["after a broken start"], found["skipped"] = whole(model), opt.health().skipped_steps
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


def killed_saving(rank: int, world: int, folder: str) -> Any:
    """A checkpoint before every second step; at the third the last rank ends while the files are written."""
    model = shard(MODELS["mlp"][0](), mesh_of(world))
    opt = MEMBERS_SAVED["KFAC"](model)
    write = FileSystemWriter.write_data
    for step, batch in enumerate(parts(MODELS["mlp"][1](8), rank, world)):
        if step and step % 2 == 0:
            if step == 6 and rank == world - 1:
                FileSystemWriter.write_data = lambda *args: os._exit(7)  # type: ignore[assignment,method-assign]
            content = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, opt)}
            try:
                dcp.save(content, checkpoint_id=f"{folder}/../step-{step}")
            except Exception as error:
                return {"step": step, "said": type(error).__name__}
        take_steps(model, opt, [batch])
    FileSystemWriter.write_data = write  # type: ignore[method-assign]
    return {"step": None}


def restarted(rank: int, world: int, folder: str) -> Any:
    """Go on from the newest checkpoint that is complete; beside it the run that nobody interrupted."""
    complete = sorted(file.parent for file in Path(folder).parent.glob("step-*/.metadata"))
    last = int(complete[-1].name.partition("-")[2])
    batches = list(parts(MODELS["mlp"][1](8), rank, world))
    found = {}
    for start in (last, 0):
        model = shard(MODELS["mlp"][0](), mesh_of(world))
        opt = MEMBERS_SAVED["KFAC"](model)
        if start:
            content = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, opt)}
            dcp.load(content, checkpoint_id=str(complete[-1]))
            model.load_state_dict(content["model"])
            set_optimizer_state_dict(model, opt, content["optim"])
        take_steps(model, opt, batches[start:])
        found["resumed" if start else "going"] = whole(model)
    return {**found, "last": last, "folders": sorted(path.name for path in Path(folder).parent.glob("step-*"))}


def asynchronous(rank: int, world: int, folder: str) -> Any:
    """Steps that are taken while a checkpoint is written are no part of it."""
    found = {}
    beside = dist.new_group(backend="gloo")  # the writer's messages must not meet those of steps
    for member in ("KFAC", "SOAP", "Adam"):
        model, batches = shard(MODELS["mlp"][0](), mesh_of(world)), list(parts(MODELS["mlp"][1](9), rank, world))
        opt = MEMBERS_SAVED[member](model)
        take_steps(model, opt, batches[:4])
        # On a CPU torch stages no copy: parameters that go on being trained are the caller's to copy.
        weights = {name: p.clone() for name, p in model.state_dict().items()}
        content = {"model": weights, "optim": get_optimizer_state_dict(model, opt)}
        saving: Any = dcp.async_save(content, checkpoint_id=f"{folder}/../async-{member}", process_group=beside)
        take_steps(model, opt, batches[4:])
        saving.result()
        again = shard(MODELS["mlp"][0](), mesh_of(world))
        other = MEMBERS_SAVED[member](again)
        content = {"model": again.state_dict(), "optim": get_optimizer_state_dict(again, other)}
        dcp.load(content, checkpoint_id=f"{folder}/../async-{member}")
        again.load_state_dict(content["model"])
        set_optimizer_state_dict(again, other, content["optim"])
        take_steps(again, other, batches[4:])
        found[member] = float((whole(model) - whole(again)).abs().max())
    return found


def offloaded(rank: int, world: int, folder: str) -> Any:
    """Parameters that FSDP keeps on the host: taken where that is where the model runs, else refused by statistics."""
    found: dict[str, Any] = {}
    policy = CPUOffloadPolicy(pin_memory=False)
    for member in ("KFAC", "EKFAC", "SOAP", "Adam"):
        models = [shard(MODELS["mlp"][0](), mesh_of(world), **how) for how in ({}, {"offload_policy": policy})]
        for model in models:
            take_steps(model, MEMBERS_SAVED[member](model), parts(MODELS["mlp"][1](6), rank, world))
        found[member] = torch.equal(*map(whole, models))
    model = shard(MODELS["mlp"][0](), mesh_of(world), offload_policy=policy)
    before = DeviceMesh.device_type
    DeviceMesh.device_type = property(lambda self: "cuda")  # type: ignore[assignment,method-assign]
    try:
        MEMBERS_SAVED["KFAC"](model)
    except lw.LayerwiseError as error:
        found["on another device"] = str(error)
    finally:
        DeviceMesh.device_type = before  # type: ignore[method-assign]
    return found


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
        decided_alike,
        another_plan,
        asynchronous,
        offloaded,
        killed,
        killed_saving,
        restarted,
    )
}


def work(rank: int, world: int, folder: str, names: list[str]) -> None:
    from datetime import timedelta

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    kills = any(name.startswith("killed") for name in names)
    limit = timedelta(seconds=20 if kills else 300)
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
    if not kills:
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
    kills = any(name.startswith("killed") for name in names)
    sys.exit(0 if kills else max(process.exitcode or 0 for process in processes))
