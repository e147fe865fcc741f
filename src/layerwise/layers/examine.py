"""First use of a model: where the examples are in every layer, and whether its layers tell the whole gradient.

One example of a small batch gets a cotangent, the last and then the first. A layer's gradient must then be
non-zero in that example's rows only, which finds the example axis (time-first and merged layouts included) or
shows that examples interact.
The same backward gives autograd's own parameter gradients; a layer whose calls do not add up to them (its
weight is used elsewhere, its forward is not what the rule believes) falls back, with that reason.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, InteractionError, describe
from layerwise.foundations.random import stream
from layerwise.foundations.types import Tree, leaves, map_leaves
from layerwise.foundations.vectors import trainable
from layerwise.layers.calling import call, example_count, holding, refuse_empty, take, undisturbed
from layerwise.layers.copies import Copies, Trial, find_copies
from layerwise.layers.form import Part
from layerwise.layers.layout import Layout, candidates, holds_alone
from layerwise.layers.table import LayerTable
from layerwise.layers.tape import Event, SiteKey, Tape, explained
from layerwise.layers.vectorised import dense

PROBE = 3
"""Examples that the examination uses; it costs a few forwards and backwards on them.

With two, the middle of an odd number of positions would belong to either example, whichever runs faster.
"""
WIDER = 16
"""Examples that are used where some layer has no gradient on the first few (dead units, zero-initialised branches)."""
TRIES = 8
"""Examples that are given a cotangent, one after another, until no layer's layout is in doubt."""


NO_AXIS = "its input has no axis that holds the examples"


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
    conclusive: bool = True
    """Whether every layer had a gradient to be examined by; if not, the notes hold for this call alone."""
    more: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)
    """What others have found out since about the same model and kind of batch; no modules here either."""


_KEPT: WeakKeyDictionary[nn.Module, tuple[object, Notes]] = WeakKeyDictionary()
"""The last notes on each model, with the signature they hold for."""


def examine(
    model: nn.Module,
    table: LayerTable,
    x: Tree,
    y: object,
    example_axis: int | None,
    before: Callable[[], None] = lambda: None,
) -> Notes:
    """Examine a model on its first batch; what was found is kept until the model or the kind of batch changes.

    `before` is called if the model must be run.
    """
    signature = _signature(model, table, x, y, example_axis)
    kept = _KEPT.get(model)
    if kept is not None and kept[0] == signature:
        return kept[1]
    before()
    with undisturbed(model):  # a forward of its own must not move buffers (spectral norm in train mode)
        notes = _examine_anew(model, table, x, y, example_axis)
    if notes.conclusive:
        _KEPT[model] = signature, notes
    return notes


def _signature(model: nn.Module, table: LayerTable, x: Tree, y: object, example_axis: int | None) -> object:
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
    tensors = list(leaves(x))
    sizes = [t.shape[0] if t.ndim else None for t in tensors]
    inputs = tuple((t.dtype, t.shape[1:], n == 1, n == sizes[0]) for t, n in zip(tensors, sizes, strict=True))
    target = (y.ndim, y.shape[0] == sizes[0]) if isinstance(y, Tensor) and y.ndim else None
    return modules, parameters, buffers, tuple(table.names()), inputs, target, example_axis, type(model).forward


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


def _examine_anew(model: nn.Module, table: LayerTable, x: Tree, y: object, example_axis: int | None) -> Notes:
    axes = [example_axis] if example_axis is not None else likely_axes(x, y)
    trouble: InteractionError | None = None
    for axis in axes:
        n = example_count(x, axis)
        refuse_empty(n)
        try:
            notes = _examine_along(_record(model, table, x, axis, n, PROBE), _first_axis(y, n))
            if not notes.conclusive and n > PROBE:
                notes = _examine_along(_record(model, table, x, axis, n, WIDER), _first_axis(y, n))
            return notes
        except InteractionError as error:
            trouble = trouble or error
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


def _record(model: nn.Module, table: LayerTable, x: Tree, axis: int, n: int, few: int) -> "_Probe":
    """A forward on the last few examples; on all of them where the model insists on its batch size."""
    shared = _shared_inputs(model, x, axis, n)
    sizes = (few, n) if n > few else (n,)
    for size in sizes:
        try:
            return _Probe.run(model, table, take(x, n - size, n, axis, shared), size, axis, shared)
        except (RuntimeError, ValueError, IndexError):
            if size == n:
                raise
    raise AssertionError("unreachable")


def _shared_inputs(model: nn.Module, x: Tree, axis: int, n: int) -> frozenset[int]:
    """Tensors of the input that do not hold the examples: of another size, or of size N by chance.

    Those must not be cut with the rest. Which they are is seen by cutting: the output of the last examples stays.
    """
    held = holding(x, axis)
    others = frozenset(place for place, holds in enumerate(held) if not holds)
    doubtful = [place for place in range(1, len(held)) if held[place]]
    if not doubtful or n == 1:
        return others
    whole = _plain_output(model, x)
    for more in ([], *([place] for place in doubtful), doubtful):
        shared = others.union(more)
        try:
            part = _plain_output(model, take(x, n - 1, n, axis, shared))
        except (RuntimeError, ValueError, IndexError):
            continue
        if _is_part(part, whole, n):
            return shared
    return others


def _plain_output(model: nn.Module, x: Tree) -> Tensor:
    with torch.no_grad(), undisturbed(model):
        return call(model, x)


def _is_part(part: Tensor, whole: Tensor, n: int) -> bool:
    """Whether `part` is the last example's share of `whole`, wherever that is."""
    for layout in candidates(tuple(whole.shape), n):
        last = layout.narrow(whole, n - 1, n, n)
        if last.shape == part.shape and _agree(last, part, 1e-3):
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
    ) -> "_Probe":
        with (
            undisturbed(model),
            torch.enable_grad(),
            Tape(model, table, broadcast=broadcast, examples=n) as tape,
        ):
            f = call(model, x)
        if not f.requires_grad:
            raise InputError(
                describe("an output that no trainable parameter takes part in", "a differentiable model", "check it")
            )
        return cls(tape, x, f, n, axis, shared, broadcast)

    def spread(self, modules: list[str]) -> "_Probe | None":
        """The same with an example axis for the inputs of these modules; None if that changes the output."""
        try:
            again = _Probe.run(
                self.tape.model, self.tape.table, self.x, self.n, self.axis, self.shared, frozenset(modules)
            )
        except (RuntimeError, ValueError, IndexError):
            return None
        same = again.f.shape == self.f.shape and torch.allclose(again.f, self.f, rtol=1e-4, atol=1e-6)
        return again if same else None


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
    n, v = probe.n, _one_example(probe.f, output, probe.n)
    event_grads, param_grads = _gradients(probe.tape, probe.f, v)
    truth = param_grads
    layouts, lost = _find_layouts(probe, output, event_grads)
    if lost and not probe.broadcast:
        shared = probe.spread(lost)
        if shared is not None:
            found = _examine_output(shared, output)
            if isinstance(found, Notes) and NO_AXIS not in found.reasons.values():
                return found
    if _interacts(probe, output):
        return lost
    table = probe.tape.table
    reasons = dict.fromkeys(_specs_at(table, lost), NO_AXIS)
    probe.tape.layouts = layouts
    if not _complete(param_grads):  # another example may have the gradient that the last one has not
        event_grads, param_grads = _gradients(probe.tape, probe.f, _noise(probe.f))
    reasons |= _gradient_mismatches(probe.tape, table, event_grads, param_grads, n, set(reasons))
    bare = [name for spec in table.demote(reasons).layers if not spec.sites for name in spec.parameters]
    copies = find_copies(_trial(probe, output, v), bare, truth)
    size = _recorded_bytes(probe.tape) / n
    complete = _complete(param_grads)
    return Notes(probe.axis, output, reasons, layouts, size, probe.broadcast, copies, probe.shared, complete)


def _trial(probe: _Probe, output: Layout, v: Tensor) -> Trial:
    n = probe.n
    fewer = take(probe.x, min(1, n - 1), n, probe.axis, probe.shared)
    return Trial(probe.tape.model, probe.x, n, probe.f, v, _one_example(probe.f, output, n, 0), fewer)


def _complete(grads: Mapping[str, Tensor | None]) -> bool:
    """Whether every parameter that is used has a gradient other than zero."""
    return all(g is None or bool(g.any()) for g in grads.values())


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
    layout_view[example] = output.front(_noise(f), f.ndim, n)[example]
    return chosen


def _noise(f: Tensor) -> Tensor:
    return torch.randn(f.shape, generator=stream(0, "examine")).to(f)


def _gradients(tape: Tape, f: Tensor, v: Tensor) -> tuple[list[Tensor | None], dict[str, Tensor | None]]:
    """Gradients of every recorded output and of every parameter, in one backward."""
    edges = [event.edge for event in tape.events if event.edge is not None]
    params = {name: p for name, p in trainable(tape.model).items() if name in tape.table.shapes}
    with tape.replaying(), explained():
        found = torch.autograd.grad(f, [*edges, *params.values()], v, retain_graph=True, allow_unused=True)  # type: ignore[list-item]
    found = [None if g is None else dense(g) for g in found]
    by_edge = iter(found[: len(edges)])
    event_grads = [next(by_edge) if event.edge is not None else None for event in tape.events]
    return event_grads, dict(zip(params, found[len(edges) :], strict=True))


def _find_layouts(probe: _Probe, output: Layout, grads: list[Tensor | None]) -> tuple[dict[SiteKey, Layout], list[str]]:
    """A layout for each call, and the names of those that have none; `grads` are those of the last example."""
    n, events = probe.n, probe.tape.events
    possible = [_possible_layouts(event, n) for event in events]
    seen = [False] * len(events)
    for example in (n - 1, *range(min(n, TRIES) - 1)):
        if example < n - 1:
            grads = _gradients(probe.tape, probe.f, _one_example(probe.f, output, n, example))[0]
        for i, (event, grad) in enumerate(zip(events, grads, strict=True)):
            if grad is not None and n > 1:
                support = _support(event, grad)
                seen[i] |= bool(support.any())
                possible[i] = [layout for layout in possible[i] if holds_alone(support, layout, n, example)]
        if example == 0 and all(len(left) < 2 or found for left, found in zip(possible, seen, strict=True)):
            break
    # Gradients that fit two layouts say nothing (unless there are none at all: then the likelier one does no harm).
    clear = [bool(left) and (len(left) == 1 or not found) for left, found in zip(possible, seen, strict=True)]
    layouts = {event.key: left[0] for event, left, ok in zip(events, possible, clear, strict=True) if ok}
    return layouts, [event.site.module_name for event, ok in zip(events, clear, strict=True) if not ok]


def _possible_layouts(event: Event, n: int) -> list[Layout]:
    lead = event.site.rule.lead(event.site.module, event.site.key, event.x)
    possible = list(candidates(tuple(event.x.shape[:lead]), n))
    return possible[:1] or [Layout(0, "major")] * bool(lead) if n == 1 else possible


def _support(event: Event, grad: Tensor) -> Tensor:
    """Where a call's output gradient is not zero, over the leading axes."""
    rule, module = event.site.rule, event.site.module
    lead = rule.lead(module, event.site.key, event.x)
    g = rule.outgrads(module, event.site.key, grad.unsqueeze(0))[0]
    return (g != 0).reshape(*g.shape[:lead], -1).any(-1)


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
    return not _agree(before, after, 1e-4)


def _agree(a: Tensor, b: Tensor, rtol: float) -> bool:
    """Equal but for rounding, which is coarse in half precision."""
    rtol = max(rtol, 4 * torch.finfo(a.dtype).eps)
    return torch.allclose(a, b, rtol=rtol, atol=0.1 * rtol * float(a.abs().max() + 1e-30))


def _specs_at(table: LayerTable, modules: list[str]) -> list[str]:
    return [spec.name for spec in table.layers if any(site.module_name in modules for site in spec.sites)]


def _gradient_mismatches(
    tape: Tape,
    table: LayerTable,
    event_grads: list[Tensor | None],
    param_grads: dict[str, Tensor | None],
    n: int,
    skip: set[str],
) -> dict[str, str]:
    """Layers whose calls do not add up to autograd's gradient, with the reason."""
    for event, grad in zip(tape.events, event_grads, strict=True):
        event.grad = None if grad is None else grad.unsqueeze(0)
    reasons = {}
    for spec in table.layers:
        if not spec.sites or spec.name in skip:
            continue
        calls = tape.calls_of(spec)
        expected = {name: param_grads[name] for name in spec.parameters}
        if not calls:
            if any(g is not None and bool(g.any()) for g in expected.values()):
                reasons[spec.name] = "its weight is used, but its module is never called"
            continue
        try:
            own = dict(spec.form.split(tape.io(spec, 1, n).grad()[0]))
        except (RuntimeError, ValueError, IndexError, InputError):
            reasons[spec.name] = "its calls do not have the shape its rule expects"
            continue
        error = _relative_error(own, expected)
        if error > _tolerance(calls[0].out_dtype):
            reasons[spec.name] = (
                f"its calls explain another gradient than autograd's (relative error {error:.1g}): "
                "the weight is used elsewhere, or the forward is not the layer type's own"
            )
    for event in tape.events:
        event.grad = None
    return reasons


def _relative_error(own: dict[Part, Tensor], expected: dict[str, Tensor | None]) -> float:
    """Over weight and bias together: the gradient of one alone may be zero but for rounding (a key's bias)."""
    gap = scale = 0.0
    for part, grad in own.items():
        truth = expected[part.name]
        right = torch.zeros_like(grad) if truth is None else part.of({part.name: truth})
        gap += float((grad.double() - right.double()).square().sum())
        scale += float(right.double().square().sum())
    return (gap / scale) ** 0.5 if scale > 0 else gap**0.5


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-6, torch.float32: 1e-2}.get(dtype, 0.2)
