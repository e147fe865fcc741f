"""First use of a model: where the examples are in its input and output, and how it has to be run to be recorded.

A few examples are run and verified (`verify`). A module whose input all examples share (position indices) is then given
an input for each, and parameters that no rule covers a copy for each, where the output stays the same. What is found
is a proposal: `ModelRecorder` verifies it on the graph of every batch that differs, and proposes anew where it fails.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, InteractionError, describe
from layerwise.foundations.random import stream
from layerwise.foundations.types import Tree, leaves, map_leaves, trainable
from layerwise.layers.capture.copies import Copies, Trial, find_copies
from layerwise.layers.capture.graph import Graph
from layerwise.layers.capture.model_call import (
    call,
    example_count,
    holding,
    refuse_empty,
    substituted,
    take,
    undisturbed,
)
from layerwise.layers.capture.tape import SiteKey, Tape, explained
from layerwise.layers.capture.uses import ProductTracer, Use, Used, propose
from layerwise.layers.capture.vectorised import dense
from layerwise.layers.capture.verify import NO_AXIS, modules_without_axis, noise, verify
from layerwise.layers.io.layer_io import Layout, candidates
from layerwise.layers.table import LayerTable

PROBE = 3
"""Examples that the examination uses; it costs a few forwards and backwards on them.

With two, the middle of an odd number of positions would belong to either example, whichever runs faster.
"""
WIDER = 16
"""Examples that are used where some layer has no gradient on the first few (dead units, zero-initialised branches)."""


@dataclass(frozen=True)
class Notes:
    """What the examination of a model found. Holds no module, so that it can be kept beside the model."""

    example_axis: int
    """Axis of the model's input."""
    output: Layout
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Layers that fall back, and why."""
    layouts: Mapping[SiteKey, Layout] = field(default_factory=dict)
    bytes_per_example: float = 0.0
    """Recorded inputs and outputs of one example."""
    broadcast: frozenset[str] = frozenset()
    """Modules called on an input that all examples share (position embeddings)."""
    copies: Copies = field(default_factory=Copies)
    """Bare parameters that can be given to each example apart."""
    shared: frozenset[int] = frozenset()
    """Places of the input's tensors that all examples use (a mask over positions)."""
    uses: tuple[Used, ...] = ()
    """Layers that were found by use: their parameters enter products that no layer type makes."""
    conclusive: bool = True
    """Whether every layer had a gradient to be examined by; if not, the notes hold for this call alone."""
    without_axis: int = 0
    """Layers whose calls have no axis that holds the examples."""
    more: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)
    """What others have found out since about the same model and kind of batch; no modules here either."""


_KEPT: WeakKeyDictionary[nn.Module, tuple[tuple[object, object], Notes]] = WeakKeyDictionary()
"""The last notes on each model, with the signature they hold for: of model and input, and of the target."""
_COPIES: WeakKeyDictionary[nn.Module, tuple[object, Notes]] = WeakKeyDictionary()
"""Notes on what a model is a copy of, with the kind of input they hold for."""


def examine(
    model: nn.Module,
    table: LayerTable,
    x: Tree,
    y: object,
    example_axis: int | None,
    before: Callable[[], None] = lambda: None,
    whole: bool = False,
) -> Notes:
    """Examine a model on a batch; what was found is proposed again until the model or the kind of batch changes.

    `before` is called if the model must be run. `whole` uses all examples, and nothing that was found before.
    """
    signature = _signature(model, table, x, example_axis), _target(x, y)
    kept = _KEPT.get(model)
    # Without a target there is one hint less at the axis of the examples: notes that had it are better than new ones.
    if kept is not None and not whole and kept[0][0] == signature[0] and (y is None or kept[0][1] == signature[1]):
        return kept[1]
    alike = _COPIES.get(model)
    if alike is not None and not whole and alike[0] == _inputs(x):
        return alike[1]
    before()
    with undisturbed(model):  # a forward of its own must not move buffers (spectral norm in train mode)
        notes = _examine_anew(model, table, x, y, example_axis, whole)
    if notes.conclusive:
        _KEPT[model] = signature, notes
    return notes


def examined_as(copied: nn.Module, notes: Notes | None, x: Tree) -> None:
    """A deep copy of a model that was examined is not examined again on inputs like x: the notes on the model hold.

    The copy must not be changed but for its parameters' values. Where layers of the model fall back, the copy is
    examined after all: another table may have them in other blocks.
    """
    if notes is not None and notes.conclusive and not notes.reasons:
        _COPIES[copied] = _inputs(x), notes


def _inputs(x: Tree) -> object:
    """The kind of input: types and sizes of its tensors, not how many examples there are."""
    tensors = list(leaves(x))
    sizes = [t.shape[0] if t.ndim else None for t in tensors]
    return tuple((t.dtype, t.shape[1:], n == 1, n == sizes[0]) for t, n in zip(tensors, sizes, strict=True))


def _target(x: Tree, y: object) -> object:
    first = next(leaves(x), None)
    if first is None or not isinstance(y, Tensor) or not y.ndim:
        return None
    return y.ndim, bool(first.ndim) and y.shape[0] == first.shape[0]


def _signature(model: nn.Module, table: LayerTable, x: Tree, example_axis: int | None) -> object:
    """Everything that a forward can depend on, as far as it can be seen: modules, their settings, ties, shapes."""
    modules = tuple(
        (
            name,
            type(module),
            id(module.__dict__.get("forward")),
            len(module._forward_hooks) + len(module._forward_pre_hooks),
            tuple((k, _setting(v)) for k, v in module.__dict__.items() if k not in _BOOKKEEPING),
        )
        for name, module in model.named_modules()
    )
    parameters = tuple(
        (name, id(p), p.requires_grad, p.dtype, p.device, p.shape) for name, p in model.named_parameters()
    )
    buffers = tuple((name, b.dtype, b.device, b.shape) for name, b in model.named_buffers())
    return modules, parameters, buffers, tuple(table.names()), _inputs(x), example_axis, type(model).forward


_BOOKKEEPING = frozenset(nn.Module().__dict__) - {"training"}
"""What every module has: looked at in other ways."""


def _setting(value: object) -> object:
    """A value that two forwards can be compared by: plain values themselves, functions by identity, others by type.

    Nothing that could hold the model is kept, or it would never be freed.
    """
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return tuple(_setting(item) for item in value)
    return id(value) if callable(value) else type(value)


def _examine_anew(
    model: nn.Module, table: LayerTable, x: Tree, y: object, example_axis: int | None, whole: bool
) -> Notes:
    axes = [example_axis] if example_axis is not None else likely_axes(x, y)
    trouble: InteractionError | None = None
    for axis in axes:
        n = example_count(x, axis)
        refuse_empty(n)
        found: list[Notes] = []
        for shared in _shared_inputs(model, x, axis, n):
            try:
                notes = _examine_along(
                    _record(model, table, x, shared, axis, n, n if whole else PROBE), _first_axis(y, n)
                )
                if not notes.conclusive and n > PROBE and not whole:
                    notes = _examine_along(_record(model, table, x, shared, axis, n, WIDER), _first_axis(y, n))
                found.append(notes)
                if not notes.without_axis:
                    break
            except InteractionError as error:
                trouble = trouble or error
        if found:  # inputs that are only by chance of size N may fit the outputs, but leave layers without examples
            return min(found, key=lambda notes: notes.without_axis)
    assert trouble is not None
    raise trouble


def likely_axes(x: Tree, y: object) -> list[int]:
    """Axis 0, then 1; the other way round where only axis 1 has as many entries as the target."""
    first = next(leaves(x), None)
    if first is None or first.ndim == 0:
        raise InputError(describe("an input without a batch axis", "a tensor [N, …]", "add a batch axis"))
    if first.ndim < 2:
        return [0]
    target = y.shape[0] if isinstance(y, Tensor) and y.ndim else first.shape[0]
    time_first = target == first.shape[1] and target != first.shape[0]
    return [1, 0] if time_first else [0, 1]


def _first_axis(y: object, n: int) -> int:
    """Where the output is likely to have its examples: where the target has them."""
    if isinstance(y, Tensor):
        return next((axis for axis, size in enumerate(y.shape) if size == n), 0)
    return 0


def _record(
    model: nn.Module, table: LayerTable, x: Tree, shared: frozenset[int], axis: int, n: int, few: int
) -> "_Probe":
    """A forward on the last few examples; on all of them where the model insists on its batch size."""
    sizes = (few, n) if n > few else (n,)
    for size in sizes:
        try:
            return _Probe.run(model, table, take(x, n - size, n, axis, shared), size, axis, shared)
        except (RuntimeError, ValueError, IndexError):
            if size == n:
                raise
    raise AssertionError("unreachable")


def _shared_inputs(model: nn.Module, x: Tree, axis: int, count: int) -> Iterator[frozenset[int]]:
    """Tensors of the input that do not hold the examples: of another size, or of size N by chance.

    Those must not be cut with the rest. Which they are is seen by cutting: the outputs of the last example and of the
    first stay. They may stay by chance too (a norm takes out a factor that all examples share), so that there may be
    several answers, the likeliest first. One example alone says less: of a mask over N positions the last example may
    need the last row alone.
    """
    held = holding(x, axis)
    others = frozenset(place for place, holds in enumerate(held) if not holds)
    doubtful = [place for place, holds in enumerate(held) if holds]
    if len(doubtful) < 2 or count == 1:
        yield others
        return
    # A head or a gate of zeros would hide what the inputs do.
    zero = {k: p for k, p in trainable(model).items() if not p.any()}
    lively = {k: torch.randn(p.shape, generator=stream(0, k)).to(p).requires_grad_() for k, p in zero.items()}
    whole = _plain_output(model, x, lively)
    sets = ([], *([place] for place in (*doubtful[1:], doubtful[0])), doubtful[1:], doubtful[:-1])
    fitting = 0
    for shared in dict.fromkeys(others.union(more) for more in sets):
        try:
            fits = all(
                _is_part(_plain_output(model, take(x, n, n + 1, axis, shared), lively), whole, n, count)
                for n in (count - 1, 0)
            )
        except (RuntimeError, ValueError, IndexError):
            continue
        if fits:
            fitting += 1
            yield shared
    if not fitting:
        yield others


def _plain_output(model: nn.Module, x: Tree, params: Mapping[str, Tensor]) -> Tensor:
    """With a graph, by which the output is told from others."""
    with torch.enable_grad(), undisturbed(model), substituted(model, params):
        return call(model, x).detach()


def _is_part(part: Tensor, whole: Tensor, n: int, count: int) -> bool:
    """Whether `part` is example n's share of `whole`, wherever that is."""
    for layout in candidates(tuple(whole.shape), count):
        own = layout.narrow(whole, n, n + 1, count)
        if own.shape == part.shape and _agree(own, part):
            return True
    return False


@dataclass(frozen=True)
class _Probe:
    """A few examples, run under a tape."""

    tape: Tape
    x: Tree
    f: Tensor
    n: int
    axis: int
    shared: frozenset[int]
    broadcast: frozenset[str] = frozenset()
    products: tuple[Use, ...] = ()
    """Every product with a parameter."""
    uses: tuple[Used, ...] = ()
    """What of them is in the table."""

    @classmethod
    def run(
        cls,
        model: nn.Module,
        table: LayerTable,
        x: Tree,
        n: int,
        axis: int,
        shared: frozenset[int],
        broadcast: frozenset[str] = frozenset(),
        uses: tuple[Used, ...] = (),
        sizes: Mapping[str, int] | None = None,
    ) -> "_Probe":
        products = list[Use]()

        def seen(use: Use, _: object, out: Tensor) -> Tensor:
            products.append(use)
            return out

        with (
            undisturbed(model),
            torch.enable_grad(),
            ProductTracer(model, seen),
            Tape(model, table, broadcast=broadcast, examples=n, sizes=sizes) as tape,
        ):
            f = call(model, x)
        if not f.requires_grad:
            raise InputError(
                describe(
                    "an output that no trainable parameter takes part in", "a differentiable model", "check its forward"
                )
            )
        spread = broadcast if sizes is None else frozenset(tape.spread)
        return cls(tape, x, f, n, axis, shared, spread, tuple(products), uses)

    def spread(self, modules: Collection[str]) -> "_Probe | None":
        """The same with an example axis for the inputs of these modules; None if that changes the output."""
        table, among = self.tape.table, frozenset(modules)
        sizes = {}
        for event in self.tape.events:
            sizes[event.site.module_name] = max(event.x.numel(), sizes.get(event.site.module_name, 0))
        try:
            again = _Probe.run(
                self.tape.model, table, self.x, self.n, self.axis, self.shared, among, self.uses, sizes=sizes
            )
        except Exception:  # a model may do anything with an input of another shape
            return None
        same = again.f.shape == self.f.shape and torch.allclose(again.f, self.f, rtol=1e-4, atol=1e-6)
        return again if same and again.broadcast else None  # a layer that is found by use has no module to spread at

    def by_use(self, wanted: Collection[str]) -> "_Probe | None":
        """The same with layers for parameters that are used in products; None where there are none."""
        found = propose(self.tape.model, self.products, Graph.of(self.f), wanted)
        if not found:
            return None
        table = self.tape.table.with_uses(self.tape.model, found)
        return _Probe.run(
            self.tape.model, table, self.x, self.n, self.axis, self.shared, self.broadcast, self.uses + found
        )


def _examine_along(probe: _Probe, first: int) -> Notes:
    failures: list[str] = []
    for output in _output_layouts(tuple(probe.f.shape), probe.n, first):
        found = _examine_output(probe, output)
        if isinstance(found, Notes):
            return found
        failures += found
    raise InteractionError(
        describe(
            f"a model whose batch elements interact (seen at {', '.join(sorted(set(failures))[:3]) or 'the output'})",
            "examples that do not influence one another",
            "take out operations over the batch axis, or name the axis of the examples with example_axis=",
        )
    )


def _examine_output(probe: _Probe, output: Layout) -> Notes | list[str]:
    """What is found if the output's examples are where `output` says, or the layers that contradict it."""
    n, tape, table = probe.n, probe.tape, probe.tape.table
    found = _examine_spread(probe, output, modules_without_axis(tape, n))  # positions: seen without a gradient
    if found is not None:
        return found
    verdict = verify(tape, probe.f, output, n)
    found = _examine_spread(probe, output, verdict.lost)
    if found is not None:
        return found
    if _interacts(probe, output):
        return list(verdict.lost)
    without_axis = specs_at(table, verdict.lost)
    reasons = dict.fromkeys(without_axis, NO_AXIS) | dict(verdict.reasons)
    bare = [name for spec in table.demote(reasons).layers if not spec.sites for name in spec.parameters]
    again = None if probe.uses or not probe.products else probe.by_use(bare)
    if again is not None:
        return _examine_output(again, output)
    copies = _find_copies(probe, output, bare) if bare else Copies()
    size = _recorded_bytes(tape) / n
    layouts = {event.key: verdict.layouts[event.order] for event in tape.events if event.order in verdict.layouts}
    return Notes(
        probe.axis,
        output,
        reasons,
        layouts,
        size,
        probe.broadcast,
        copies,
        probe.shared,
        probe.uses,
        verdict.conclusive,
        len(without_axis),
    )


def _examine_spread(probe: _Probe, output: Layout, modules: Collection[str]) -> Notes | None:
    """The same with an example axis for the inputs of these modules; None where that does not help."""
    shared = probe.spread(modules) if modules and not probe.broadcast else None
    found = None if shared is None else _examine_output(shared, output)
    return found if isinstance(found, Notes) and not found.without_axis else None


def _find_copies(probe: _Probe, output: Layout, bare: list[str]) -> Copies:
    v = _one_example(probe.f, output, probe.n)
    safe = Graph.of(probe.f).broadcasts()
    params = {k: p for k, p in trainable(probe.tape.model).items() if k in bare and id(p) in safe}
    if not params:
        return Copies()
    with probe.tape.replaying(), explained():
        found = torch.autograd.grad(probe.f, list(params.values()), v, retain_graph=True, allow_unused=True)
    truth = {k: None if g is None else dense(g) for k, g in zip(params, found, strict=True)}
    return find_copies(_trial(probe, output, v), list(params), truth)


def _trial(probe: _Probe, output: Layout, v: Tensor) -> Trial:
    n = probe.n
    fewer = take(probe.x, min(1, n - 1), n, probe.axis, probe.shared)
    return Trial(probe.tape.model, probe.x, n, probe.f, v, _one_example(probe.f, output, n, 0), fewer)


def _recorded_bytes(tape: Tape) -> int:
    return sum(
        event.x.numel() * event.x.itemsize + event.out_shape.numel() * event.out_dtype.itemsize for event in tape.events
    )


def _output_layouts(shape: tuple[int, ...], n: int, first: int) -> Iterator[Layout]:
    if n == 1 and shape:
        yield Layout(0) if shape[0] == 1 else Layout(0, "major")
        return
    yield from candidates(shape, n, first)


def _one_example(f: Tensor, output: Layout, n: int, example: int = -1) -> Tensor:
    """A random cotangent on one example, by default the last."""
    chosen = torch.zeros_like(f)
    layout_view = output.front(chosen, f.ndim, n)
    layout_view[example] = output.front(noise(f), f.ndim, n)[example]
    return chosen


def _interacts(probe: _Probe, output: Layout) -> bool:
    """Whether the last example's output changes when the others' inputs do."""
    n, axis, f = probe.n, probe.axis, probe.f
    if n == 1:
        return False
    held = iter(holding(probe.x, axis, probe.shared))

    def last_everywhere(t: Tensor) -> Tensor:
        return torch.cat([t.narrow(axis, n - 1, 1)] * n, dim=axis) if next(held) else t

    model, table = probe.tape.model, probe.tape.table
    # Under a tape as the probe was: a rule with a forward of its own may draw its dropout in another order.
    with torch.no_grad(), undisturbed(model), Tape(model, table, broadcast=probe.broadcast, examples=n):
        again = call(model, map_leaves(last_everywhere, probe.x))
    if again.shape != f.shape:
        return True
    before = output.front(f.detach(), f.ndim, n)[n - 1]
    after = output.front(again, f.ndim, n)[n - 1]
    return not _agree(before, after)


def _agree(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding, which is coarse in half precision; outputs that are not finite are refused elsewhere."""
    rtol = {torch.float64: 1e-8, torch.float32: 1e-4}.get(a.dtype, 4 * torch.finfo(a.dtype).eps)
    largest = float(a.abs().nan_to_num(nan=0.0, posinf=0.0).max() + 1e-30)
    return torch.allclose(a, b, rtol=rtol, atol=0.1 * rtol * largest, equal_nan=True)


def specs_at(table: LayerTable, modules: Collection[str]) -> list[str]:
    """Layers that have a call in one of these modules."""
    return [spec.name for spec in table.layers if any(site.module_name in modules for site in spec.sites)]
