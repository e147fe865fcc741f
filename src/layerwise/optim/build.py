"""`Builder`: from layers and parameter groups to stacks, and to the executor that steps with them.

Plain torch on a CPU; on a GPU the backend and the executor of `optim.cuda`, whose code is not read where there is none.
Where parameters are sharded over several processes, each rank builds the stacks of the layers that it owns.
"""

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from layerwise.distributed.layout import Layout, MeshAxis
from layerwise.foundations.sharded import Division, is_sharded, named_parameters, whole
from layerwise.layers.table import LayerTable
from layerwise.optim.choice import Choice
from layerwise.optim.options import Execution, Refresh, Statistics
from layerwise.optim.rule import Health
from layerwise.optim.sharding.plan import Bucket, Plan
from layerwise.optim.statistics.accumulate import Accumulator
from layerwise.optim.step.clip import Clip
from layerwise.optim.step.damping import Damping
from layerwise.optim.step.graft import Graft
from layerwise.optim.step.stack import Stack
from layerwise.optim.step.update import EagerExecutor, Executor, UpdateSize
from layerwise.optim.tensor_parallel import blocks_of

if TYPE_CHECKING:
    from layerwise.optim.sharding.one_rank import LocalParameters
    from layerwise.optim.sharding.sharding import Sharding

LIKELY_PRECISION = "half"
"""What `precision="auto"` will be, where no gradient has been seen: most who train on a GPU do so under autocast."""
ASKS = 100
"""Steps at which gradients are asked for it; if all of those say nothing, it is "high"."""
States = dict[str, dict[str, Tensor]]
"""By layer and name."""


def prepare_device(model: nn.Module) -> None:
    """On a GPU, what has to be done before a kernel can be compiled goes on beside the construction."""
    first = next(model.parameters(), None)
    if first is not None and first.device.type == "cuda":
        from layerwise.optim.cuda.triton.device import prepare

        prepare(first.device)


@dataclass(frozen=True)
class Builder:
    """Of an optimizer as it is now."""

    model: nn.Module
    table: LayerTable
    groups: list[dict[str, Any]]
    choice: Choice
    how: tuple[Statistics, Refresh, Execution]
    parts: tuple[Health, Damping, Clip, Graft, UpdateSize, Accumulator, int]
    """Of every executor; the last is `refresh_every`."""
    factor_every: int
    draws_labels: bool
    precision: str | None
    """That was chosen before."""
    divided: Mapping[str, Division]
    """Parameters that ranks divide among them (tensor parallelism)."""

    def group_of(self) -> dict[int, dict[str, Any]]:
        """The group of each parameter, by identity."""
        return {id(p): group for group in self.groups for p in group["params"]}

    def build(
        self, loaded: States, shared: Collection[str] | None, rehearse: Callable[[str], None]
    ) -> "tuple[Executor, str | None, Sharding | None, LocalParameters | None]":
        """An executor of stacks, layers of one shape, group and rule together, with what was loaded of their state;
        the precision that the first gradients have chosen, where they had to; and how parameters are sharded.

        `rehearse` is called with the precision of products as soon as that is known.
        """
        params, group_of, precision = named_parameters(self.model), self.group_of(), self.precision
        buckets = self.choice.buckets(self.table.layers, params, group_of)
        sharding, on_one_rank = self._sharding(params, buckets, group_of)
        held = params if on_one_rank is None else on_one_rank.params
        if precision is None and sharding is None:  # ranks with shards would have to agree: they have "high"
            own = [spec for bucket in buckets if bucket.rule is self.choice.rule for spec in bucket.specs]
            precision = self._choose_precision([held[name] for spec in own for name in spec.parameters])
        rehearse(precision or LIKELY_PRECISION)
        if sharding is not None:
            from layerwise.optim.sharding.state import StateExchange

            loaded = StateExchange(sharding).loaded(loaded)
        elif any(is_sharded(t) for state in loaded.values() for t in state.values()):
            loaded = {layer: {k: whole(t) for k, t in state.items()} for layer, state in loaded.items()}
        stacks = []
        for bucket in buckets:
            names = [name for spec in bucket.specs for name in spec.parameters]
            all_here = [(bucket.specs, {k: held[k] for k in names}, bucket.group)]
            for specs, own, group in all_here if sharding is None else sharding.place(bucket):
                backend = self.choice.backend(next(iter(own.values())).device, precision)
                stack = Stack(bucket.rule, specs, group, own, backend, fallback=bucket.fallback)
                others = {k: group_of.get(id(params[k]), group) for k in own}
                stack.own_groups = {k: other for k, other in others.items() if other is not group}
                stack.ensure_state(loaded, None if stack.fallback else shared)
                stacks.append(stack)
        executor = self._executor(stacks, sharding)
        executor.resume(loaded)
        return executor, precision, sharding, on_one_rank

    @property
    def asks_for_precision(self) -> bool:
        """Whether gradients decide it: on a GPU, where nothing was asked for."""
        return not self.choice.host_may_sync and self.how[2].precision == "auto"

    def _choose_precision(self, params: Collection[nn.Parameter]) -> str | None:
        """Of products, by the first gradients; None where nobody asks them, or they say nothing."""
        if not self.asks_for_precision:
            return None
        from layerwise.optim.cuda.precision import chosen

        return chosen(p.grad for p in params if p.grad is not None)

    def _sharding(
        self, params: Mapping[str, nn.Parameter], buckets: list[Bucket], group_of: Mapping[int, dict[str, Any]]
    ) -> "tuple[Sharding | None, LocalParameters | None]":
        """Who owns what, where parameters are sharded over several processes; one alone has them whole."""
        own = {name: p for name, p in params.items() if id(p) in group_of}
        if not any(map(is_sharded, own.values())):
            return None, None
        from layerwise.optim.sharding.one_rank import LocalParameters
        from layerwise.optim.sharding.sharding import Sharding, sharding_group

        *_, accumulator, every = self.parts
        processes, layers = accumulator.processes, self.table.layers
        processes.group = sharding_group(own)
        if processes.count == 1:
            return None, LocalParameters(params)
        blocks = blocks_of(layers, self.divided) if self.how[0].tensor_parallel == "blocks" else {}
        return Sharding(own, buckets, group_of, processes, every, accumulator, layers, blocks), None

    def _executor(self, stacks: list[Stack], sharding: "Sharding | None" = None) -> Executor:
        """Eager on a CPU; on a GPU one that never waits for the device."""
        rule = self.choice.rule
        if sharding is not None:
            from layerwise.optim.sharding.executor import ShardedExecutor

            return ShardedExecutor(stacks, rule, *self.parts, sharding=sharding)
        if self.choice.host_may_sync:
            return EagerExecutor(stacks, rule, *self.parts)
        from layerwise.optim.cuda.executor import AsynchronousExecutor

        return AsynchronousExecutor(
            stacks,
            rule,
            *self.parts,
            factor_every=self.factor_every,
            statistics_over=self.how[0].over,
            draws_labels=self.draws_labels,
            cuda_graphs=self.how[2].cuda_graphs,
        )

    # --- without a step ----------------------------------------------------------------------------------

    def stand_in(self, precision: str) -> Any:
        """An executor of the same stacks without data, for `cuda.rehearsal`."""
        from layerwise.optim.cuda.rehearsal import kind_of, stand_ins

        params, stacks = named_parameters(self.model), dict[Hashable, Stack]()
        for bucket in self.choice.buckets(self.table.layers, params, self.group_of()):
            own = {name: params[name] for spec in bucket.specs for name in spec.parameters}
            backend = self.choice.backend(next(iter(own.values())).device, precision)
            stack = Stack(bucket.rule, bucket.specs, bucket.group, stand_ins(own), backend, fallback=bucket.fallback)
            if kind_of(stack) not in stacks:
                stack.ensure_state({})
                stacks[kind_of(stack)] = stack
        return self._executor([*stacks.values()])

    def plan(self, ranks: int, copies: int) -> Plan:
        """Who would own what, were the model sharded over so many ranks, `copies` times."""
        group_of, (*_, accumulator, every) = self.group_of(), self.parts
        params = {name: p for name, p in named_parameters(self.model).items() if id(p) in group_of}
        axes = (MeshAxis(copies), MeshAxis(ranks // copies, 0))
        by_shape = {shape: Layout.cut(shape, axes) for shape in {tuple(p.shape) for p in params.values()}}
        layouts = {name: by_shape[tuple(p.shape)] for name, p in params.items()}
        treated = [spec for spec in self.table.layers if accumulator.moments(spec)]
        shapes = {spec.name: accumulator.moment_shapes(spec) for spec in treated}
        buckets = self.choice.buckets(self.table.layers, params, group_of)
        return Plan.make(buckets, layouts, ranks, every, shapes, params)
