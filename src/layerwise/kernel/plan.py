"""`Plan`: which order of contraction each layer gets, in how many tiles, and what that will cost."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch

from layerwise.foundations.device import readable, require
from layerwise.foundations.errors import (
    InputError,
    MemoryBudgetError,
    NameLookupError,
    describe,
    not_one_of,
    unknown,
)
from layerwise.kernel.contraction import ORDERS
from layerwise.kernel.cost import START, TRAFFIC, Cost, LayerSizes, cost
from layerwise.kernel.examples import RECORDING, recording_sizes
from layerwise.layers.table import LayerSpec

SCRATCH = {"cpu": 64 * 2**20, "cuda": 4 * 2**30}
"""Bytes that one tile of a contraction may take, if the memory allowed is large."""
Algorithm = str | Mapping[str, str]
"""An order of contraction by name, or one for each pattern of layer names; "auto" counts."""


@dataclass(frozen=True)
class Request:
    """What a kernel is asked for, in numbers."""

    layers: tuple[tuple[LayerSpec, LayerSizes], ...]
    n: int
    m: int | None
    """Examples of the second set; None: the kernel is square, and one half of it is computed."""
    functions: int
    """P, outputs of the kernel's functions an example."""
    graph_bytes: float
    """Recorded inputs and outputs of one example."""
    gradient_bytes: int
    """Gradients of all recorded outputs, for one example and cotangent."""
    dtype: torch.dtype
    device: torch.device
    memory: int
    algorithm: Algorithm = "auto"
    apart: bool = False
    """One matrix a layer."""

    @property
    def pairs(self) -> float:
        """Pairs of examples that are computed."""
        return self.n * (self.n + 1) / 2 if self.m is None else float(self.n * self.m)

    @property
    def matrix_bytes(self) -> int:
        """What the result takes."""
        one = self.n * (self.n if self.m is None else self.m) * self.functions**2 * self.dtype.itemsize
        return one * (len(self.layers) if self.apart else 1)


@dataclass(frozen=True)
class LayerPlan:
    """One layer's order of contraction."""

    spec: LayerSpec
    sizes: LayerSizes
    order: str
    keeps_rows: bool
    cost: Cost

    @property
    def note(self) -> str:
        """Why a layer takes the generic path, if it does."""
        return f"per-example gradients by autodiff: {self.spec.reason or 'no rule'}" if self.sizes.bare else ""


@dataclass(frozen=True)
class Plan:
    """What will be done; print it."""

    request: Request
    layers: tuple[LayerPlan, ...]
    block: int
    """Examples recorded together."""
    cotangents: int
    """Cotangents pulled back together."""
    groups: tuple[int, int]
    """Examples of the first and second set whose layers are kept at once."""
    by_name: Mapping[str, LayerPlan] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {layer.spec.name: layer for layer in self.layers})

    @property
    def multiply_adds(self) -> float:
        """Of all contractions; recording is not counted."""
        return sum(layer.cost.multiply_adds for layer in self.layers)

    @property
    def tiles(self) -> int:
        """Pairs of groups that are computed one after the other."""
        first = -(-self.request.n // self.groups[0])
        if self.request.m is None:
            return first * (first + 1) // 2
        return first * -(-self.request.m // self.groups[1])

    @property
    def recorded(self) -> float:
        """Examples that are run forward and back, some of them several times."""
        first = -(-self.request.n // self.groups[0])
        if self.request.m is None:
            return self.request.n * (first + 1) / 2
        return float(self.request.n + self.request.m * first)

    @property
    def kept_bytes(self) -> int:
        """Inputs and gradients, or per-example gradients, that are kept at once."""
        one = sum(layer.cost.kept for layer in self.layers) * self.request.dtype.itemsize
        second = self.request.m is not None or self.tiles > 1
        return one * (self.groups[0] + (self.groups[1] if second else 0))

    def __str__(self) -> str:
        width = max([5, *(len(layer.spec.name) for layer in self.layers)])
        head = f"{'layer':<{width}}  {'K × O × I':>16}  {'S':>6}  {'order':<8}{'keeps':<10}{'multiply-adds':>14}  tile"
        lines = [head]
        for layer in self.layers:
            form = " × ".join(map(str, layer.spec.form.shape))
            keeps = "rows" if layer.keeps_rows else "a, g"
            tile = "all" if not layer.cost.tile else str(layer.cost.tile)
            lines.append(
                f"{layer.spec.name:<{width}}  {form:>16}  {layer.sizes.positions:>6}  {layer.order:<8}{keeps:<10}"
                f"{layer.cost.multiply_adds:>14.2e}  {tile}{'  ' + layer.note if layer.note else ''}"
            )
        return "\n".join([*lines, *self._summary()])

    def _summary(self) -> Iterable[str]:
        r = self.request
        rows, columns = r.n * r.functions, (r.n if r.m is None else r.m) * r.functions
        half = ", one half computed" if r.m is None else ""
        yield f"matrix {rows} × {columns} ({readable(r.matrix_bytes)}{half}); {self.multiply_adds:.2e} multiply-adds"
        yield (
            f"examples recorded at a time: {self.block}, with {self.cotangents} of {r.functions} cotangents; "
            f"{readable(self.kept_bytes)} kept for contraction (memory={r.memory})"
        )
        if self.tiles > 1:
            yield (
                f"tiled: {self.tiles} pairs of groups of {self.groups[0]} × {self.groups[1]} examples, one after the "
                f"other; {self.recorded:.0f} examples are recorded instead of {r.n + (r.m or 0)}"
            )


@dataclass(frozen=True)
class _Room:
    """How the memory allowed is divided, in bytes."""

    scratch: int
    """What a tile should take."""
    most: int
    """What a tile may take where a smaller one does not exist."""
    recording: int
    kept: int


def make_plan(request: Request) -> Plan:
    """Choose the cheapest order for each layer that fits the memory, in tiles if it must be."""
    try:
        return _plan(request)
    except _TooSmall as small:
        raise small.explained(request) from None


class _TooSmall(Exception):
    """Not even single examples fit."""

    def __init__(self, what: str, least: int) -> None:
        self.what, self.least = what, least

    def explained(self, request: Request) -> MemoryBudgetError:
        """With a memory that is enough."""
        enough = request.memory
        while True:
            enough = 2 * enough
            try:
                _plan(replace(request, memory=enough))
                break
            except _TooSmall:
                continue
        return MemoryBudgetError(
            describe(
                f"a tangent kernel that needs {readable(self.least)} for {self.what}",
                f"what the matrix leaves free of memory={request.memory}",
                f'allow memory={enough}, take fewer outputs with outputs=, or leave algorithm="auto"',
            )
        )


def _plan(request: Request) -> Plan:
    room = _room(request)
    choices = [_choices(spec, sizes, request, room) for spec, sizes in request.layers]
    best: Plan | None = None
    for layers in _trades(choices):
        plan = _grouped(request, layers, room)
        if plan is not None and (best is None or _effort(plan) < _effort(best)):
            best = plan
        if best is not None and best.tiles == 1:
            break
    if best is None:
        least = sum(min(option.cost.kept for option in options) for options in choices) * request.dtype.itemsize
        raise _TooSmall("what is kept of all layers for two single examples", 2 * least)
    return best


def _room(request: Request) -> _Room:
    require(
        request.matrix_bytes,
        request.memory,
        "a kernel for each layer" if request.apart else "the kernel's matrix",
        "use K @ u, K.eigh(k), K.diag() or K.solve(y, ridge), which need no matrix, fewer examples, "
        'outputs="sum", or allow more with memory=',
    )
    free = request.memory - request.matrix_bytes
    scratch = min(SCRATCH.get(request.device.type, SCRATCH["cpu"]), free // 8)
    recording = min(RECORDING.get(request.device.type, RECORDING["cpu"]), free // 4)
    return _Room(scratch, free, recording, free - recording - 2 * scratch)


def _choices(
    spec: LayerSpec, sizes: LayerSizes, request: Request, room: _Room, keep_rows: Sequence[bool] = (False, True)
) -> list[LayerPlan]:
    """Everything that can be done with a layer, cheapest first; `keep_rows` says what may be kept of it."""
    asked = _asked(spec.name, request.algorithm)
    traffic, start = (table.get(request.device.type, table["cpu"]) for table in (TRAFFIC, START))
    m = request.n if request.m is None else request.m
    found = []
    for order in sizes.orders():
        if asked != "auto" and order != asked and not sizes.bare:
            continue
        for keep in keep_rows:
            if (keep and (order != "rows" or sizes.tokens)) or (sizes.bare and not keep):
                continue
            scratch = room.scratch // request.dtype.itemsize
            price = cost(order, sizes, request.n, m, request.pairs, scratch, traffic, keep, start)
            if keep or price.scratch <= room.most // request.dtype.itemsize:
                found.append(LayerPlan(spec, sizes, order, keep, price))
    if not found:
        least = min(cost(o, sizes, 1, 1, 1, 0, traffic, False).scratch for o in sizes.orders()) * request.dtype.itemsize
        raise _TooSmall(f"layer {spec.name!r} by {asked!r} for two single examples", least)
    return sorted(found, key=lambda choice: choice.cost.multiply_adds)


def with_positions(layer: LayerPlan, positions: int, request: Request) -> LayerPlan:
    """The same layer, of which inputs and gradients are kept, where so many positions have turned out to be live.

    The plan has seen the first examples alone. An order that suits few positions may not fit the memory with more.
    """
    if positions <= layer.sizes.positions:
        return layer
    sizes = replace(layer.sizes, positions=positions)
    try:
        choices = _choices(layer.spec, sizes, request, _room(request), keep_rows=(False,))
    except _TooSmall as small:
        raise small.explained(request) from None
    return choices[0]


def _asked(name: str, algorithm: Algorithm) -> str:
    if isinstance(algorithm, str):
        chosen = algorithm
    else:
        chosen = next((order for pattern, order in algorithm.items() if fnmatchcase(name, pattern)), "auto")
    if chosen not in (*ORDERS, "auto"):
        raise InputError(not_one_of("algorithm", chosen, ("auto", *ORDERS)))
    return chosen


def check_algorithm(algorithm: Algorithm, specs: Iterable[LayerSpec]) -> None:
    """Every order must exist, and every pattern match a layer."""
    chosen = [algorithm] if isinstance(algorithm, str) else list(algorithm.values())
    for order in chosen:
        _asked("", order)
    names = [spec.name for spec in specs]
    for pattern in () if isinstance(algorithm, str) else algorithm:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise NameLookupError(unknown("layer", pattern, names))


def _trades(choices: list[list[LayerPlan]]) -> Iterable[tuple[LayerPlan, ...]]:
    """The cheapest choice for every layer, then ever less memory, each time for the least extra work."""
    chosen = [options[0] for options in choices]
    yield tuple(chosen)
    while True:
        offers = [
            ((option.cost.multiply_adds - now.cost.multiply_adds) / (now.cost.kept - option.cost.kept), place, option)
            for place, (now, options) in enumerate(zip(chosen, choices, strict=True))
            for option in options
            if option.cost.kept < now.cost.kept
        ]
        if not offers:
            return
        _, place, option = min(offers, key=lambda offer: offer[:2])
        chosen[place] = option
        yield tuple(chosen)


def _grouped(request: Request, layers: tuple[LayerPlan, ...], room: _Room) -> Plan | None:
    """The plan with as large groups as fit; None if not even single examples do."""
    one = max(1, sum(layer.cost.kept for layer in layers) * request.dtype.itemsize)
    groups = _groups(request.n, request.m, room.kept // one)
    if groups is None:
        return None
    sizes = request.graph_bytes, request.gradient_bytes, request.functions
    block, cotangents = recording_sizes(room.recording, request.device, *sizes)
    block = min(block, *groups)
    first, second = (g if g == whole else max(1, g // block) * block for g, whole in _whole(request, groups))
    return Plan(request, layers, block, cotangents, (first, second))


def _whole(request: Request, groups: tuple[int, int]) -> list[tuple[int, int]]:
    """Each group's size, and how many examples its set has: groups are made of whole blocks."""
    return [(groups[0], request.n), (groups[1], request.n if request.m is None else request.m)]


def _groups(n: int, m: int | None, fit: int) -> tuple[int, int] | None:
    """How many examples of each set are kept at once, where `fit` fit together."""
    if m is None:
        if n <= fit:
            return n, n
        return None if fit < 2 else (fit // 2, fit // 2)
    if n + m <= fit:
        return n, m
    if fit < 2:
        return None
    if n <= fit // 2:
        return n, fit - n
    return fit - min(m, fit // 2), min(m, fit // 2)


def _effort(plan: Plan) -> float:
    """Multiply-adds of contractions and recordings together."""
    each = sum(
        layer.sizes.vectors * layer.sizes.positions * layer.sizes.row for layer in plan.layers if not layer.sizes.tokens
    )
    return plan.multiply_adds + 2.0 * each * plan.recorded
