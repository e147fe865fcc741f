"""`Plan`: which rank owns which layer, and what is sent in a step.

A rule of matrices needs the whole gradient of a layer. One rank, the layer's owner, gets it from the ranks that hold
the shards, keeps the layer's state, and sends each rank its part of the update:

    gradients    every rank → owner        entries of the parameters, once
    statistics   every rank → owner        triangles of A and G, at steps that take statistics
    updates      owner → every rank        entries of the parameters, once

Rules that treat every entry alone (AdamW, the fallback) need none of this: each rank steps on its own shard.

The plan is a function of the model, the options and the mesh alone. It is made on every rank, compared on all of them
before the first step, and can be made for any number of ranks where there is one (`benchmarks/scaling.py`).
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from typing import Any

import torch
from torch import Tensor

from layerwise.distributed.layout import Layout
from layerwise.foundations.types import statistics_dtype
from layerwise.layers.table import LayerSpec
from layerwise.optim.backend import Factor
from layerwise.optim.reference import Reference
from layerwise.optim.rule import Shape, UpdateRule, kept, tensors
from layerwise.optim.step.update import moment_rows

Blocks = tuple[list[tuple[int, int]] | None, list[tuple[int, int]] | None]
"""First and last entries of the diagonal blocks of A and of G; None: not divided."""


@dataclass(frozen=True)
class Bucket:
    """Layers of one shape, parameter group and rule, in the order of the model: a stack, were they all here."""

    rule: UpdateRule
    group: dict[str, Any]
    specs: tuple[LayerSpec, ...]
    fallback: bool
    dtype: torch.dtype
    sized: bool = False
    """Whether updates have AdamW's size, for which there are two more moments, perhaps of some rows."""
    momentum: bool = False
    """Whether there is a momentum of the direction."""


@dataclass(frozen=True)
class Duty:
    """One layer's owner, and what owning it means."""

    layer: str
    owner: int
    parameters: tuple[str, ...]
    shape: tuple[int, int, int]
    """K, O, I."""
    rule: str
    slot: int
    """When its decomposition is renewed (`refresh_schedule.Turn`)."""
    state: int
    """Entries that are kept for it."""
    work: float
    """Multiplications of a step, decompositions included."""


@dataclass(frozen=True)
class Plan:
    """For all ranks alike."""

    ranks: int
    layouts: Mapping[str, Layout]
    """Of every parameter."""
    duties: tuple[Duty, ...]
    """Of every layer that has an owner, in the order of the model."""
    local: tuple[str, ...]
    """Parameters that each rank treats for itself, on its own shard."""
    moments: Mapping[str, tuple[int, int]]
    """Entries that are sent of A and of G of each layer, at steps with statistics."""
    sizes: Mapping[str, int]
    """Bytes of an entry of each parameter."""
    matrices: int = 0
    """Whose weights have a norm that is asked for: those with updates of AdamW's size."""
    bases: Mapping[str, int] = field(default_factory=dict)
    """Entries of the basis of each layer that is sent to all ranks, for squares of their examples (EKFAC)."""

    @classmethod
    def make(
        cls,
        buckets: Sequence[Bucket],
        layouts: Mapping[str, Layout],
        ranks: int,
        every: int,
        moments: Mapping[str, tuple[tuple[int, ...] | None, tuple[int, ...] | None]],
        params: Mapping[str, Tensor],
    ) -> "Plan":
        """Owners by cost: the dearest layers first, each to the rank that has least work and state so far.

        Layers that share a parameter (the projections of attention) have one owner. `moments` are the shapes of A and G
        of each layer that has statistics.
        """
        local = _local_parameters(buckets)
        entries = list[tuple[LayerSpec, Bucket, int]]()
        before = 0
        for bucket in buckets:
            if not all(name in local for spec in bucket.specs for name in spec.parameters):
                entries += [(spec, bucket, (before + place) % every) for place, spec in enumerate(bucket.specs)]
            before += not bucket.fallback
        entries = [entry for entry in entries if not set(entry[0].parameters) <= local]
        kinds = {_kind(spec, bucket): (spec, bucket) for spec, bucket, _ in entries}  # of some hundred layers a few
        cost_of = {kind: _cost(*one) for kind, one in kinds.items()}
        basis_of = {kind: sum(map(math.prod, basis_shapes(*one))) for kind, one in kinds.items()}
        costs = [cost_of[_kind(spec, bucket)] for spec, bucket, _ in entries]
        owner = owners_by_cost(
            [spec.parameters for spec, _, _ in entries], costs, [slot for _, _, slot in entries], ranks
        )
        duties = tuple(
            Duty(spec.name, rank, spec.parameters, spec.form.shape, bucket.rule.name, slot, state, work)
            for (spec, bucket, slot), rank, (work, state) in zip(entries, owner, costs, strict=True)
        )
        names = [name for name in layouts if name in local]
        matrices = sum(spec.form.groups for spec, bucket, _ in entries if bucket.sized)
        bases = {spec.name: basis_of[_kind(spec, bucket)] for spec, bucket, _ in entries}
        bases = {layer: count for layer, count in bases.items() if count}
        sent = {layer: (packed_size(A), packed_size(G)) for layer, (A, G) in moments.items()}
        sizes = {name: p.dtype.itemsize for name, p in params.items()}
        return cls(ranks, dict(layouts), duties, tuple(names), sent, sizes, matrices, bases)

    @cached_property
    def owner_of(self) -> dict[str, int]:
        """Of each parameter that has an owner."""
        return {name: duty.owner for duty in self.duties for name in duty.parameters}

    @cached_property
    def owner_of_layer(self) -> dict[str, int]:
        """Of each layer that has one."""
        return {duty.layer: duty.owner for duty in self.duties}

    def lines(self) -> list[str]:
        """The plan as text, a line for each layer and parameter: what ranks compare."""
        owned = [f"{d.layer} {d.shape} {d.rule} {d.parameters} owner {d.owner} slot {d.slot}" for d in self.duties]
        cut = [f"{name} {layout.shape} {hash_of(str(layout.boxes))}" for name, layout in self.layouts.items()]
        return [f"{self.ranks} ranks", *owned, *cut, f"local {self.local}", f"moments {dict(self.moments)}"]

    def digest(self) -> int:
        """A number that two different plans do not have in common."""
        return hash_of("\n".join(self.lines()))

    # --- what is sent and kept ---------------------------------------------------------------------------

    def state(self, rank: int) -> int:
        """Entries of state that a rank keeps as an owner."""
        return sum(duty.state for duty in self.duties if duty.owner == rank)

    def work(self, rank: int) -> float:
        """Of a rank as an owner."""
        return sum(duty.work for duty in self.duties if duty.owner == rank)

    def gradient_bytes(self, rank: int) -> int:
        """That a rank sends to owners in a step: its shards of what others in its copy own."""
        found = 0
        for name, owner in self.owner_of.items():
            layout = self.layouts[name]
            if owner != rank and layout.replica[owner] == layout.replica[rank]:
                found += layout.counts[rank] * self.sizes[name]
        return found

    def update_bytes(self, rank: int) -> int:
        """That a rank sends as an owner in a step: its layers' updates, to every other rank its part."""
        found = 0
        for name, owner in self.owner_of.items():
            if owner == rank:
                counts = self.layouts[name].counts
                found += (sum(counts) - counts[rank]) * self.sizes[name]
        return found

    def statistics_bytes(self, rank: int, itemsize: int = 4) -> int:
        """That a rank sends to owners at a step that takes statistics of all layers."""
        return sum(sum(self.moments.get(duty.layer, (0, 0))) * itemsize for duty in self.duties if duty.owner != rank)

    def examples_bytes(self, rank: int, itemsize: int = 4) -> int:
        """That a rank sends at such a step where examples are looked at in the owners' bases: its bases to all others,
        and squares to theirs."""
        bases = (self.ranks - 1) * sum(self.bases.get(d.layer, 0) for d in self.duties if d.owner == rank)
        squares = sum(math.prod(d.shape) for d in self.duties if d.owner != rank and d.layer in self.bases)
        return (bases + squares) * itemsize

    def census_bytes(self) -> int:
        """Of the all-reduce that begins a step: three numbers, a flag for every parameter, three counts for every layer
        that has statistics, a norm for every matrix that needs one."""
        observed = sum(duty.layer in self.moments for duty in self.duties)
        return 8 * (3 + len(self.layouts) + 3 * observed + self.matrices)

    def step_bytes(self, rank: int, statistics: bool = True, itemsize: int = 4) -> int:
        """That a rank sends in a step."""
        found = self.gradient_bytes(rank) + self.update_bytes(rank) + self.census_bytes()
        if statistics:
            found += self.statistics_bytes(rank, itemsize) + self.examples_bytes(rank, itemsize)
        return found


def packed_size(shape: tuple[int, ...] | None) -> int:
    """Entries that are sent of K symmetric matrices ``[K, d, d]``, by their triangles, or of K diagonals ``[K, d]``."""
    if shape is None:
        return 0
    return math.prod(shape) if len(shape) == 2 else shape[0] * shape[1] * (shape[1] + 1) // 2


def basis_shapes(spec: LayerSpec, bucket: Bucket) -> list[tuple[int, ...]]:
    """Of what is sent of a layer's basis where its rule looks at examples in it: U_P, U_Q and the bias's block."""
    requires = bucket.rule.requirements()
    if not (requires.examples and requires.moments):
        return []
    basis: Any = bucket.rule.init(meta_shape(spec, torch.float32), Reference())["basis"]
    return [tuple(t.shape) for t in basis.matrices(slice(None)) if t is not None]


def meta_shape(spec: LayerSpec, dtype: torch.dtype) -> Shape:
    """A stack of one layer, without memory."""
    form = spec.form
    return Shape(*form.shape, dtype, torch.device("meta"), form.one_hot, form.taps, form.bias is not None)


def hash_of(text: str) -> int:
    """Of 63 bits: `torch.int64` holds it."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _local_parameters(buckets: Sequence[Bucket]) -> set[str]:
    """Parameters whose layers are all treated entry by entry."""
    local = {name for bucket in buckets for spec in bucket.specs for name in spec.parameters}
    while True:
        owned = set[str]()
        for bucket in buckets:
            elementwise = bucket.rule.requirements().elementwise
            for spec in bucket.specs:
                names = set(spec.parameters) & local
                if names and (not elementwise or len(names) < len(set(spec.parameters))):
                    owned |= names  # a layer with a part that has an owner has it as a whole
        if not owned:
            return local
        local -= owned


def _kind(spec: LayerSpec, bucket: Bucket) -> tuple[Any, ...]:
    """What a layer's cost and basis depend on."""
    form = spec.form
    return id(bucket), form.shape, form.one_hot, form.taps, form.bias is not None


def _cost(spec: LayerSpec, bucket: Bucket) -> tuple[float, int]:
    """Work and state of a layer, from what its rule keeps for it.

    A factor of size d is decomposed, d³, and multiplies the gradient, O·I·d; a rule without factors multiplies by the
    shorter side, as Newton–Schulz does.
    """
    K, O, I = spec.form.shape
    state = bucket.rule.init(meta_shape(spec, statistics_dtype(bucket.dtype)), Reference())
    sizes = [M.dense().shape[-1] for M in kept(state) if isinstance(M, Factor) and M.dense().ndim == 3]
    work = float(K) * sum(d**3 + O * I * d for d in sizes or [min(O, I)])
    entries = sum(t.numel() for t in tensors(state).values())
    if bucket.sized:
        entries += K * I * sum(moment_rows(O, I, bucket.rule.requirements().keeps_momentum))
    return work, entries + K * O * I * bucket.momentum


def owners_by_cost(
    parameters: Sequence[tuple[str, ...]], costs: Sequence[tuple[float, int]], slots: Sequence[int], ranks: int
) -> list[int]:
    """One rank for each layer. A layer's cost is the larger of its shares in all work and in all state; of equal ones
    those that are refreshed at one step come one after the other, so that several ranks work at it."""
    unit_of: dict[str, int] = {}
    units = list[list[int]]()
    for place, names in enumerate(parameters):
        known = sorted({unit_of[name] for name in names if name in unit_of})
        unit = known[0] if known else len(units)
        if not known:
            units.append([])
        for other in known[1:]:
            units[unit] += units[other]
            unit_of.update({name: unit for name, of in unit_of.items() if of == other})
            units[other] = []
        units[unit].append(place)
        unit_of.update(dict.fromkeys(names, unit))
    units = [sorted(unit) for unit in units if unit]
    total = [max(sum(cost[side] for cost in costs), 1) for side in (0, 1)]
    shares = [tuple(sum(costs[i][side] for i in unit) / total[side] for side in (0, 1)) for unit in units]
    order = sorted(range(len(units)), key=lambda u: (-max(shares[u]), slots[units[u][0]], units[u][0]))
    owner = [0] * len(parameters)
    loaded = {(0.0, 0.0): list(range(ranks))}  # ranks by what they have: of thousands, most have the same
    for u in order:
        work, state = shares[u]
        load = min(loaded, key=lambda own: (max(own[0] + work, own[1] + state), loaded[own][0]))
        rank = heappop(loaded[load])
        if not loaded[load]:
            del loaded[load]
        heappush(loaded.setdefault((load[0] + work, load[1] + state), []), rank)
        for place in units[u]:
            owner[place] = rank
    return owner
