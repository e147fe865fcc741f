"""`Sharding`: what a step of sharded parameters sends, and the stand-ins that the executor works on.

An executor knows stacks of whole parameters. For layers that this rank owns it gets *stand-ins*: parameters of zeros
with the gathered gradient, so that what a step leaves in them is the update, which goes back to the ranks that hold the
weights. For parameters that every rank treats for itself the stand-in is the shard.

A step has these collectives, whatever the number of layers; each is one message to every other rank at most:

    census       all-reduce: which parameters have a gradient, whether all are finite, which layers were seen, how
                 often, and the norms of weights, where updates have AdamW's size
    statistics   all-to-all: sums A and G to their owners, at steps that take statistics
    gradients    all-to-all: shards of gradients to their owners
    bases        all-to-all, twice: EKFAC with ``scaling="batch"`` sends bases to all ranks, which send squares back
    updates      all-to-all: updates to the ranks that hold the weights
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerwise.distributed.exchange import Exchange, Piece, Traffic, named_failure, summed
from layerwise.distributed.layout import Layout, layout_of
from layerwise.distributed.processes import Processes
from layerwise.foundations.errors import LayerwiseError, UnsupportedError, describe
from layerwise.foundations.sharded import is_sharded, local
from layerwise.foundations.types import statistics_dtype
from layerwise.layers.form import Form, Part
from layerwise.layers.table import LayerSpec
from layerwise.optim.options import rate
from layerwise.optim.sharding.plan import Blocks, Bucket, Plan, packed_size
from layerwise.optim.statistics.accumulate import Accumulator, Sums
from layerwise.optim.step.stack import Stack
from layerwise.optim.step.update import USUAL_GRADIENT

Placed = tuple[tuple[LayerSpec, ...], dict[str, nn.Parameter], dict[str, Any]]
"""Layers of a stack, the stand-ins of their parameters, and their parameter group."""


@dataclass
class Census:
    """What all ranks together know of a step before it begins."""

    active: dict[str, bool]
    """Parameters that have a gradient on some rank."""
    all_finite: bool
    seen: dict[str, tuple[int, int]]
    """Of layers that were seen on some rank: rows of A, and examples."""
    squares: dict[str, Tensor]
    """Of the weights of each matrix of a layer, summed."""
    counted: tuple[int, int] = (0, 0)
    """Examples and tokens of the step."""


class Sharding:
    """Of one optimizer whose parameters are sharded."""

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        buckets: Sequence[Bucket],
        group_of: Mapping[int, dict[str, Any]],
        processes: Processes,
        every: int,
        accumulator: Accumulator,
        specs: Sequence[LayerSpec],
        blocks: Mapping[str, Blocks] | None = None,
    ) -> None:
        self.blocks = blocks or {}
        """Of layers with block-diagonal factors (`tensor_parallel="blocks"`)."""
        self.params, self.processes, self.rank = dict(params), processes, processes.rank
        self.accumulator = accumulator
        self.device = local(next(iter(params.values()))).device
        self.traffic = Traffic()
        self.group_of = {name: group_of[id(p)] for name, p in params.items()}
        ranks = global_ranks(processes)
        self.mesh: Any = largest_mesh(params)
        layouts = {name: layout_of(name, p, ranks, self.mesh) for name, p in params.items()}
        self._check_shards(layouts)
        treated = [spec for spec in specs if set(spec.parameters) <= set(params) and accumulator.moments(spec)]
        shapes = {spec.name: accumulator.moment_shapes(spec) for spec in treated}
        self.plan = Plan.make(buckets, layouts, len(ranks), every, shapes, params)
        self.layouts = layouts
        self.shapes = shapes
        self.specs = {spec.name: spec for bucket in buckets for spec in bucket.specs}
        self.bucket_of = {spec.name: bucket for bucket in buckets for spec in bucket.specs}
        self.fallback_of = {
            name: bucket.fallback for bucket in buckets for spec in bucket.specs for name in spec.parameters
        }
        self.companions = _companions(self.specs.values())
        self.observed = [name for name in shapes if name in self.plan.owner_of_layer]
        self.sized = [duty.layer for duty in self.plan.duties if self.bucket_of[duty.layer].sized]
        self.statistics_dtype = max(
            (statistics_dtype(p.dtype) for p in params.values()), key=lambda dtype: dtype.itemsize
        )
        self.whole: dict[str, nn.Parameter] = {
            name: _empty(params[name]) for name, owner in self.plan.owner_of.items() if owner == self.rank
        }
        self.shards: dict[str, nn.Parameter] = {name: _empty(params[name]) for name in self.plan.local}
        for name in self.shards:
            self.shards[name].data = local(params[name]).detach()
        self._placed = set[str]()
        self._groups_of_entries: dict[str, Tensor] = {}
        self.census = Census({}, True, {}, {})
        self._grads: dict[str, Tensor | None] = {}
        """This rank's part of each gradient, from the beginning of a step to its end."""
        self._compare_plans()

    def _check_shards(self, layouts: Mapping[str, Layout]) -> None:
        for name, p in self.params.items():
            here, planned = tuple(local(p).shape), layouts[name].shape_at(self.rank)
            if here != planned:
                raise UnsupportedError(
                    describe(
                        f"parameter {name!r} with a shard of shape {here}",
                        f"{planned}, as torch.chunk cuts {tuple(p.shape)} over the mesh",
                        "shard the model by fully_shard with its default placements",
                    )
                )

    def _compare_plans(self) -> None:
        """All ranks must have made the same plan: one that has not would wait for messages that never come."""
        if self.processes.count == 1:
            return
        own = torch.tensor([self.plan.digest()], dtype=torch.int64, device=self.device)
        found = [torch.empty_like(own) for _ in range(self.processes.count)]
        with named_failure("comparison of plans"):
            dist.all_gather(found, own, group=self.processes.group)
        self.traffic.count("plan", 0)
        digests = [int(t) for t in found]
        if len({*digests}) == 1:
            return
        lines: list[Any] = [None] * self.processes.count
        dist.all_gather_object(lines, self.plan.lines(), group=self.processes.group)
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        differing = sorted({*lines[0]} ^ {*lines[other]})
        raise LayerwiseError(
            describe(
                f"plans that differ between ranks 0 and {other}: {'; '.join(differing[:3])[:400]}",
                "the same model, options and parameter groups on every rank",
                "build the model and the optimizer alike everywhere; batches of the first step must be of one kind",
            )
        )

    # --- stacks ------------------------------------------------------------------------------------------

    def place(self, bucket: Bucket) -> Iterator[Placed]:
        """The stacks that this rank has of a bucket: of layers it owns, and of its shards of the others."""
        owner = self.plan.owner_of_layer
        owned = tuple(spec for spec in bucket.specs if owner.get(spec.name) == self.rank)
        if owned:
            yield owned, {name: self.whole[name] for spec in owned for name in spec.parameters}, bucket.group
        alike: dict[Hashable, list[str]] = {}
        for name in dict.fromkeys(name for spec in bucket.specs for name in spec.parameters):
            if name in self.shards and name not in self._placed:
                self._placed.add(name)
                shape = tuple(self.shards[name].shape)
                if math.prod(shape):
                    alike.setdefault((id(self.group_of[name]), shape), []).append(name)
        for names in alike.values():
            specs = tuple(_shard_spec(name, tuple(self.shards[name].shape)) for name in names)
            yield specs, {name: self.shards[name] for name in names}, self.group_of[names[0]]

    def share(self, stack: Stack) -> float:
        """What part of a stack's sums this rank contributes to those of all ranks: copies count once."""
        name = stack.specs[0].parameters[0]
        return 1 / self.layouts[name].copies if name in self.shards else 1.0

    # --- before a step -----------------------------------------------------------------------------------

    @torch.no_grad()
    def take_census(self, own: Mapping[str, Sums], counted: tuple[int, int] = (0, 0)) -> dict[str, Sums]:
        """Begin a step; returns this rank's sums of every layer that some rank has seen. `counted` are its examples and
        tokens."""
        for sums in own.values():
            sums.settle()
        grads = self._grads = {name: placed_gradient(p) for name, p in self.params.items()}
        flags = [float(g is not None) for g in grads.values()]
        for layer in self.observed:
            sums = own.get(layer)
            flags += [0.0, 0.0, 0.0] if sums is None else [1.0, float(sums.rows), float(sums.examples)]
        sums_of_grads = [g.sum(dtype=torch.float64) for g in grads.values() if g is not None]
        total = torch.stack(sums_of_grads).sum() if sums_of_grads else torch.zeros((), device=self.device)
        broken = 0.0
        if not math.isfinite(float(total)):
            broken = float(any(not bool(torch.isfinite(g).all()) for g in grads.values() if g is not None))
        squares = [self._own_squares(self.specs[layer]) for layer in self.sized]
        host = torch.tensor([broken, *counted, *flags], dtype=torch.float64, device=self.device)
        message = torch.cat([host, *squares])
        self._all_reduce(message, "census")
        first, n = message.tolist() if not squares else message[: len(host)].tolist(), len(grads)
        active = dict(zip(grads, (flag > 0 for flag in first[3 : n + 3]), strict=True))
        counts = [first[i : i + 3] for i in range(n + 3, len(host), 3)]
        seen = {k: (int(rows), int(n)) for k, (came, rows, n) in zip(self.observed, counts, strict=True) if came > 0}
        lengths = [self.specs[layer].form.groups for layer in self.sized]
        found = dict(zip(self.sized, message[len(host) :].split(lengths), strict=True)) if squares else {}
        self.census = Census(active, first[0] == 0, seen, found, (int(first[1]), int(first[2])))
        return {layer: own.get(layer, Sums()) for layer in seen}

    def _own_squares(self, spec: LayerSpec) -> Tensor:
        """Squares of this rank's part of a layer's weights, summed for each of its matrices."""
        K, found = spec.form.groups, torch.zeros(spec.form.groups, dtype=torch.float64, device=self.device)
        for part in spec.form.parts:
            layout = self.layouts[part.name]
            if layout.replica[self.rank] or not layout.counts[self.rank]:
                continue
            W = local(self.params[part.name]).detach()
            if part.rows is not None:
                (start, stop), (first, last) = layout.boxes[self.rank][0], part.rows
                low, high = max(start, first), min(stop, last)
                W = W[low - start : max(high, low) - start]
            if K == 1:
                found += torch.linalg.vector_norm(W, dtype=self.statistics_dtype).double().square()
            elif W.numel():
                found.index_add_(0, self._group_of_entries(spec, part), W.double().square().flatten())
        return found

    def _group_of_entries(self, spec: LayerSpec, part: Part) -> Tensor:
        """Which matrix of its layer each entry of this rank's part belongs to."""
        key = f"{spec.name}/{part.name}"
        if key not in self._groups_of_entries:
            form = spec.form
            numbers = torch.arange(form.groups, dtype=torch.int32).view(-1, 1, 1).expand(form.shape)
            of_part = next(t for own, t in form.split(numbers) if own == part)
            layout = self.layouts[part.name]
            if part.rows is not None:
                whole = torch.zeros(part.shape, dtype=torch.int32)
                whole[slice(*part.rows)] = of_part
                cut = layout.part(whole, self.rank)
                (start, stop), (first, last) = layout.boxes[self.rank][0], part.rows
                low, high = max(start, first), min(stop, last)
                cut = cut[low - start : max(high, low) - start]
            else:
                cut = layout.part(of_part.reshape(part.shape), self.rank)
            self._groups_of_entries[key] = cut.flatten().to(self.device)
        return self._groups_of_entries[key]

    def unit(self) -> float | None:
        """The root mean square of all gradients over `USUAL_GRADIENT`, as `unit_of` has it."""
        squares = torch.zeros(2, dtype=torch.float64, device=self.device)
        for name, grad in self._grads.items():
            if self.census.active[name]:
                layout = self.layouts[name]
                if grad is not None and not layout.replica[self.rank]:
                    squares[0] += torch.linalg.vector_norm(grad, dtype=torch.float64) ** 2
                if self.rank == 0:
                    squares[1] += math.prod(layout.shape)
        self._all_reduce(squares, "gradient scale")
        total, count = squares.tolist()
        unit = math.sqrt(total / max(count, 1)) / USUAL_GRADIENT
        return unit if 0 < unit < math.inf else None

    def send_statistics(self, seen: Mapping[str, Sums]) -> dict[str, Sums]:
        """Sums over all ranks of the layers that this rank owns; those of other layers keep their examples alone."""
        present = [layer for layer in seen if sum(self.plan.moments[layer])]
        owner, ranks = self.plan.owner_of_layer, range(self.processes.count)
        if present:
            entries = {layer: sum(self.plan.moments[layer]) for layer in present}
            sends = [Piece(layer, owner[layer], entries[layer]) for layer in present]
            receives = [Piece(k, rank, entries[k]) for rank in ranks for k in present if owner[k] == self.rank]
            exchange = Exchange("statistics", sends, receives, self.processes, self.traffic)
            came = summed(exchange.run(lambda piece: self._pack(piece.key, seen), self.statistics_dtype, self.device))
        else:
            came = {}
        found: dict[str, Sums] = {}
        for layer, sums in seen.items():
            rows, examples = self.census.seen[layer]
            total = Sums(rows=rows, examples=examples, recorded=sums.recorded)
            if layer in came:
                total.A, total.G = self._unpack(layer, came[layer])
            found[layer] = total
        return found

    def _pack(self, layer: Any, seen: Mapping[str, Sums]) -> Tensor:
        packed = []
        for shape, t in zip(self.shapes[layer], (seen[layer].A, seen[layer].G), strict=True):
            if shape is not None:
                zeros = torch.zeros(packed_size(shape), dtype=self.statistics_dtype, device=self.device)
                packed.append(zeros if t is None else _triangle(t).to(self.statistics_dtype))
        return torch.cat(packed)

    def _unpack(self, layer: str, flat: Tensor) -> tuple[Tensor | None, Tensor | None]:
        A, G = self.shapes[layer]
        found = list[Tensor | None]()
        parts = flat.split([packed_size(A), packed_size(G)])
        for shape, part, blocks in zip((A, G), parts, self.blocks.get(layer, (None, None)), strict=True):
            moment = None if shape is None else _square(part, shape)
            found.append(moment if moment is None or blocks is None else _block_diagonal(moment, blocks))
        return found[0], found[1]

    # --- gradients and updates ---------------------------------------------------------------------------

    def is_active(self, name: str) -> bool:
        """Whether a parameter's layer has a gradient somewhere; its other parameters then have one of zeros."""
        return any(self.census.active[other] for other in self.companions[name])

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Give the stand-ins their gradients."""
        for name, shard in self.shards.items():
            shard.data, grad = local(self.params[name]).detach(), self._grads[name]  # FSDP may have put it elsewhere
            if self.is_active(name):
                shard.grad = torch.zeros_like(shard) if grad is None else grad.to(shard.dtype)
            else:
                shard.grad = None
        for dtype in self._dtypes():
            names = [name for name in self.plan.owner_of if self.params[name].dtype == dtype]
            sends, receives = self._gradient_pieces(names)
            exchange = Exchange("gradients", sends, receives, self.processes, self.traffic)
            whole = {name: torch.zeros(p.shape, dtype=dtype, device=self.device) for name, p in self._owned(names)}
            for piece, flat in exchange.run(self._own_gradient, dtype, self.device):
                self._fill(whole, piece, flat)
            for name, grad in whole.items():
                self.whole[name].data = torch.zeros_like(grad)
                self.whole[name].grad = grad if self.census.active[name] else None

    def _gradient_pieces(self, names: Sequence[str]) -> tuple[list[Piece], list[Piece]]:
        """Every rank sends its shard to the owner, if that holds the same copy."""
        owner, rank = self.plan.owner_of, self.rank
        sends, receives = list[Piece](), list[Piece]()
        for name in names:
            layout = self.layouts[name]
            if rank in (peers := layout.peers(owner[name])):
                sends.append(Piece(name, owner[name], layout.counts[rank]))
            if owner[name] == rank:
                receives += [Piece(name, r, layout.counts[r]) for r in peers]
        return sends, receives

    def _own_gradient(self, piece: Piece) -> Tensor:
        grad, dtype = self._grads[piece.key], self.params[piece.key].dtype
        return torch.zeros(piece.count, dtype=dtype, device=self.device) if grad is None else grad

    def _fill(self, whole: Mapping[str, Tensor], piece: Piece, flat: Tensor) -> None:
        layout = self.layouts[piece.key]
        layout.part(whole[piece.key], piece.rank).copy_(flat.view(layout.shape_at(piece.rank)))

    def _owned(self, names: Sequence[str]) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, self.params[name]) for name in names if self.plan.owner_of[name] == self.rank)

    def _dtypes(self) -> list[torch.dtype]:
        """Of parameters with an owner; an exchange is of one type."""
        return list(dict.fromkeys(self.params[name].dtype for name in self.plan.owner_of))

    @torch.no_grad()
    def send_updates(self) -> None:
        """Take what the step has left in the stand-ins to the shards: ``W ← (1 − η·decay) W + update``."""
        for dtype in self._dtypes():
            names = [name for name in self.plan.owner_of if self.params[name].dtype == dtype]
            sends, receives = list[Piece](), list[Piece]()
            for name in names:
                layout, owner = self.layouts[name], self.plan.owner_of[name]
                if owner == self.rank:
                    sends += [Piece(name, r, count) for r, count in enumerate(layout.counts) if count]
                if layout.counts[self.rank]:
                    receives.append(Piece(name, owner, layout.counts[self.rank]))
            exchange = Exchange("updates", sends, receives, self.processes, self.traffic)
            part = lambda piece: self.layouts[piece.key].part(self.whole[piece.key].data, piece.rank)  # noqa: E731
            for piece, flat in exchange.run(part, dtype, self.device):
                self._apply(piece.key, flat)
        for stand_in in self.whole.values():
            stand_in.grad = None
            stand_in.data = stand_in.data.new_empty(0)
        for shard in self.shards.values():
            shard.grad = None
        self._grads = {}

    def _apply(self, name: str, update: Tensor) -> None:
        if not self.is_active(name):
            return
        shard, group = local(self.params[name]).detach(), self.group_of[name]
        decay = group["weight_decay"]
        if decay:
            shard.mul_(1 - rate(group, self.fallback_of[name]) * decay)
        shard.add_(update.view(shard.shape))

    def norms(self, stack: Stack) -> Tensor | None:
        """Of the weights of each matrix of a stack, where they are asked for."""
        squares = [self.census.squares.get(spec.name) for spec in stack.specs]
        found = [s for s in squares if s is not None]
        return torch.cat(found).sqrt().to(stack.shape.dtype) if len(found) == len(squares) else None

    # --- for rules that look at all layers, or at examples -----------------------------------------------

    @torch.no_grad()
    def gather_gradients(self, stacks: Sequence[Stack]) -> dict[str, Tensor]:
        """Whole gradients ``[K, O, I]`` of all layers with an owner, on every rank; `stacks` hold those of this one."""
        here = {spec.name: stack.gradient()[0][groups] for stack in stacks for spec, groups in stack.layers}
        mine = [duty.layer for duty in self.plan.duties if duty.owner == self.rank]
        counts = {duty.layer: math.prod(duty.shape) for duty in self.plan.duties}
        sends = [Piece(k, rank, counts[k]) for rank in range(self.processes.count) for k in mine]
        receives = [Piece(duty.layer, duty.owner, counts[duty.layer]) for duty in self.plan.duties]
        exchange = Exchange("whole gradients", sends, receives, self.processes, self.traffic)
        came = exchange.run(lambda piece: here[piece.key], self.statistics_dtype, self.device)
        return {piece.key: flat.view(self.specs[piece.key].form.shape) for piece, flat in came}

    @torch.no_grad()
    def share_examples(
        self,
        bases: Mapping[str, Sequence[Tensor | None]],
        shapes: Mapping[str, Sequence[tuple[int, ...] | None]],
        squares: Callable[[str, list[Tensor | None]], Tensor | None],
    ) -> dict[str, Tensor]:
        """Squares of all other ranks' examples in the bases of this rank's layers.

        `bases` of the layers that this rank owns go to all ranks, which know their `shapes`; each computes the
        ``squares(layer, basis)`` of its own examples and sends them back.
        """
        owner, ranks = self.plan.owner_of_layer, range(self.processes.count)
        layers = [layer for layer in shapes if layer in self.census.seen]
        sizes = {k: sum(math.prod(shape) for shape in shapes[k] if shape is not None) for k in layers}
        mine = [layer for layer in layers if owner[layer] == self.rank]
        others = [layer for layer in layers if owner[layer] != self.rank]
        sends = [Piece(k, rank, sizes[k]) for rank in ranks if rank != self.rank for k in mine]
        receives = [Piece(k, owner[k], sizes[k]) for k in others]
        flat = {k: torch.cat([t.reshape(-1) for t in bases[k] if t is not None]) for k in mine}
        exchange = Exchange("bases", sends, receives, self.processes, self.traffic)
        totals: dict[str, Tensor] = {}
        for piece, came in exchange.run(lambda piece: flat[piece.key], self.statistics_dtype, self.device):
            layer, pieces = piece.key, list[Tensor | None]()
            for shape in shapes[layer]:
                size = 0 if shape is None else math.prod(shape)
                pieces.append(None if shape is None else came[:size].view(shape))
                came = came[size:]
            total = squares(layer, pieces)
            zeros = torch.zeros(self.specs[layer].form.shape, dtype=self.statistics_dtype, device=self.device)
            totals[layer] = zeros if total is None else total
        counts = {k: math.prod(self.specs[k].form.shape) for k in layers}
        back = [Piece(k, owner[k], counts[k]) for k in others]
        receives = [Piece(k, rank, counts[k]) for rank in ranks if rank != self.rank for k in mine]
        exchange = Exchange("squares of examples", back, receives, self.processes, self.traffic)
        found = summed(exchange.run(lambda piece: totals[piece.key], self.statistics_dtype, self.device))
        return {k: t.view(self.specs[k].form.shape) for k, t in found.items()}

    # --- sums of a few numbers ---------------------------------------------------------------------------

    def add_up(self, value: float) -> float:
        """Of all ranks."""
        if self.processes.count == 1:
            return value
        total = torch.tensor([value], dtype=torch.float64, device=self.device)
        self._all_reduce(total, "sum of a number")
        return float(total)

    def _all_reduce(self, message: Tensor, phase: str) -> None:
        if self.processes.count > 1:
            with named_failure(phase):
                dist.all_reduce(message, group=self.processes.group)
            self.traffic.count(phase, message.numel() * message.element_size())


def sharding_group(params: Mapping[str, Tensor]) -> "dist.ProcessGroup | None":
    """The ranks over which parameters are sharded; None for all that there are."""
    mesh = largest_mesh(params)
    ranks = sorted(mesh.mesh.flatten().tolist())
    if ranks == list(range(dist.get_world_size())):
        return None
    group: Any = mesh.get_group() if mesh.ndim == 1 else dist.new_group(ranks, use_local_synchronization=True)
    return group


def largest_mesh(params: Mapping[str, Tensor]) -> Any:
    """Of those that parameters are on: of two axes under tensor parallelism, where a norm's are on one."""
    meshes: list[Any] = [p.device_mesh for p in params.values() if is_sharded(p)]  # type: ignore[attr-defined]
    return max(meshes, key=lambda m: m.mesh.numel())


def global_ranks(processes: Processes) -> list[int]:
    """Numbers of the group's ranks among all."""
    if processes.group is None:
        return list(range(processes.count))
    return dist.get_process_group_ranks(processes.group)


def placed_gradient(p: nn.Parameter) -> Tensor | None:
    """This rank's part of a gradient, cut as the parameter is.

    A collective where autograd has left it otherwise: tensor parallelism has the whole gradient of a layer with fewer
    outputs than ranks on all of them.
    """
    grad: Any = p.grad
    if grad is not None and is_sharded(grad):
        held: Any = p
        if tuple(grad.placements) != tuple(held.placements):
            grad = grad.redistribute(held.device_mesh, held.placements)
    return None if grad is None else local(grad)


def _empty(p: nn.Parameter) -> nn.Parameter:
    here = local(p)
    return nn.Parameter(torch.empty(0, dtype=here.dtype, device=here.device), requires_grad=True)


def _shard_spec(name: str, shape: tuple[int, ...]) -> LayerSpec:
    """A shard as one matrix of its own, for a rule that does not mind."""
    rows = shape[0] if shape else 1
    form = Form(1, rows, math.prod(shape[1:]), Part(name, shape), None, kronecker=False)
    return LayerSpec(name, form, "Parameter")


def _companions(specs: Any) -> dict[str, tuple[str, ...]]:
    """For each parameter all that are in a layer with it."""
    found: dict[str, dict[str, None]] = {}
    for spec in specs:
        for name in spec.parameters:
            found.setdefault(name, {}).update(dict.fromkeys(spec.parameters))
    return {name: tuple(others) for name, others in found.items()}


# --- symmetric matrices are sent by their triangle ---------------------------------------------------------


def _block_diagonal(M: Tensor, blocks: Sequence[tuple[int, int]]) -> Tensor:
    """``[K, d, d]`` with zeros beside its diagonal blocks."""
    found = torch.zeros_like(M)
    for start, stop in blocks:
        found[:, start:stop, start:stop] = M[:, start:stop, start:stop]
    return found


def _triangle(M: Tensor) -> Tensor:
    """``[K, d, d]`` → the upper triangles, flat; a diagonal ``[K, d]`` as it is."""
    if M.ndim == 2:
        return M.reshape(-1)
    rows, columns = torch.triu_indices(M.shape[-1], M.shape[-1], device=M.device)
    return M[:, rows, columns].reshape(-1)


def _square(flat: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse."""
    if len(shape) == 2:
        return flat.view(shape)
    rows, columns = torch.triu_indices(shape[-1], shape[-1], device=flat.device)
    found = flat.new_empty(shape)
    found[:, rows, columns] = flat.view(shape[0], -1)
    found[:, columns, rows] = flat.view(shape[0], -1)
    return found
