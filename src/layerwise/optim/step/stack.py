"""`Stack`: all layers of one shape and one parameter group, as one tensor ``[K, O, I]``."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from layerwise.foundations.errors import LayerwiseError, describe
from layerwise.foundations.types import statistics_dtype
from layerwise.layers.table import LayerSpec
from layerwise.optim.cuda import storage as stored
from layerwise.optim.cuda.elementwise import gather_
from layerwise.optim.cuda.param_lists import Listed
from layerwise.optim.options import rate
from layerwise.optim.rule import Shape, State, UpdateRule

PAD_TO = {"cuda": 16}
"""Rows and columns of factors are padded to multiples of this, by kind of device."""
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
    state: State = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    """What the host remembers from step to step; never saved."""
    fallback: bool = False
    """Whether its rule is the fallback, which may have a rate of its own."""
    own_groups: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Of parameters that are in another group than `group`: rate and decay are theirs."""

    def __post_init__(self) -> None:
        if self.rule.sua and len({spec.form.taps for spec in self.specs}) > 1:
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
        form, first = self.specs[0].form, self.params[self.specs[0].parameters[0]]
        dtype = statistics_dtype(first.dtype)
        O, I = form.outputs, form.inputs
        rows, columns = self._padding(O, I, dtype, first.device)
        size = (self.groups, O + rows, I + columns)
        return Shape(*size, dtype, first.device, form.one_hot, form.taps, form.bias is not None, (rows, columns))

    def _padding(self, O: int, I: int, dtype: torch.dtype, device: torch.device) -> tuple[int, int]:
        """Zeros up to multiples of `PAD_TO`: a bias column makes 769 of 768, at which products are six times slower."""
        unit = PAD_TO.get(device.type, 1) if self.rule.pads(dtype, device) else 1
        return -O % unit, 0 if self.specs[0].form.one_hot else -I % unit

    @property
    def groups(self) -> int:
        """K."""
        return sum(spec.form.groups for spec in self.specs)

    def slices(self) -> Iterator[tuple[LayerSpec, slice]]:
        """Which groups are whose."""
        start = 0
        for spec in self.specs:
            yield spec, slice(start, start + spec.form.groups)
            start += spec.form.groups

    # --- parameters and gradients ------------------------------------------------------------------------

    @cached_property
    def listed(self) -> Listed | None:
        """The layers as lists, if they can be taken so: with one rate and decay for all."""
        return None if self.own_groups else Listed.of(self.specs, self.params, self.shape)

    @cached_property
    def splits_gradient(self) -> bool:
        """Whether the rule multiplies the gradient by matrices that are kept in halves."""
        return any(name.endswith("_scale") for name in self.state)

    def by_group(self, layers: Iterable[bool]) -> list[bool]:
        """What is known of each layer, of each of its groups."""
        return [on for spec, on in zip(self.specs, layers, strict=True) for _ in range(spec.form.groups)]

    def active(self) -> list[bool]:
        """Which layers have a gradient this step."""
        return [any(self.params[name].grad is not None for name in spec.parameters) for spec in self.specs]

    def gradient(self, scale: float = 1.0, gate: Tensor | None = None) -> tuple[Float[Tensor, "K O I"], list[bool]]:
        """All gradients times a number, and which layers have one; zero where there is none or the gate is shut."""
        listed = None if gate is None else self.listed
        if listed is not None and not (listed.transposed and self.rule.matrix_only):  # such rules multiply matrices
            layers = listed.gradients()
            if layers is not None:
                out = listed.room(self.shape)
                gather_(listed.matrices(out), *layers, scale, gate)
                return out, [True] * len(self.specs)
        grad = self._join({name: p.grad for name, p in self.params.items()})
        grad = grad if scale == 1.0 else grad * scale
        grad = grad if gate is None else torch.where(gate.to(grad.device), grad, 0.0).contiguous()
        return grad, self.active()

    def momentum(self) -> Float[Tensor, "K O I"]:
        """The direction's running sum, zero at the start; in the memory's order of the parameters."""
        if "momentum" not in self.state:
            self.state["momentum"] = self.shape.zeros(self.shape.outputs, self.shape.inputs)
        if self.listed is not None:
            self.state["momentum"] = self.listed.laid_out(self.state["momentum"])
        return self.state["momentum"]

    def weight(self) -> Float[Tensor, "K O I"]:
        """All parameters."""
        return self._join({name: p.detach() for name, p in self.params.items()})

    def _join(self, tensors: Mapping[str, Tensor | None]) -> Tensor:
        dtype = self.shape.dtype
        filled = {}
        for name, p in self.params.items():
            t = tensors[name]
            t = torch.zeros_like(p) if t is None else t
            filled[name] = (t.to_dense() if t.is_sparse else t).to(dtype)
        blocks = [spec.form.join(filled) for spec in self.specs]
        if any(self.shape.padding):
            return self._padded(blocks)
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    def _padded(self, blocks: list[Tensor]) -> Tensor:
        shape = self.shape
        whole = shape.zeros(shape.outputs, shape.inputs)
        for (_, groups), block in zip(self.slices(), blocks, strict=True):
            whole[groups, : shape.own_outputs, : shape.own_inputs] = block
        return whole

    @torch.no_grad()
    def subtract(
        self, D: Float[Tensor, "K O I"], scale: float, active: Iterable[bool], decay: float, gate: Tensor | None = None
    ) -> None:
        """``W ← (1 − decay) W − scale · D`` for the layers that are active; nothing where the gate is shut."""
        targets, pieces, rates = [], [], list[tuple[float, float]]()
        for (spec, groups), on in zip(self.slices(), active, strict=True):
            if on:
                for part, piece in spec.form.split(self.own(D[groups])):
                    targets.append(part.of(self.params))
                    pieces.append(piece)
                    rates.append(self._rates(part.name, scale, decay))
        if gate is None:
            for target, piece, (scale, decay) in zip(targets, pieces, rates, strict=True):
                if decay:
                    target.mul_(1 - decay)
                target.add_(piece.to(target.dtype), alpha=-scale)
            return
        for own in set(rates):
            places = [place for place, of_place in enumerate(rates) if of_place == own]
            _subtract_gated([targets[i] for i in places], [pieces[i] for i in places], *own, gate.to(D))

    def _rates(self, name: str, scale: float, decay: float) -> tuple[float, float]:
        """η and η·decay of a parameter."""
        group = self.own_groups.get(name)
        lr = scale if group is None else rate(group, self.fallback)
        return (scale, decay) if group is None else (lr, lr * group["weight_decay"])

    def own(self, X: Float[Tensor, "k O I"]) -> Tensor:
        """Without padding."""
        return X[..., : self.shape.own_outputs, : self.shape.own_inputs] if any(self.shape.padding) else X

    # --- state, layer by layer ---------------------------------------------------------------------------

    def ensure_state(self, saved: Mapping[str, Mapping[str, Tensor]], shared: Collection[str] | None = None) -> None:
        """State from what was saved for each layer, else as at the start.

        Of another member's state the factors are taken that mean the same (`shared`: "P", "Q"), decompositions are
        made at the next step. What a rule keeps beside factors (moments and their count) is taken whole or not at all.
        """
        if self.state:
            return
        self.state = self.rule.init(self.shape)
        sizes = stored.saved_sizes(self.state, self.shape)
        needed = set(sizes)
        beside = {name for name in needed if stored.side_of(name) is None}
        for spec, groups in self.slices():
            found = _fitting(saved.get(spec.name, {}), sizes)
            if shared is not None:
                found = {k: t for k, t in found.items() if self._means_the_same(k, shared)}
            if not beside <= set(found):
                found = {k: t for k, t in found.items() if k not in beside}
            names = needed | ({*ENGINE_STATE} if needed - {*self.rule.refreshed} <= set(found) else set())
            for name in names & set(found) - (set() if needed <= set(found) else {"fresh"}):
                self._put(name, groups, found[name])

    def _means_the_same(self, name: str, shared: Collection[str]) -> bool:
        """In another member's state."""
        return (stored.side_of(name) in shared and name not in self.rule.refreshed) or name.startswith("graft_")

    def _put(self, name: str, groups: slice, value: Tensor) -> None:
        shape = self.shape
        if name not in self.state:
            own = value.shape[1:] == (shape.own_outputs, shape.own_inputs)
            self.state[name] = shape.zeros(*((shape.outputs, shape.inputs) if own else value.shape[1:]))
        stored.load(self.state, name, groups, value)

    def portable(self) -> dict[str, dict[str, Tensor]]:
        """The state of each layer alone, in a form that does not depend on the device; views where that is possible."""
        names = stored.saved_names(self.state)
        return {
            spec.name: {name: stored.portable(self.state, name, self.shape, groups) for name in names}
            for spec, groups in self.slices()
        }

    def saved(self) -> dict[str, dict[str, Tensor]]:
        """The same as it is now: copies."""
        names = stored.saved_names(self.state)
        return {
            spec.name: {name: stored.portable(self.state, name, self.shape, groups).clone() for name in names}
            for spec, groups in self.slices()
        }

    def restore(self, before: State, active: list[bool]) -> None:
        """Give layers that were not active their former state back."""
        for (_, groups), on in zip(self.slices(), active, strict=True):
            if not on:
                for name, value in before.items():
                    self.state[name][groups] = value[groups]


def _fitting(found: Mapping[str, Tensor], sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """What has the size of a stack's state; a count only with the mean that it counts."""
    fits = {name for name, value in found.items() if sizes.get(name, value.shape[1:]) == value.shape[1:]}
    lost = {f"{name}_count" for name in set(found) - fits}
    return {name: value for name, value in found.items() if name in fits - lost}


def _subtract_gated(
    targets: list[Tensor], pieces: list[Tensor], scale: float, decay: float, gate: Float[Tensor, ""]
) -> None:
    """The same with coefficients on the device, which are 0 in a step that is left out."""
    factor = gate * -scale
    if decay:
        torch._foreach_mul_(targets, 1 - decay * gate)  # pyright: ignore[reportPrivateImportUsage]
    for target, piece in zip(targets, pieces, strict=True):
        if target.dtype == factor.dtype:
            target.addcmul_(piece, factor)
        else:
            target.add_((piece * factor).to(target.dtype))
