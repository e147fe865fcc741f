"""What sharded training sends, computes and keeps, rank by rank, from the plan that the optimizer itself makes.

    python benchmarks/scaling.py                          # all members, 125 M to 70 B parameters, 8 to 4096 ranks
    python benchmarks/scaling.py --members KFAC Muon --ranks 64

Models are of fake tensors: nothing is allocated or computed, and no process is started. For each size the table has,
of the busiest rank: bytes sent in a step without statistics (in units of P/W, its share of the matrices' bytes, of
which a plain all-to-all of gradients there and updates back takes 2), bytes sent at a step with statistics, state in
entries (in units of 1/W of all that one process would keep), and work against the mean of all ranks.
"""

import argparse
import itertools
from dataclasses import dataclass

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import layerwise as lw


@dataclass(frozen=True)
class Size:
    """A decoder of L blocks of width d, with 4 d between."""

    name: str
    blocks: int
    width: int
    vocabulary: int = 50_304


SIZES = (Size("125M", 12, 768), Size("1.3B", 24, 2048), Size("7B", 32, 4096), Size("70B", 80, 8192))
HEAD = {"overrides": {"head": {"update": "fallback"}}}
"""As one does: the head, like the embeddings, has AdamW's update."""
MEMBERS = {
    "KFAC": lambda m: lw.optim.KFAC(m, **HEAD),
    "EKFAC": lambda m: lw.optim.EKFAC(m, **HEAD),
    "EKFAC running": lambda m: lw.optim.EKFAC(m, scaling="running", **HEAD),
    "FOOF": lambda m: lw.optim.FOOF(m, **HEAD),
    "Shampoo": lambda m: lw.optim.Shampoo(m, **HEAD),
    "SOAP": lambda m: lw.optim.SOAP(m, **HEAD),
    "Muon": lambda m: lw.optim.Muon(m, **HEAD),
    "Adam": lambda m: lw.optim.Adam(m),
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)


class Decoder(nn.Module):
    """Its parameters alone: nothing is run."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.blocks))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError("its tensors have no values")


@dataclass(frozen=True)
class Row:
    """Of one member, model and number of ranks; the busiest rank's."""

    sent: float
    """Bytes of a step without statistics, over P/W, P those of the matrices."""
    statistics: float
    """Bytes of a step with statistics, in GB."""
    state: float
    """Entries, over 1/W of the whole."""
    work: float
    """Over the mean."""


def row(member: str, size: Size, ranks: int) -> Row:
    with FakeTensorMode():
        model = Decoder(size)
        plan = MEMBERS[member](model).plan_for(ranks)
    params = dict(model.named_parameters())
    share = sum(params[name].numel() * params[name].element_size() for name in plan.owner_of) / ranks or 1.0
    some = range(ranks) if plan.duties else range(1)
    shown = [plan.step_bytes(rank, statistics=False) for rank in some]
    total = sum(duty.state for duty in plan.duties)
    work = [plan.work(rank) for rank in some]
    return Row(
        max(shown) / share,
        max(plan.step_bytes(rank) for rank in some) / 1e9,
        max(plan.state(rank) for rank in some) * ranks / max(total, 1),
        max(work) * len(work) / max(sum(work), 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", nargs="+", default=list(MEMBERS), choices=list(MEMBERS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 512, 4096])
    parser.add_argument("--sizes", nargs="+", default=[size.name for size in SIZES])
    given = parser.parse_args()
    print("| member | parameters | ranks | sent, P/W | with statistics, GB | state × W | work / mean |")
    print("|---|---|---|---|---|---|---|")
    sizes = [size for size in SIZES if size.name in given.sizes]
    for member, size, ranks in itertools.product(given.members, sizes, given.ranks):
        r = row(member, size, ranks)
        numbers = f"{r.sent:.2f} | {r.statistics:.2f} | {r.state:.2f} | {r.work:.2f}"
        print(f"| {member} | {size.name} | {ranks} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
