"""Run by `test_processes` in two processes: trains the same models alone and in step with the other."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "optim"))
from optim_tools import batches, convnet, cross_entropy, flat, mlp

import layerwise as lw

EXACT = {"likelihood": "categorical", "estimator": "exact"}
RUNS = {
    "KFAC": lambda m: lw.optim.KFAC(m, 0.02, refresh_every=3, scale="formula"),
    "KFAC exact": lambda m: lw.optim.KFAC(m, 0.02, refresh_every=3, **EXACT, scale="formula"),
    "KFAC sampled": lambda m: lw.optim.KFAC(m, 0.02, refresh_every=3, likelihood="categorical", scale="formula"),
    "KFAC conv": lambda m: lw.optim.KFAC(m, 0.02, refresh_every=2, scale="formula"),
    "KFAC conv SUA": lambda m: lw.optim.KFAC(m, 0.02, refresh_every=2, sua=True, scale="formula"),
    # A basis of every step: an old one of the head's singular Q (17 inputs, 12 examples) is not unique.
    "EKFAC conv SUA": lambda m: lw.optim.EKFAC(m, 0.005, refresh_every=1, sua=True, scale="formula"),
    "EKFAC batch": lambda m: lw.optim.EKFAC(m, 0.005, refresh_every=3, scale="formula"),
    "EKFAC batch exact": lambda m: lw.optim.EKFAC(m, 0.005, refresh_every=3, **EXACT, scale="formula"),
    "EKFAC running": lambda m: lw.optim.EKFAC(m, 0.005, refresh_every=3, scaling="running", scale="formula"),
    "EKFAC running exact": lambda m: lw.optim.EKFAC(
        m, 0.005, refresh_every=3, scaling="running", **EXACT, scale="formula"
    ),
    "FOOF": lambda m: lw.optim.FOOF(m, 0.02, refresh_every=3, scale="formula"),
    "NGD": lambda m: lw.optim.NGD(m, 0.05, method="cg", tol=1e-10, max_iterations=200),
    "NGD exact": lambda m: lw.optim.NGD(m, 0.05, method="cg", tol=1e-10, max_iterations=200, **EXACT),
    "Shampoo": lambda m: lw.optim.Shampoo(m, 0.01, refresh_every=3, scale="formula"),
    "SOAP": lambda m: lw.optim.SOAP(m, 0.01, refresh_every=3, scale="formula"),
    "Muon": lambda m: lw.optim.Muon(m, 0.01, orthogonalize="polar", scale="formula"),
    "Adam": lambda m: lw.optim.Adam(m, 0.01),
    "KFAC padded": lambda m: lw.optim.KFAC(m, 0.01, refresh_every=2),
    "KFAC padded, one rank whole": lambda m: lw.optim.KFAC(m, 0.01, refresh_every=2),
    "EKFAC padded": lambda m: lw.optim.EKFAC(m, 0.01, refresh_every=2),
}
"""Padded: some labels of the second process count for nothing, so that its loss is divided by another number; or none
does at the first step, where the likelihood is recognised."""


def data_of(name: str):
    return batches(5, 2, 4, 4) if "conv" in name else batches(5, 5)


def model_of(name: str) -> nn.Module:
    return convnet() if "conv" in name else mlp()


def padded_cross_entropy(f: torch.Tensor, y: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return (nn.functional.cross_entropy(f, y, reduction="none") * counts).sum() / counts.sum().clamp_min(1)


def train(name: str, cut: slice | None, wrapped: bool) -> torch.Tensor:
    """Parameters after some steps, on the whole of each batch or a part of it; padded ones with the factors."""
    model = model_of(name)
    opt = RUNS[name](model)
    call = DistributedDataParallel(model) if wrapped else model
    for step, (x, y) in enumerate(data_of(name)):
        opt.zero_grad()
        part = slice(None) if cut is None else cut
        if "padded" in name:
            counts = torch.ones(len(x))
            counts[6 if "whole" in name and step == 0 else 8 :] = 0
            padded_cross_entropy(call(x[part]), y[part], counts[part]).backward()
        else:
            cross_entropy(call(x[part]), y[part]).backward()
        opt.step()
    if "padded" not in name:
        return flat(model)
    factors = [stack.state["P"].dense().flatten() for stack in opt._stacks if "P" in stack.state]
    return torch.cat([flat(model), *factors])


def work(rank: int, folder: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = {}
    for name in names:
        try:
            found[name] = train(name, slice(6 * rank, 6 * rank + 6), True)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
            break  # the processes are no longer in step
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (sys.argv[1], sys.argv[2:]), nprocs=2)
