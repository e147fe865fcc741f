"""`ShardedExecutor`: a step in which every layer is treated by its owner."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerwise.optim.eigenbasis import squares_of_layer
from layerwise.optim.reference import Reference
from layerwise.optim.rule import Context, Observation
from layerwise.optim.sharding.plan import meta_shape
from layerwise.optim.sharding.sharding import Sharding
from layerwise.optim.statistics.accumulate import Sums
from layerwise.optim.step.refresh_schedule import RefreshSchedule, Turn
from layerwise.optim.step.stack import Stack
from layerwise.optim.step.update import EagerExecutor, Part, SolveTogether


@dataclass
class ShardedExecutor(EagerExecutor):
    """Steps of `EagerExecutor` on stand-ins, between two exchanges."""

    sharding: Sharding = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        slots = {duty.layer: duty.slot for duty in self.sharding.plan.duties}
        for stack in self.stacks:
            stack.memory["turns"] = [Turn(groups, slots.get(spec.name, 0)) for spec, groups in stack.layers]
            stack.share = self.sharding.share(stack)
        self.schedule = RefreshSchedule(self.every)  # an owner refreshes what it owns

    def run(
        self, contexts: Sequence[Context], seen: dict[str, Sums], scale: float, together: SolveTogether | None
    ) -> None:
        """As one process would; nothing, if a gradient is not finite on any rank."""
        if not self.sharding.census.all_finite:
            self.health.skipped_steps += 1
            return
        self.sharding.collect_gradients()
        for stack in self.stacks:
            stack.weight_norms = self.sharding.norms(stack)
        self._seen = seen
        super().run(contexts, seen, scale, None if together is None else self._together(together, contexts, scale))
        self.sharding.send_updates()

    def _total(self, value: float) -> float:
        return self.sharding.add_up(value)

    # --- all layers at once ------------------------------------------------------------------------------

    def _together(self, solve: SolveTogether, contexts: Sequence[Context], scale: float) -> SolveTogether:
        """Every rank solves for all layers, with rows of its own examples; each keeps what it owns."""

        def solved(parts: list[Part], seen: dict[str, Sums]) -> None:
            sharding = self.sharding
            own = [part for part in parts if part.stack.rule is self.rule]
            grads = sharding.gather_gradients([part.stack for part in own])
            everything = list[Part]()
            for layer, grad in grads.items():
                bucket = sharding.bucket_of[layer]
                if bucket.rule is self.rule:
                    stack = Stack(bucket.rule, (sharding.specs[layer],), bucket.group, {}, Reference())
                    grad = grad * scale
                    everything.append(Part(stack, None, grad, [True], grad))  # type: ignore[arg-type]
            solve(everything, seen)
            handed = {part.stack.specs[0].name: part.handed for part in everything}
            for part in own:
                part.handed = torch.cat([handed[spec.name] for spec in part.stack.specs])

        return solved

    # --- examples ----------------------------------------------------------------------------------------

    def _look_at_examples(self, parts: Sequence[Part], observed: Sequence[Observation | None]) -> None:
        """Each rank looks at its own examples in the bases of the owners, which get the sums."""
        requires = self.rule.requirements()
        if not (requires.examples and requires.moments and self.sharding.census.seen):
            return
        shapes = {duty.layer: self._basis_shapes(duty.layer) for duty in self.sharding.plan.duties}
        shapes = {layer: found for layer, found in shapes.items() if found is not None}
        bases: dict[str, Sequence[Tensor | None]] = {}
        for part in parts:
            if part.stack.rule is self.rule:
                basis: Any = part.stack.state["basis"]
                bases |= {spec.name: basis.matrices(groups) for spec, groups in part.stack.layers}
        dtype = self.sharding.statistics_dtype

        def squares(layer: str, basis: list[Tensor | None]) -> Tensor | None:
            return squares_of_layer((basis[0], basis[1], basis[2]), self._seen[layer].recorded, dtype)

        others = self.sharding.share_examples(bases, shapes, squares)
        for place, part in enumerate(parts):
            known = observed[place]
            if known is not None and known.recorded:
                layers = [others.get(spec.name) for spec in part.stack.specs]

                def add_up(totals: Sequence[Tensor], layers: list[Tensor | None] = layers) -> list[Tensor]:
                    pairs = zip(totals, layers, strict=True)
                    return [total if other is None else total + other.to(total.dtype) for total, other in pairs]

                known.add_up = add_up
        super()._look_at_examples(parts, observed)

    def _basis_shapes(self, layer: str) -> list[tuple[int, ...] | None] | None:
        """Of U_P, U_Q and the bias's block, as the owner of a layer has them."""
        bucket, spec = self.sharding.bucket_of[layer], self.sharding.specs[layer]
        if bucket.rule is not self.rule:
            return None
        basis: Any = bucket.rule.init(meta_shape(spec, self.sharding.statistics_dtype), Reference())["basis"]
        return [None if t is None else tuple(t.shape) for t in basis.matrices(slice(None))]
