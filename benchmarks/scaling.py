"""What sharded training sends, computes and keeps, rank by rank, from the plan that the optimizer itself makes.

    python benchmarks/scaling.py                          # members, 125 M to 70 B parameters, 8 to 4096 ranks
    python benchmarks/scaling.py --members KFAC Muon --ranks 64 --sizes 7B
    python benchmarks/scaling.py --write docs/scaling.md  # the tables of that page

Models are of fake tensors: nothing is allocated or computed, and no process is started. Every number is of the rank
that has most of it:

- bytes that it sends in a step without statistics: its shards of gradients to owners, updates of what it owns, and the
  few numbers of the census;
- bytes that it sends in a step with statistics, by `factor_every` one in so many;
- bytes of state: what it owns, and AdamW's two moments of its shard of all other parameters;
- work of what it owns, over the mean of all ranks: 1 is a perfect balance, and W/n what n equal matrices for W > n
  ranks must have.

For comparison the same matrices as others deal them out, by the rules that their sources state: dion's stacks of one
shape, padded to the number of ranks; Megatron's whole layers, the dearest first.
"""

import argparse
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import layerwise as lw
from layerwise.optim.sharding.plan import Plan

FLOAT = 4
"""Bytes of an entry of the state."""


@dataclass(frozen=True)
class Size:
    """A decoder of L blocks of width d, with 4 d between."""

    name: str
    blocks: int
    width: int
    vocabulary: int = 50_304


SIZES = (Size("125M", 12, 768), Size("1.3B", 24, 2048), Size("7B", 32, 4096), Size("70B", 80, 8192))
RANKS = (8, 64, 512, 4096)
HEAD = {"overrides": {"head": {"update": "fallback"}}}
"""As one does: the head, like the embeddings, has AdamW's update."""
MEMBERS = {
    "KFAC": lambda m: lw.optim.KFAC(m, **HEAD),
    "EKFAC": lambda m: lw.optim.EKFAC(m, **HEAD),
    "EKFAC running": lambda m: lw.optim.EKFAC(m, scaling="running", **HEAD),
    "FOOF": lambda m: lw.optim.FOOF(m, **HEAD),
    "LocoProp": lambda m: lw.optim.LocoProp(m, **HEAD),
    "MahalanobisSpectral": lambda m: lw.optim.MahalanobisSpectral(m, **HEAD),
    "Shampoo": lambda m: lw.optim.Shampoo(m, **HEAD),
    "SOAP": lambda m: lw.optim.SOAP(m, **HEAD),
    "Muon": lambda m: lw.optim.Muon(m, **HEAD),
    "Adam": lambda m: lw.optim.Adam(m),
}
"""Without NGD, which sends whole gradients to all ranks, and SGD and Sign, which send what Adam does."""


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
class Load:
    """Of one member, model and number of ranks; of the rank that has most."""

    owned: int
    """Matrices that have an owner; the others have AdamW's update, since they have a side longer than `max_factor`."""
    sent: int
    """Bytes of a step without statistics."""
    share: float
    """P/W: bytes of the matrices over the number of ranks. Gradients and updates, each moved once, are 2 − 2/W."""
    observed: int
    """Bytes of a step with statistics."""
    state: float
    """Bytes of state."""
    work: float
    """Over the mean."""


def load(plan: Plan) -> Load:
    of_rank = representatives(plan)
    matrices = sum(math.prod(duty.shape) * FLOAT for duty in plan.duties)
    mean = sum(duty.work for duty in plan.duties) / plan.ranks
    return Load(
        len(plan.duties),
        max(plan.step_bytes(rank, statistics=False) for rank in of_rank),
        matrices / plan.ranks,
        max(map(plan.step_bytes, of_rank)),
        max(FLOAT * (plan.state(rank) + 2 * local_entries(plan, rank)) for rank in of_rank),
        max(map(plan.work, of_rank)) / mean if mean else 1.0,
    )


def representatives(plan: Plan) -> list[int]:
    """Ranks of which every other one has a twin: the same shapes owned, shards of the same sizes."""
    owned, layouts = defaultdict[int, Counter[Any]](Counter), {layout.shape: layout for layout in plan.layouts.values()}
    for duty in plan.duties:
        owned[duty.owner][duty.shape, duty.rule] += 1
    found = dict[Any, int]()
    for rank in range(plan.ranks):
        counts = tuple(layout.counts[rank] for layout in layouts.values())
        found.setdefault((frozenset(owned[rank].items()), counts), rank)
    return list(found.values())


def local_entries(plan: Plan, rank: int) -> int:
    """Of a rank's shards of parameters that have no owner."""
    return sum(plan.layouts[name].counts[rank] for name in plan.local)


# --- the same matrices, as others deal them out ------------------------------------------------------------


@dataclass(frozen=True)
class Dealt:
    """By another rule; of the rank that has most."""

    sent: float
    """Bytes that an optimizer that treats every entry alone would not send, over P/W."""
    work: float
    """Over the mean."""


def shapes_of(size: Size) -> list[tuple[int, int]]:
    """Of the matrices of all blocks."""
    d = size.width
    return [(d, d)] * 4 * size.blocks + [(4 * d, d), (d, 4 * d)] * size.blocks


def work_of(shape: tuple[int, int]) -> float:
    """Of a matrix in Muon's step, as the plan counts it, so that balances can be compared."""
    d = min(shape)
    return float(d**3 + math.prod(shape) * d)


def padded_stacks(shapes: Sequence[tuple[int, int]], ranks: int) -> Dealt:
    """dion, `megabatch_base.py`: matrices of one shape are stacked and padded to a multiple of the ranks; an all-to-all
    makes of shards whole matrices, equally many for each rank, another one takes the updates back."""
    entries = sum(map(math.prod, shapes))
    padded = {shape: -(-count // ranks) for shape, count in Counter(shapes).items()}
    sent = 2 * (ranks - 1) * sum(each * math.prod(shape) / ranks for shape, each in padded.items())
    work = sum(each * work_of(shape) for shape, each in padded.items())
    return Dealt(sent / (entries / ranks), work * ranks / sum(map(work_of, shapes)))


def whole_layers(shapes: Sequence[tuple[int, int]], ranks: int) -> Dealt:
    """Megatron, `layer_wise_optimizer.py`: whole layers for each rank, by max(m, n) min(m, n)², the dearest first. It
    sends what its AdamW does: the reduce-scatter of gradients and the all-gather of parameters."""
    loads, work = [0.0] * ranks, [0.0] * ranks
    for shape in sorted(shapes, key=lambda shape: max(shape) * min(shape) ** 2, reverse=True):
        rank = loads.index(min(loads))
        loads[rank] += max(shape) * min(shape) ** 2
        work[rank] += work_of(shape)
    return Dealt(0.0, max(work) * ranks / sum(work))


# --- tables ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One line of all that was asked for."""

    member: str
    size: Size
    ranks: int
    load: Load


def rows(members: Sequence[str], sizes: Sequence[Size], ranks: Sequence[int]) -> Iterator[Row]:
    for size in sizes:
        with FakeTensorMode():
            model = Decoder(size)
            for member in members:
                opt = MEMBERS[member](model)
                for count in ranks:
                    yield Row(member, size, count, load(opt.plan_for(count)))


def long_table(found: Iterator[Row]) -> Iterator[str]:
    columns = "matrices | sent, GB | sent, P/W | with statistics, GB | state, GB | work / mean"
    yield f"| member | parameters | ranks | {columns} |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in found:
        it = row.load
        numbers = [f"{it.sent / 1e9:.3f}", f"{it.sent / it.share:.2f}" if it.share else "–", f"{it.observed / 1e9:.3f}"]
        numbers += [f"{it.state / 1e9:.3f}", f"{it.work:.2f}"]
        yield f"| {row.member} | {row.size.name} | {row.ranks} | {it.owned} | {' | '.join(numbers)} |"


TABLES = {
    "sent": ("Sent in a step without statistics, GB", lambda it: short(it.sent / 1e9)),
    "observed": ("Sent in a step with statistics, GB", lambda it: short(it.observed / 1e9)),
    "state": ("State, GB", lambda it: short(it.state / 1e9)),
    "work": ("Work over the mean", lambda it: f"{it.work:.2f}"),
}


def short(number: float) -> str:
    """Three digits that count, and none after the third place.

    >>> short(108.83), short(1.2345), short(0.0004)
    ('109', '1.23', '0.000')
    """
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}" if number >= 1 else f"{number:.3f}"


def page(found: Sequence[Row]) -> Iterator[str]:
    """A table for each quantity, a column for each member; then those of others."""
    members = list(dict.fromkeys(row.member for row in found))
    places = list(dict.fromkeys((row.size, row.ranks) for row in found))
    at = {(row.member, row.size, row.ranks): row.load for row in found}
    for title, cell in TABLES.values():
        yield from (
            f"**{title}**",
            "",
            f"| parameters | ranks | {' | '.join(members)} |",
            "|---" * (len(members) + 2) + "|",
        )
        for size, ranks in places:
            yield f"| {size.name} | {ranks} | {' | '.join(cell(at[m, size, ranks]) for m in members)} |"
        yield ""
    yield from ("**Muon as others deal its matrices out**", "")
    yield "| parameters | ranks | sent, P/W: ours | dion | work / mean: ours | dion | Megatron |"
    yield "|---|---|---|---|---|---|---|"
    for size, ranks in places:
        ours, shapes = at["Muon", size, ranks], shapes_of(size)
        dion, megatron = padded_stacks(shapes, ranks), whole_layers(shapes, ranks)
        sent = [f"{ours.sent / ours.share:.2f}", f"{dion.sent:.2f}"]
        work = [f"{one.work:.2f}" for one in (ours, dion, megatron)]
        yield f"| {size.name} | {ranks} | {' | '.join([*sent, *work])} |"


BEGIN, END = "<!-- tables: python benchmarks/scaling.py --write docs/scaling.md -->", "<!-- end of tables -->"


def write(path: Path, lines: Sequence[str]) -> None:
    """Exchange the tables of a page."""
    text = path.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", nargs="+", default=list(MEMBERS), choices=list(MEMBERS))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    parser.add_argument("--sizes", nargs="+", default=[size.name for size in SIZES])
    parser.add_argument("--write", type=Path, help="a page between whose marks the tables go")
    given = parser.parse_args()
    start, sizes = time.perf_counter(), [size for size in SIZES if size.name in given.sizes]
    found = rows(given.members, sizes, given.ranks)
    if given.write is None:
        for line in long_table(found):
            print(line, flush=True)
        return
    write(given.write, list(page(list(found))))
    print(f"{given.write} in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
