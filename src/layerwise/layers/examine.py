"""First use of a model: where the examples are in every layer, and whether its layers tell the whole gradient.

One example of a small batch gets a cotangent. A layer's gradient must then be non-zero in that example's rows
only, which finds the example axis (time-first and merged layouts included) or shows that examples interact.
The same backward gives autograd's own parameter gradients; a layer whose calls do not add up to them (its
weight is used elsewhere, its forward is not what the rule believes) falls back, with that reason.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, InteractionError, describe
from layerwise.foundations.random import stream
from layerwise.foundations.types import Tree, leaves, map_leaves
from layerwise.foundations.vectors import trainable
from layerwise.layers.calling import call, example_count, take, undisturbed
from layerwise.layers.copies import Copies, find_copies
from layerwise.layers.form import Part
from layerwise.layers.layout import Layout, candidates, holds_alone
from layerwise.layers.table import LayerTable
from layerwise.layers.tape import Event, SiteKey, Tape

PROBE = 2
"""Examples that the examination uses; it costs one forward and backward on them."""


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


_KEPT: WeakKeyDictionary[nn.Module, tuple[object, Notes]] = WeakKeyDictionary()
"""The last notes on each model, with the signature they hold for."""


def examine(model: nn.Module, table: LayerTable, x: Tree, y: object, example_axis: int | None) -> Notes:
    """Examine a model on its first batch; what was found is kept until the model or the kind of batch changes."""
    signature = _signature(model, table, x, y, example_axis)
    kept = _KEPT.get(model)
    if kept is not None and kept[0] == signature:
        return kept[1]
    with undisturbed(model):  # a forward of its own must not move buffers (spectral norm in train mode)
        notes = _examine_anew(model, table, x, y, example_axis)
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
            tuple((k, v) for k, v in module.__dict__.items() if isinstance(v, bool | int | float | str | tuple)),
        )
        for name, module in model.named_modules()
    )
    parameters = tuple((name, id(p), p.requires_grad, p.dtype) for name, p in model.named_parameters())
    inputs = tuple((t.dtype, t.ndim, t.shape[1:], t.shape[0] == 1) for t in leaves(x))
    target = (y.ndim, y.shape[0] == next(leaves(x)).shape[0]) if isinstance(y, Tensor) and y.ndim else None
    return modules, parameters, tuple(table.names()), inputs, target, example_axis, type(model).forward


def _examine_anew(model: nn.Module, table: LayerTable, x: Tree, y: object, example_axis: int | None) -> Notes:
    axes = [example_axis] if example_axis is not None else _likely_axes(x, y)
    trouble: InteractionError | None = None
    for axis in axes:
        n = example_count(x, axis)
        if n == 0:
            raise InputError(describe("a batch with 0 examples", "at least one example", "leave empty batches out"))
        try:
            return _examine_along(_record(model, table, x, axis, n), _first_axis(y, n))
        except InteractionError as error:
            trouble = trouble or error
    assert trouble is not None
    raise trouble


def _likely_axes(x: Tree, y: object) -> list[int]:
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


def _record(model: nn.Module, table: LayerTable, x: Tree, axis: int, n: int) -> "_Probe":
    """A forward on the last few examples; on all of them where the model insists on its batch size."""
    sizes = (PROBE, n) if n > PROBE else (n,)
    for size in sizes:
        few = take(x, n - size, n, axis)
        try:
            return _Probe.run(model, table, few, size, axis)
        except (RuntimeError, ValueError, IndexError):
            if size == n:
                raise
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class _Probe:
    """A few examples, run under a tape."""

    tape: Tape
    x: Tree
    f: Tensor
    n: int
    axis: int
    broadcast: frozenset[str] = frozenset()

    @classmethod
    def run(
        cls, model: nn.Module, table: LayerTable, x: Tree, n: int, axis: int, broadcast: frozenset[str] = frozenset()
    ) -> "_Probe":
        with (
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
            Tape(model, table, broadcast=broadcast, examples=n) as tape,
        ):
            f = call(model, x)
        if not f.requires_grad:
            raise InputError(
                describe("an output that no trainable parameter takes part in", "a differentiable model", "check it")
            )
        return cls(tape, x, f, n, axis, broadcast)

    def spread(self, modules: list[str]) -> "_Probe | None":
        """The same with an example axis for the inputs of these modules; None if that changes the output."""
        try:
            again = _Probe.run(self.tape.model, self.tape.table, self.x, self.n, self.axis, frozenset(modules))
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
    layouts, lost = _find_layouts(probe.tape.events, event_grads, n)
    if lost and not probe.broadcast:
        shared = probe.spread(lost)
        if shared is not None:
            found = _examine_output(shared, output)
            if isinstance(found, Notes) and NO_AXIS not in found.reasons.values():
                return found
    if lost and _interacts(probe, output):
        return lost
    table = probe.tape.table
    reasons = dict.fromkeys(_specs_at(table, lost), NO_AXIS)
    probe.tape.layouts = layouts
    reasons |= _gradient_mismatches(probe.tape, table, event_grads, param_grads, n, set(reasons))
    bare = [name for spec in table.demote(reasons).layers if not spec.sites for name in spec.parameters]
    with torch.random.fork_rng(devices=[]):
        copies = find_copies(probe.tape.model, bare, probe.x, n, probe.f, v, param_grads)
    size = _recorded_bytes(probe.tape) / n
    return Notes(probe.axis, output, reasons, layouts, size, probe.broadcast, copies)


def _recorded_bytes(tape: Tape) -> int:
    return sum(
        event.x.numel() * event.x.itemsize + event.out_shape.numel() * event.out_dtype.itemsize for event in tape.events
    )


def _output_layouts(shape: tuple[int, ...], n: int, first: int) -> Iterator[Layout]:
    if n == 1 and shape:
        yield Layout(0) if shape[0] == 1 else Layout(0, "major")
        return
    yield from candidates(shape, n, first)


def _one_example(f: Tensor, output: Layout, n: int) -> Tensor:
    """A random cotangent on the last example."""
    noise = torch.randn(f.shape, generator=stream(0, "examine")).to(f)
    chosen = torch.zeros_like(f)
    layout_view = output.front(chosen, f.ndim, n)
    layout_view[n - 1] = output.front(noise, f.ndim, n)[n - 1]
    return chosen


def _gradients(tape: Tape, f: Tensor, v: Tensor) -> tuple[list[Tensor | None], dict[str, Tensor | None]]:
    """Gradients of every recorded output and of every parameter, in one backward."""
    edges = [event.edge for event in tape.events if event.edge is not None]
    params = {name: p for name, p in trainable(tape.model).items() if name in tape.table.shapes}
    found = torch.autograd.grad(f, [*edges, *params.values()], v, retain_graph=True, allow_unused=True)  # type: ignore[list-item]
    by_edge = iter(found[: len(edges)])
    event_grads = [next(by_edge) if event.edge is not None else None for event in tape.events]
    return event_grads, dict(zip(params, found[len(edges) :], strict=True))


def _find_layouts(events: list[Event], grads: list[Tensor | None], n: int) -> tuple[dict[SiteKey, Layout], list[str]]:
    """A layout for each call, and the names of those that have none."""
    layouts, lost = {}, []
    for event, grad in zip(events, grads, strict=True):
        rule, module = event.site.rule, event.site.module
        lead = rule.lead(module, event.site.key, event.x)
        sizes = tuple(event.x.shape[:lead])
        possible = list(candidates(sizes, n))
        if n == 1 and lead and not possible:
            possible = [Layout(0, "major")]
        if grad is not None and n > 1:
            g = rule.outgrads(module, event.site.key, grad.unsqueeze(0))[0]
            support = (g != 0).reshape(*g.shape[:lead], -1).any(-1)
            possible = [layout for layout in possible if holds_alone(support, layout, n, n - 1)]
        if possible:
            layouts[event.key] = possible[0]
        else:
            lost.append(event.site.module_name)
    return layouts, lost


def _interacts(probe: _Probe, output: Layout) -> bool:
    """Whether the last example's output changes when the others' inputs do."""
    n, axis, f = probe.n, probe.axis, probe.f
    if n == 1:
        return False
    size = next(leaves(probe.x)).shape[axis]

    def last_everywhere(t: Tensor) -> Tensor:
        held = t.ndim > axis and t.shape[axis] == size
        return torch.cat([t.narrow(axis, n - 1, 1)] * n, dim=axis) if held else t

    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        again = call(probe.tape.model, map_leaves(last_everywhere, probe.x))
    if again.shape != f.shape:
        return True
    before = output.front(f.detach(), f.ndim, n)[n - 1]
    after = output.front(again, f.ndim, n)[n - 1]
    return not torch.allclose(before, after, rtol=1e-4, atol=1e-5 * float(before.abs().max() + 1e-30))


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
