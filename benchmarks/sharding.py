"""What `fully_shard` on a mesh of one rank costs a step, beside the same model unsharded; and two ranks on one device.

    python benchmarks/sharding.py                                  # one GPU, GPT of 94 M parameters
    python benchmarks/sharding.py --members KFAC Muon --rounds 5
    python benchmarks/sharding.py --ranks 2                        # smoke test: losses of two ranks, and of one
    python benchmarks/sharding.py --tiny --device cpu              # to see that all runs

Both models are in one process and train by turns, a cycle of refreshes each. "step" is `opt.step()` alone, the device
idle before and after it; "iteration" has forward and backward, too, and nobody waits within a cycle. Of both, the mean
over a cycle, then the median over rounds; the ratio is the median of the rounds' own. FSDP itself gathers and frees
parameters in forward and backward: "torch AdamW" shows what that costs any optimizer. The aim is a step within 5 %.

With ``--ranks 2`` (by gloo: NCCL wants a device for each rank) the two divide each batch between them. Every member is
refreshed at every step there, since one process and several deal their refreshes to steps differently.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measure import synchronize
from models import GPT
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import layerwise as lw

EVERY = 10
"""Steps between refreshes, and in a cycle."""
AIM = 1.05
SMOKE_STEPS = 6
SMOKE_TOLERANCE = 1e-3
"""Of losses, relative: steps on a GPU are in float32 with products of less."""
BY_ADAM: dict[str, Any] = {"overrides": {"head": {"update": "fallback"}}}
"""The head's side of the vocabulary has no factor in practice."""
Make = Callable[[nn.Module, int], torch.optim.Optimizer]
MEMBERS: dict[str, Make] = {
    "torch AdamW": lambda m, every: torch.optim.AdamW(m.parameters(), 1e-3, fused=True),
    "KFAC": lambda m, every: lw.optim.KFAC(m, 1e-3, refresh_every=every, estimator="empirical", **BY_ADAM),
    "EKFAC": lambda m, every: lw.optim.EKFAC(m, 1e-3, refresh_every=every, estimator="empirical", **BY_ADAM),
    "Muon": lambda m, every: lw.optim.Muon(m, 1e-3, **BY_ADAM),
    "SOAP": lambda m, every: lw.optim.SOAP(m, 1e-3, refresh_every=every, **BY_ADAM),
    "Shampoo": lambda m, every: lw.optim.Shampoo(m, 1e-3, refresh_every=every, **BY_ADAM),
}


class Training:
    """One model with its optimizer, and the batches that it trains on."""

    def __init__(self, member: str, args: argparse.Namespace, mesh: Any = None, every: int = EVERY) -> None:
        torch.manual_seed(0)
        depth, width, heads, vocabulary, n, length = (2, 16, 2, 11, 4, 6) if args.tiny else (12, 768, 12, 8192, 16, 512)
        self.device, self.mixed = args.device, args.device == "cuda" and args.ranks == 1
        self.model = GPT(depth, width, heads, vocabulary, length).to(args.device)
        if mesh is not None:
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.opt = MEMBERS[member](self.model, every)
        draw = torch.Generator().manual_seed(1)
        found = torch.randint(vocabulary, (4, n, length + 1), generator=draw).to(args.device)
        self.batches = [(part[:, :-1], part[:, 1:]) for part in found]
        self.taken, self.step_seconds = 0, 0.0

    def iterate(self, wait: bool = False, share: slice = slice(None)) -> Tensor:
        """One iteration on a part of its batch; with `wait` the step is timed by itself."""
        x, y = (t[share] for t in self.batches[self.taken % len(self.batches)])
        self.taken += 1
        self.opt.zero_grad()
        with torch.autocast("cuda", torch.bfloat16) if self.mixed else nullcontext():
            loss = F.cross_entropy(self.model(x).flatten(0, 1).float(), y.flatten())
        loss.backward()
        if wait:
            synchronize(self.device)
            began = time.perf_counter()
            self.opt.step()
            synchronize(self.device)
            self.step_seconds += time.perf_counter() - began
        else:
            self.opt.step()
        return loss.detach()

    def cycle(self, wait: bool) -> float:
        """Seconds of an iteration (or, with `wait`, of a step), a mean over a cycle."""
        synchronize(self.device)
        self.step_seconds, began = 0.0, time.perf_counter()
        for _ in range(EVERY):
            self.iterate(wait)
        synchronize(self.device)
        return (self.step_seconds if wait else time.perf_counter() - began) / EVERY


# --- one rank -----------------------------------------------------------------------------------------------


def compared(member: str, args: argparse.Namespace, mesh: Any) -> dict[str, Any]:
    """Times of a member, sharded and not, by turns."""
    pair = {"plain": Training(member, args), "sharded": Training(member, args, mesh)}
    began = time.perf_counter()
    for training in pair.values():
        for _ in range(args.warmup):
            training.cycle(wait=False)
    found: dict[str, Any] = {"member": member, "warmup_s": round(time.perf_counter() - began, 1)}
    for what, wait in (("step", True), ("iteration", False)):
        rounds = [{name: training.cycle(wait) for name, training in pair.items()} for _ in range(args.rounds)]
        for name in pair:
            found[f"{what}_{name}_ms"] = round(1e3 * statistics.median(r[name] for r in rounds), 3)
        found[f"{what}_ratio"] = round(statistics.median(r["sharded"] / r["plain"] for r in rounds), 4)
    for name, training in pair.items():
        found[f"loss_{name}"] = float(training.iterate())
    return found


def one_rank(args: argparse.Namespace) -> list[dict[str, Any]]:
    backend = "nccl" if args.device == "cuda" and dist.is_nccl_available() else "gloo"
    if args.device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(args.device, (1,))
    print(f"torch {torch.__version__}, {backend}, one rank; milliseconds, medians of {args.rounds} cycles of {EVERY}")
    print(
        f"{'':14s}{'step':>9s}{'sharded':>9s}{'ratio':>7s}{'iteration':>11s}{'sharded':>9s}{'ratio':>7s}{'loss':>18s}"
    )
    rows = []
    for member in args.members:
        row = compared(member, args, mesh)
        rows.append(row)
        steps = f"{row['step_plain_ms']:9.2f}{row['step_sharded_ms']:9.2f}{row['step_ratio']:7.3f}"
        whole = f"{row['iteration_plain_ms']:11.2f}{row['iteration_sharded_ms']:9.2f}{row['iteration_ratio']:7.3f}"
        losses = f"{row['loss_plain']:9.4f}{row['loss_sharded']:9.4f}"
        held = "" if member == "torch AdamW" else "  held" if row["step_ratio"] <= AIM else "  NOT HELD"
        print(f"{member:14s}{steps}{whole}{losses}{held}", flush=True)
    dist.destroy_process_group()
    return rows


# --- several on one device ----------------------------------------------------------------------------------


def losses(member: str, args: argparse.Namespace, mesh: Any, rank: int, world: int) -> list[float]:
    """Of the joined batch, step by step."""
    training, found = Training(member, args, mesh, every=1), []
    each = len(training.batches[0][0]) // world
    for _ in range(SMOKE_STEPS):
        loss = training.iterate(share=slice(rank * each, (rank + 1) * each)).double().cpu()
        if world > 1:
            dist.all_reduce(loss)
        found.append(float(loss) / world)
    return found


def rank_of(rank: int, args: argparse.Namespace, folder: str) -> None:
    """One of several processes on one device."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=args.ranks)
    mesh, found = init_device_mesh(args.device, (args.ranks,)), {}
    for member in args.members:
        found[member] = losses(member, args, mesh, rank, args.ranks)
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def several_ranks(args: argparse.Namespace) -> list[dict[str, Any]]:
    print(f"torch {torch.__version__}, gloo, {args.ranks} ranks on one device; losses beside those of one process")
    alone = {member: losses(member, args, None, 0, 1) for member in args.members}
    with tempfile.TemporaryDirectory() as folder:
        failed = ""
        try:
            mp.spawn(rank_of, (args, folder), nprocs=args.ranks)
        except Exception as error:  # of gloo without some collective for the device: the table says which
            failed = str(error).strip().splitlines()[-1]
        file = Path(folder, "0.json")
        found = json.loads(file.read_text()) if file.exists() else {}
    rows = []
    for member, one in alone.items():
        row: dict[str, Any] = {"member": member, "one": one, "several": found.get(member)}
        if member in found:
            row["difference"] = max(abs(a - b) / abs(a) for a, b in zip(one, found[member], strict=True))
            row["held"] = row["difference"] <= SMOKE_TOLERANCE and one[-1] < one[0]
            said = "equal" if row["held"] else "NOT EQUAL"
            print(f"{member:14s}{one[0]:9.4f} → {one[-1]:.4f}   largest difference {row['difference']:.1e}  {said}")
        else:
            print(f"{member:14s}not run: {failed[:160]}")
        rows.append(row)
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", nargs="+", choices=list(MEMBERS), default=list(MEMBERS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5, help="cycles of each model that are timed")
    parser.add_argument("--warmup", type=int, default=3, help="cycles before: kernels are compiled, steps captured")
    parser.add_argument("--tiny", action="store_true", help="a small model: a check, not a measurement")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    args = parser.parse_args()
    if args.tiny:
        args.rounds, args.warmup = min(args.rounds, 2), 1
    return args


def main() -> None:
    args = arguments()
    os.environ.setdefault("MASTER_ADDR", "localhost")
    warnings.simplefilter("ignore")
    rows = one_rank(args) if args.ranks == 1 else several_ranks(args)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    if any(row.get("held") is False for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
