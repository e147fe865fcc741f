"""A sharded optimizer's state in checkpoints: the same names and shapes as in one process, each tensor a `DTensor`.

Every layer's state is on one rank, its owner; that of parameters which ranks treat for themselves, on all. Saved, each
tensor is cut along its longest axis over the ranks, so that all hold their part, none the whole, and
`torch.distributed.checkpoint` writes it from as many ranks as there are and reads it into any other number of them.
Loaded, it goes to the owners that the plan has by then.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from layerwise.distributed.exchange import Exchange, Piece, named_failure
from layerwise.distributed.layout import Layout, MeshAxis, layout_of
from layerwise.foundations.sharded import is_sharded, local
from layerwise.layers.table import LayerSpec
from layerwise.optim.sharding.plan import owners_by_cost
from layerwise.optim.sharding.sharding import Sharding, global_ranks
from layerwise.optim.step.stack import Stack

States = dict[str, dict[str, Tensor]]
"""By layer (or parameter) and name."""
NAMES = "\t"
"""Between the name of a layer and that of its tensor; in neither of them."""


class StateExchange:
    """Moves state between the ranks that use it and a form that does not depend on who they are."""

    def __init__(self, sharding: Sharding) -> None:
        self.sharding, self.rank, self.processes = sharding, sharding.rank, sharding.processes
        self.ranks = global_ranks(sharding.processes)
        shared = [spec for spec in sharding.specs.values() if set(spec.parameters) <= set(sharding.shards)]
        sizes = [spec.form.numel() for spec in shared]
        names = [spec.parameters for spec in shared]
        keepers = owners_by_cost(names, [(float(n), n) for n in sizes], [0] * len(sizes), len(self.ranks))
        self.shared = {spec.name: spec for spec in shared}
        """Layers whose parameters each rank treats for itself."""
        self.keeper = dict(sharding.plan.owner_of_layer) | dict(zip(self.shared, keepers, strict=True))
        """The rank that has a layer's state whole: its owner, or for a moment any."""
        self.keeper_of = {name: self.keeper[spec.name] for spec in shared for name in spec.parameters}
        self.mesh: Any = sharding.mesh

    # --- saving ------------------------------------------------------------------------------------------

    def saved(self, stacks: Sequence[Stack]) -> States:
        """All layers' state on all ranks, each with its part of every tensor. A collective."""
        here: States = {}
        for stack in stacks:
            here.update(stack.saved())
        own = {layer: state for layer, state in here.items() if layer in self.sharding.plan.owner_of_layer}
        own |= self._joined({name: state for name, state in here.items() if name in self.sharding.shards})
        known: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {}
        described = {k: {n: (tuple(t.shape), t.dtype) for n, t in state.items()} for k, state in own.items()}
        for found in self._everybodys(described):
            known |= found
        layouts = {
            f"{layer}{NAMES}{name}": self._cut(shape)
            for layer, state in sorted(known.items())
            for name, (shape, _) in state.items()
        }
        pieces: States = {layer: {} for layer in sorted(known)}
        for dtype in _dtypes(d for state in known.values() for _, d in state.values()):
            keys = [k for k in layouts if _of(known, k)[1] == dtype]
            sends, receives = list[Piece](), list[Piece]()
            for key in keys:
                layout, keeper = layouts[key], self.keeper[key.partition(NAMES)[0]]
                if keeper == self.rank:
                    sends += [Piece(key, r, count) for r, count in enumerate(layout.counts)]
                receives.append(Piece(key, keeper, layout.counts[self.rank]))
            for piece, flat in self._run("saved state", sends, receives, dtype, lambda p: self._part(own, layouts, p)):
                layer, _, name = piece.key.partition(NAMES)
                pieces[layer][name] = self._dtensor(flat, layouts[piece.key])
        return pieces

    def _joined(self, shards: States) -> States:
        """Whole states of layers whose entries are on all ranks, on their keepers."""
        entries = {k: {n: t for n, t in state.items() if t.ndim == 3} for k, state in shards.items()}
        numbers = {k: {n: float(t[0]) for n, t in state.items() if t.ndim == 1} for k, state in shards.items()}
        described = {k: {n: t.dtype for n, t in state.items()} for k, state in entries.items()}
        kinds: dict[str, dict[str, Any]] = {}
        for found, values in self._everybodys((described, numbers)):
            kinds |= found
            numbers = {**values, **numbers}
        whole: States = {}
        for dtype in _dtypes(d for state in kinds.values() for d in state.values()):
            keys = [f"{k}{NAMES}{n}" for k, state in sorted(kinds.items()) for n, d in state.items() if d == dtype]
            sends, receives = list[Piece](), list[Piece]()
            for key in keys:
                name = key.partition(NAMES)[0]
                layout, keeper = self.sharding.layouts[name], self.keeper_of[name]
                peers = layout.peers(keeper)
                sends += [Piece(key, keeper, layout.counts[self.rank])] if self.rank in peers else []
                receives += [Piece(key, r, layout.counts[r]) for r in peers] if keeper == self.rank else []
            for piece, flat in self._run("saved state", sends, receives, dtype, lambda p: _of(entries, p.key)):
                name, _, key = piece.key.partition(NAMES)
                layout = self.sharding.layouts[name]
                into = whole.setdefault(name, {}).setdefault(key, flat.new_zeros(layout.shape))
                layout.part(into, piece.rank).copy_(flat.view(layout.shape_at(piece.rank)))
        found: States = {}
        for layer, spec in self.shared.items():
            if self.keeper[layer] == self.rank and spec.parameters[0] in kinds:
                names = kinds[spec.parameters[0]]
                found[layer] = {n: spec.form.join({k: whole[k][n] for k in spec.parameters}) for n in names}
                for name, value in numbers[spec.parameters[0]].items():
                    how: dict[str, Any] = {"dtype": self.sharding.statistics_dtype, "device": self.sharding.device}
                    found[layer][name] = torch.full((spec.form.groups,), value, **how)
        return found

    def _cut(self, shape: tuple[int, ...]) -> Layout:
        """Along the longest axis, over the last axis of the mesh."""
        axis = max(range(len(shape)), key=lambda i: shape[i])
        sizes = self.mesh.mesh.shape
        by_mesh = Layout.cut(shape, [*(MeshAxis(n) for n in sizes[:-1]), MeshAxis(sizes[-1], axis)])
        places = {rank: place for place, rank in enumerate(self.mesh.mesh.flatten().tolist())}
        order = [places[rank] for rank in self.ranks]
        return Layout(shape, tuple(by_mesh.boxes[i] for i in order), tuple(by_mesh.replica[i] for i in order))

    def _dtensor(self, flat: Tensor, layout: Layout) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        shape = layout.shape
        axis = max(range(len(shape)), key=lambda i: shape[i])
        placements = [*(Replicate() for _ in range(self.mesh.ndim - 1)), Shard(axis)]
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        piece = flat.view(layout.shape_at(self.rank)).clone()
        how: dict[str, Any] = {"run_check": False, "shape": torch.Size(shape), "stride": stride}
        return DTensor.from_local(piece, self.mesh, placements, **how)

    @staticmethod
    def _part(own: States, layouts: Mapping[str, Layout], piece: Piece) -> Tensor:
        return layouts[piece.key].part(_of(own, piece.key), piece.rank)

    # --- loading -----------------------------------------------------------------------------------------

    def loaded(self, given: Mapping[str, Mapping[str, Tensor]]) -> States:
        """What this rank needs of a loaded state: whole, of its layers; its shards, of parameters that all treat.

        A collective where `given` has `DTensor` values. Plain tensors are whole on every rank.
        """
        known = {layer: state for layer, state in given.items() if layer in self.keeper}
        whole = self._kept({layer: known[layer] for layer in sorted(known)})
        found = {layer: state for layer, state in whole.items() if layer not in self.shared}
        cut = {layer for layer, state in known.items() if layer in self.shared and any(map(is_sharded, state.values()))}
        for layer, state in known.items():
            if layer in self.shared and layer not in cut:
                for name, shards in self._split(self.shared[layer], state).items():
                    found.setdefault(name, {}).update(shards)
        for name, state in self._sent_shards({layer: known[layer] for layer in sorted(cut)}, whole).items():
            found.setdefault(name, {}).update(state)
        return found

    def _kept(self, given: Mapping[str, Mapping[str, Tensor]]) -> States:
        """Whole tensors of the layers that this rank keeps."""
        found: States = {layer: {} for layer in given if self.keeper[layer] == self.rank}
        for layer in found:
            found[layer] = {name: t for name, t in given[layer].items() if not is_sharded(t)}
        cut = {f"{k}{NAMES}{n}": t for k, state in given.items() for n, t in state.items() if is_sharded(t)}
        layouts = {key: layout_of(key, t, self.ranks) for key, t in cut.items()}
        for dtype in _dtypes(t.dtype for t in cut.values()):
            sends, receives = list[Piece](), list[Piece]()
            for key in (key for key, t in cut.items() if t.dtype == dtype):
                layout, keeper = layouts[key], self.keeper[key.partition(NAMES)[0]]
                peers = layout.peers(keeper)
                sends += [Piece(key, keeper, layout.counts[self.rank])] if self.rank in peers else []
                receives += [Piece(key, r, layout.counts[r]) for r in peers] if keeper == self.rank else []
            for piece, flat in self._run("loaded state", sends, receives, dtype, lambda p: local(cut[p.key])):
                layer, _, name = piece.key.partition(NAMES)
                layout = layouts[piece.key]
                into = found[layer].setdefault(name, flat.new_zeros(layout.shape))
                layout.part(into, piece.rank).copy_(flat.view(layout.shape_at(piece.rank)))
        return found

    def _split(self, spec: LayerSpec, state: Mapping[str, Tensor]) -> States:
        """This rank's shards of a whole state of a layer, by parameter."""
        found: States = {}
        for key, t in state.items():
            for name, whole in _by_parameter(spec, t).items():
                if t.ndim == 1:
                    found.setdefault(name, {})[key] = t[:1]
                    continue
                layout = self.sharding.layouts[name]
                own = layout.part(whole, self.rank)
                first = found.setdefault(name, {}).get(key)
                own = own if first is None else first.view(own.shape) + own  # rows of another layer's
                found[name][key] = _as_matrix(own)
        return found

    def _sent_shards(self, given: Mapping[str, Mapping[str, Tensor]], whole: States) -> States:
        """Shards of what keepers have whole, on all ranks."""
        found: States = {}
        for dtype in _dtypes(t.dtype for state in given.values() for t in state.values()):
            sends, receives = list[Piece](), list[Piece]()
            pieces: dict[str, Tensor] = {}
            kinds: dict[str, int] = {}
            for layer, state in given.items():
                spec, keeper = self.shared[layer], self.keeper[layer]
                for key, t in state.items():
                    if t.dtype != dtype:
                        continue
                    parts = _by_parameter(spec, whole[layer][key]) if keeper == self.rank else {}
                    for name in spec.parameters:
                        label = f"{name}{NAMES}{key}{NAMES}{layer}"
                        kinds[label] = t.ndim
                        counts = self.sharding.layouts[name].counts if t.ndim == 3 else (1,) * len(self.ranks)
                        if keeper == self.rank:
                            pieces[label] = parts[name] if t.ndim == 3 else whole[layer][key][:1]
                            sends += [Piece(label, r, count) for r, count in enumerate(counts)]
                        receives.append(Piece(label, keeper, counts[self.rank]))

            def part(piece: Piece, pieces: dict[str, Tensor] = pieces, kinds: dict[str, int] = kinds) -> Tensor:
                t, name = pieces[piece.key], piece.key.partition(NAMES)[0]
                return self.sharding.layouts[name].part(t, piece.rank) if kinds[piece.key] == 3 else t

            for piece, flat in self._run("loaded state", sends, receives, dtype, part):
                name, key, _ = piece.key.split(NAMES)
                if kinds[piece.key] == 1:
                    found.setdefault(name, {})[key] = flat
                    continue
                own = _as_matrix(flat.view(self.sharding.layouts[name].shape_at(self.rank)))
                first = found.setdefault(name, {}).get(key)
                found[name][key] = own if first is None else first + own
        return found

    # --- messages ----------------------------------------------------------------------------------------

    def _run(self, phase: str, sends: list[Piece], receives: list[Piece], dtype: torch.dtype, give: Any) -> Any:
        exchange = Exchange(phase, sends, receives, self.processes, self.sharding.traffic)
        return exchange.run(give, dtype, self.sharding.device)

    def _everybodys(self, described: Any) -> list[Any]:
        """What every rank says."""
        if self.processes.count == 1:
            return [described]
        found: list[Any] = [None] * self.processes.count
        with named_failure("description of a saved state"):
            dist.all_gather_object(found, described, group=self.processes.group)
        return found


def _by_parameter(spec: LayerSpec, t: Tensor) -> dict[str, Tensor]:
    """A tensor of a layer's form in the shapes of its parameters, zero in rows that are not this layer's."""
    if t.ndim == 1:
        return dict.fromkeys(spec.parameters, t)
    found = {}
    for part, piece in spec.form.split(t):
        if part.rows is None:
            found[part.name] = piece
        else:
            whole = piece.new_zeros(part.shape)
            whole[slice(*part.rows)] = piece
            found[part.name] = whole
    return found


def _as_matrix(shard: Tensor) -> Tensor:
    """``[1, rows, columns]``, as stacks of shards have it."""
    return shard.reshape(1, shard.shape[0] if shard.ndim else 1, -1) if shard.numel() else shard.new_zeros(1, 0, 0)


def _of(states: Mapping[str, Mapping[str, Any]], key: str) -> Any:
    layer, _, name = key.partition(NAMES)
    return states[layer][name]


def _dtypes(found: Iterable[torch.dtype]) -> list[torch.dtype]:
    """In one order on all ranks."""
    return sorted(set(found), key=str)
