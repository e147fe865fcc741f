"""Run by `test_sharded`: trains small models by FSDP2 in several gloo processes; and in one, on the joined batch."""

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "optim"))
from optim_tools import batches, convnet, cross_entropy, mlp

import layerwise as lw

STEPS = 20
EXACT = {"likelihood": "categorical", "estimator": "exact"}


class Block(nn.Module):
    """Attention with packed projections, and two linear layers."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = (nn.Linear(width, n * width, bias=False) for n in (3, 1))  # a key's bias has no gradient
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, c)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    """Of two blocks, its table of embeddings tied to the output."""

    def __init__(self, width: int = 6, vocabulary: int = 11, remember: bool = True) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Parameter(torch.randn(4, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.remember = remember

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x) if self.remember else checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def transformer(**options: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Transformer(**options).double()


def tokens(steps: int, n: int = 12) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(7)
    found = torch.randint(11, (steps, n, 5), generator=draw)
    return [(part[:, :-1], part[:, 1:]) for part in found]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "mlp": (lambda: mlp(5, 7, 7, 5, 3), lambda steps: batches(steps, 5)),
    "cnn": (convnet, lambda steps: batches(steps, 2, 4, 4)),
    "transformer": (transformer, tokens),
    "checkpointed": (lambda: transformer(remember=False), tokens),
}
"""Each with its batches of twelve examples."""

FORMULA = {"scale": "formula", "refresh_every": 3}
MEMBERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda m: lw.optim.SGD(m, 0.05, momentum=0.9),
    "SGD clipped": lambda m: lw.optim.SGD(m, 0.05, clip=("norm", 0.5)),
    "Adam": lambda m: lw.optim.Adam(m, 0.01),
    "Sign": lambda m: lw.optim.Sign(m, 0.003),
    "Sign ideal": lambda m: lw.optim.Sign(m, 0.001, ideal=True),
    "KFAC": lambda m, **told: lw.optim.KFAC(m, 0.02, **FORMULA, **told),
    "KFAC adam": lambda m: lw.optim.KFAC(m, 0.01, refresh_every=3, weight_decay=0.1, estimator="empirical"),
    "KFAC exact": lambda m: lw.optim.KFAC(m, 0.02, **FORMULA, **EXACT),
    "KFAC seldom": lambda m: lw.optim.KFAC(m, 0.02, **FORMULA, factor_every=4),
    "KFAC SUA": lambda m: lw.optim.KFAC(m, 0.02, **FORMULA, sua=True),
    "EKFAC": lambda m, **told: lw.optim.EKFAC(m, 0.005, scale="formula", refresh_every=1, **told),
    "EKFAC adam": lambda m: lw.optim.EKFAC(m, 0.01, refresh_every=1, estimator="empirical"),
    "EKFAC running": lambda m: lw.optim.EKFAC(m, 0.005, scale="formula", refresh_every=1, scaling="running"),
    "FOOF": lambda m: lw.optim.FOOF(m, 0.02, **FORMULA),
    "FOOF adam": lambda m: lw.optim.FOOF(m, 0.01, refresh_every=3),
    "LocoProp": lambda m: lw.optim.LocoProp(m, 0.3),
    "NGD": lambda m: lw.optim.NGD(m, 0.05, method="cg", tol=1e-13, max_iterations=400, momentum=0.5),
    "Shampoo": lambda m: lw.optim.Shampoo(m, 0.01, **FORMULA, graft="adam"),
    "Shampoo adam": lambda m: lw.optim.Shampoo(m, 0.01, refresh_every=3),
    "SOAP": lambda m: lw.optim.SOAP(m, 0.003, refresh_every=3),
    "Muon": lambda m: lw.optim.Muon(m, 0.01, orthogonalize="polar", scale="formula"),
    "Muon adam": lambda m: lw.optim.Muon(m, 0.01, orthogonalize="polar"),
    "MahalanobisSpectral": lambda m: lw.optim.MahalanobisSpectral(m, 0.003, **FORMULA),
    "Layerwise": lambda m: lw.optim.Layerwise(m, "gradient", "inputs", (0.5, 1.0), lr=0.01),
}
BY_FORMULA = ("KFAC", "EKFAC")
"""Members whose steps depend on the loss's scale, of those that are trained on accumulated gradients."""


@dataclass
class Case:
    """One training."""

    member: str
    model: str = "mlp"
    shape: tuple[int, ...] = ()
    """Of the mesh; by default one axis."""
    steps: int = STEPS
    how: dict[str, Any] = field(default_factory=dict)
    """What else is asked for: see `train`."""

    @property
    def name(self) -> str:
        asked = "".join(f" {key}={value}" for key, value in self.how.items())
        steps = "" if self.steps == STEPS else f" {self.steps} steps"
        return f"{self.member} {self.model} {'x'.join(map(str, self.shape)) or '1d'}{steps}{asked}"


def shard(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    """By blocks, as one does; the root has what is left."""
    from torch.distributed.fsdp import fully_shard

    children = model.blocks if isinstance(model, Transformer) else model.children()
    for place, child in enumerate(children):
        if any(True for _ in child.parameters()) and place % 2 == 0:
            fully_shard(child, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def whole(model: nn.Module) -> Tensor:
    """All parameters, flat."""
    pieces = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in pieces])


def loss_of(f: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(f, y)


def train(case: Case, rank: int = 0, world: int = 1, sharded: bool = False, summed_as: int = 1) -> Tensor:
    """Parameters after the steps, on this rank's part of each batch.

    With `summed_as` one process adds up the gradients of so many parts of a batch, in the order of the ranks that would
    have them: what it rounds differently from one sum, they do, too.
    """
    make, data = MODELS[case.model]
    model = make().to(getattr(torch, case.how.get("dtype", "float64")))
    for name in case.how.get("frozen", ()):
        model.get_parameter(name).requires_grad_(False)
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(
            "cpu", case.shape or (world,), mesh_dim_names=("replicate", "shard")[-len(case.shape or (1,)) :]
        )
        model = shard(model, mesh)
    # A formula must be told that losses are divided: else its factors are too small by the square, and steps explode.
    told = {"accumulate": case.how["accumulate"]} if "accumulate" in case.how and case.member in BY_FORMULA else {}
    opt = MEMBERS[case.member](model, **told)
    parts = max(case.how.get("accumulate", 1), summed_as)
    for step, (x, y) in enumerate(data(case.steps)):
        x = x.to(model_dtype(model)) if x.is_floating_point() else x
        opt.zero_grad()
        each = len(x) // (world * parts)
        for part in range(parts):
            if sharded and parts > 1:
                model.set_requires_gradient_sync(part == parts - 1)
            place = slice((part * world + rank) * each, (part * world + rank + 1) * each)
            with torch.autocast("cpu", torch.bfloat16, enabled=case.how.get("autocast", False)):
                f = model(x[place])
            (loss_of(f.to(model_dtype(model)), y[place]) / parts).backward()
        for name in case.how.get("unused", ()):
            if step % 3 == 1:
                model.get_parameter(name).grad = None
        opt.step()
    return whole(model)


def model_dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def work(rank: int, world: int, folder: str, cases: list[Case]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    found: dict[str, Any] = {}
    for case in cases:
        try:
            found[case.name] = train(case, rank, world, True)
        except Exception:
            found[case.name] = traceback.format_exc()
            break  # the processes are no longer in step
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":  # number of processes, and a folder with the cases
    world, folder = int(sys.argv[1]), sys.argv[2]
    os.environ["OMP_NUM_THREADS"] = "1"
    cases = [Case(**fields) for fields in torch.load(f"{folder}/cases.pt", weights_only=True)]
    torch.multiprocessing.spawn(work, (world, folder, cases), nprocs=world)
