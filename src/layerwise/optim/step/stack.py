"""`Stack`: all layers of one shape and one parameter group, as one tensor ``[K, O, I]``."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from layerwise.foundations.errors import LayerwiseError, describe
from layerwise.foundations.sharded import local
from layerwise.foundations.types import statistics_dtype
from layerwise.layers.table import LayerSpec
from layerwise.optim.backend import ALL, Backend, Factor, Kept
from layerwise.optim.options import rate
from layerwise.optim.rule import Requirements, Shape, State, UpdateRule, kept, tensors

ENGINE_STATE = ("fresh", "momentum", "graft_m", "graft_v", "graft_steps")
"""What the engine adds to a rule's own state."""


@dataclass
class Stack:
    """Layers that one rule treats together."""

    rule: UpdateRule
    specs: tuple[LayerSpec, ...]
    group: dict[str, Any]
    """The parameter group of all of them; of their weights, where biases have another."""
    params: Mapping[str, nn.Parameter]
    backend: Backend
    state: State = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    """What the host remembers from step to step; never saved."""
    fallback: bool = False
    """Whether its rule is the fallback, which may have a rate of its own."""
    own_groups: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Of parameters that are in another group than `group`: rate and decay are theirs."""
    share: float = 1.0
    """What part of its sums counts in those over all ranks: a shard that several ranks hold counts once."""
    weight_norms: Tensor | None = None
    """Of the weights of each matrix, ``[K]``, where the weights themselves are not here."""

    def __post_init__(self) -> None:
        if len(self.specs) > 1 and len({spec.form.taps for spec in self.specs}) > 1 and self.requires.by_channel:
            raise LayerwiseError(
                describe(
                    f"one stack of {', '.join(spec.name for spec in self.specs)}",
                    "layers with as many kernel offsets each, under sua=True",
                    "stack them apart",
                )
            )

    @cached_property
    def shape(self) -> Shape:
        """K, O, I and what the tensors are made of."""
        form, first = self.specs[0].form, local(self.params[self.specs[0].parameters[0]])
        O, I = form.outputs, form.inputs
        like = first.new_empty(0, dtype=statistics_dtype(first.dtype))
        rows, columns = self.backend.padding(self.rule.requirements(), O, I, like, form.one_hot)
        size = (self.groups, O + rows, I + columns)
        return Shape(*size, like.dtype, first.device, form.one_hot, form.taps, form.bias is not None, (rows, columns))

    @cached_property
    def requires(self) -> Requirements:
        """What the rule asks for."""
        return self.rule.requirements()

    @cached_property
    def groups(self) -> int:
        """K."""
        return sum(spec.form.groups for spec in self.specs)

    @cached_property
    def layers(self) -> list[tuple[LayerSpec, slice]]:
        """Which groups are whose."""
        found, start = [], 0
        for spec in self.specs:
            found.append((spec, slice(start, start + spec.form.groups)))
            start += spec.form.groups
        return found

    def slices(self) -> Iterator[tuple[LayerSpec, slice]]:
        """The same, one by one."""
        return iter(self.layers)

    # --- parameters and gradients ------------------------------------------------------------------------

    def by_group(self, layers: Sequence[bool]) -> list[bool]:
        """What is known of each layer, of each of its groups: of norm layers thousands, an entry each."""
        if all(layers):
            return [True] * self.groups
        return [on for spec, on in zip(self.specs, layers, strict=True) for _ in range(spec.form.groups)]

    @cached_property
    def plain(self) -> bool:
        """Whether every layer is one parameter that holds one matrix, row by row."""
        forms = [spec.form for spec in self.specs]
        whole = all(form.groups == 1 and len(form.parts) == 1 and form.parts[0].rows is None for form in forms)
        return whole and not any(form.transposed for form in forms) and self.shape.padding == (0, 0)

    def active(self) -> list[bool]:
        """Which layers have a gradient this step."""
        found = []
        for spec in self.specs:
            on = False
            for name in spec.parameters:
                on = on or self.params[name].grad is not None
            found.append(on)
        return found

    def gradient(self, scale: float = 1.0) -> tuple[Float[Tensor, "K O I"], list[bool]]:
        """All gradients times a number, zero where there is none; and which layers have one."""
        if self.plain:
            shape, blocks, active = self.shape, list[Tensor](), list[bool]()
            for p in self.params.values():
                g = p.grad
                active.append(g is not None)
                g = torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g
                blocks.append(g.to(shape.dtype).reshape(1, shape.outputs, shape.inputs))
            grad = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        else:
            grad, active = self.join({name: p.grad for name, p in self.params.items()}), self.active()
        return (grad if scale == 1.0 else grad * scale), active

    def weight(self) -> Float[Tensor, "K O I"]:
        """All parameters."""
        return self.join({name: p.detach() for name, p in self.params.items()})

    def join(self, given: Mapping[str, Tensor | None]) -> Float[Tensor, "K O I"]:
        """Tensors of the parameters' sizes as the stack has them."""
        shape, blocks, filled = self.shape, [], {}
        for name, p in self.params.items():
            t = given[name]
            t = torch.zeros_like(p) if t is None else t
            filled[name] = (t.to_dense() if t.is_sparse else t).to(shape.dtype)
        for spec in self.specs:
            blocks.append(spec.form.join(filled))
        if shape.padding != (0, 0):
            whole = shape.zeros(shape.outputs, shape.inputs)
            for (_, groups), block in zip(self.layers, blocks, strict=True):
                whole[groups, : shape.own_outputs, : shape.own_inputs] = block
            return whole
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    def pieces(
        self, D: Float[Tensor, "K O I"], lr: float, active: Iterable[bool]
    ) -> list[tuple[Tensor, Tensor, float, float]]:
        """Each parameter of the active layers with its part of a direction, its learning rate and weight decay."""
        decay, shape, found = self.group["weight_decay"], self.shape, []
        if self.plain and not self.own_groups:
            for p, block, on in zip(self.params.values(), D, active, strict=True):
                if on:
                    found.append((p, block.reshape(p.shape), lr, decay))
            return found
        for (spec, groups), on in zip(self.layers, active, strict=True):
            if not on:
                continue
            own = D[groups] if shape.padding == (0, 0) else D[groups, : shape.own_outputs, : shape.own_inputs]
            for part, piece in spec.form.split(own):
                group = self.own_groups.get(part.name)
                if group is None:
                    found.append((part.of(self.params), piece, lr, decay))
                else:
                    found.append((part.of(self.params), piece, rate(group, self.fallback), group["weight_decay"]))
        return found

    # --- state, layer by layer ---------------------------------------------------------------------------

    def ensure_state(self, saved: Mapping[str, Mapping[str, Tensor]], shared: Collection[str] | None = None) -> None:
        """State from what was saved for each layer, else as at the start.

        Of another member's state the factors are taken that mean the same (`shared`: "P", "Q"), decompositions are
        made at the next step. What a rule keeps beside factors (moments and their count) is taken whole or not at all.
        """
        if self.state:
            return
        self.state = self.rule.init(self.shape, self.backend)
        if self.requires.averages and "M" in self.state and "basis" in self.state:
            self.state["M"] = self.backend.momentum(self.shape, self.state["basis"], self.group["momentum"])
        if not any(saved.get(spec.name) for spec in self.specs):
            self.memory |= {"fresh": [False] * self.groups, "begun": False}  # which nobody need ask the device
            return
        self.memory["loaded"] = True
        owners = {name: entry for entry in kept(self.state) for name in entry.tensors()}
        sizes = {name: tuple(X.shape[1:]) for name, X in self._portable(slice(0, 1)).items()}
        needed, beside = set(sizes), {name for name, entry in self.state.items() if isinstance(entry, Tensor)}
        beside -= {"M"} if self.requires.averages else set()  # a mean of gradients, and of use without scalings
        renewed = {name for name, entry in owners.items() if entry.renewed} | {*self.requires.renewed}
        for spec, groups in self.layers:
            found = _fitting(saved.get(spec.name, {}), sizes)
            if shared is not None:
                found = {k: t for k, t in found.items() if _means_the_same(owners.get(k), k, shared)}
            found = self.rule.taken_over(found, sizes)
            if not beside <= set(found):
                found = {k: t for k, t in found.items() if k not in beside}
            names = needed | ({*ENGINE_STATE} if needed - renewed <= set(found) else set())
            for name in names & set(found) - (set() if needed <= set(found) else {"fresh"}):
                self._load(owners.get(name), name, groups, found[name])

    def _load(self, owner: Kept | None, name: str, groups: slice, value: Tensor) -> None:
        if owner is not None:
            owner.load(name, groups, value)
            return
        shape = self.shape
        if name not in self.state:
            size, padded = list(value.shape[1:]), {shape.own_outputs: shape.outputs}
            if len(size) == 2 and size[1] == shape.own_inputs:
                size = [padded.get(size[0], size[0]), shape.inputs]
            self.state[name] = shape.zeros(*size)
        self.state[name][(groups, *(slice(size) for size in value.shape[1:]))] = value.to(self.state[name])

    def own(self, X: Tensor) -> Tensor:
        """Some groups of a tensor of the rule's, without padding; perhaps a view."""
        shape = self.shape
        if shape.padding != (0, 0) and X.ndim == 3 and X.shape[2] == shape.inputs:
            rows = shape.own_outputs if X.shape[1] == shape.outputs else X.shape[1]  # of all rows, or of some
            X = X[:, :rows, : shape.own_inputs]
        return X if X.dtype.itemsize >= 4 else X.float()  # scalings that are kept in half precision

    def _portable(self, groups: slice) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, entry in self.state.items():
            found |= {name: self.own(entry[groups])} if isinstance(entry, Tensor) else entry.saved(groups)
        return found

    def portable(self) -> dict[str, dict[str, Tensor]]:
        """The state of each layer alone, in a form that does not depend on the device; views where that is possible."""
        return {spec.name: self._portable(groups) for spec, groups in self.layers}

    def saved(self) -> dict[str, dict[str, Tensor]]:
        """The same as it is now: copies, made one after the other, so that little is unpacked at once."""
        found: dict[str, dict[str, Tensor]] = {}
        for spec, groups in self.layers:
            own = found[spec.name] = {}
            for name, entry in self.state.items():
                part = {name: self.own(entry[groups])} if isinstance(entry, Tensor) else entry.saved(groups)
                own |= {k: X.clone() for k, X in part.items()}
        return found

    def copied(self) -> dict[str, Tensor]:
        """All of it as it is stored, for `restore`."""
        self.memory["former fresh"] = [*self.memory.get("fresh", ())]
        return {name: X.clone() for name, X in tensors(self.state).items()}

    def restore(self, before: Mapping[str, Tensor], active: list[bool]) -> None:
        """Give layers that were not active their former state back; zeros, for what was only made in this step."""
        entries, former = tensors(self.state).items(), self.memory["former fresh"]
        for (_, groups), on in zip(self.layers, active, strict=True):
            if on:
                continue
            for name, X in entries:
                X[groups] = before[name][groups] if name in before else 0
            if former:  # what the host knows of the entry "fresh"
                self.memory["fresh"][groups] = former[groups]

    @cached_property
    def factors(self) -> list[Factor]:
        """P and Q, as far as there are such."""
        return [entry for entry in kept(self.state) if isinstance(entry, Factor)]

    def renewed(self, groups: slice = ALL) -> list[Tensor]:
        """Some groups of all that a refresh renews, as it is stored."""
        found = [X[groups] for entry in kept(self.state) if entry.renewed for X in entry.tensors().values()]
        return found + [self.state[name][groups] for name in self.requires.renewed]


def gradients(stacks: Iterable[Stack], scale: float) -> list[tuple[Tensor, list[bool]]]:
    """Of all stacks (`Stack.gradient`)."""
    found = []
    for stack in stacks:
        found.append(stack.gradient(scale))
    return found


def _means_the_same(owner: Kept | None, name: str, shared: Collection[str]) -> bool:
    """Whether another member's state of that name can be taken."""
    return name.startswith("graft_") or (isinstance(owner, Factor) and owner.side in shared)


def _fitting(found: Mapping[str, Tensor], sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """What has the size of a stack's state; a count only with the mean that it counts."""
    fits = {name for name, value in found.items() if sizes.get(name, value.shape[1:]) == value.shape[1:]}
    lost = {f"{name}_count" for name in set(found) - fits}
    return {name: value for name, value in found.items() if name in fits - lost}
