"""Whether what was recorded of a forward is right: on its own graph, with all of its examples.

Two random cotangents are pulled back, the second one being the first with each example n scaled by a power of two s_n.
Pulling back is linear, so every row of a layer's output gradient that belongs to example n is scaled by s_n too, and a
row to which several examples contribute is not. This tells for every call where its examples are, whatever the sizes:
a layout that only fits because a length divides another puts rows with the wrong example.

The first of the two gives autograd's own gradient of every parameter. A layer whose recorded calls do not add up to it
(its weight is used elsewhere, or its forward is not what the rule believes) is named with that reason.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from layerwise.foundations.device import Readback
from layerwise.foundations.errors import InputError
from layerwise.foundations.random import stream
from layerwise.foundations.types import statistics_dtype, trainable
from layerwise.layers.capture.graph import Graph, parameter_names
from layerwise.layers.capture.tape import Event, Tape, explained
from layerwise.layers.capture.vectorised import dense, tolerance
from layerwise.layers.form import Part
from layerwise.layers.io.layer_io import Layout, candidates
from layerwise.layers.table import LayerSpec

NO_AXIS = "its input has no axis that holds the examples"
ROUNDS = 3
"""Times that examples are scaled anew while a call fits more than one layout."""
POWERS = 6
"""Scales are 2⁻⁶ to 2⁶: exact in every precision, so that kernels that add in one order give equal rows."""


@dataclass(frozen=True)
class Verification:
    """What verification found."""

    layouts: Mapping[int, Layout]
    """Of every call, by its place among all calls."""
    lost: tuple[str, ...] = ()
    """Modules with a call whose rows are not single examples'."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Layers that are not explained by their calls, and why."""
    mixed: tuple[str, ...] = ()
    """Copies of parameters, one an example, that get gradients of other examples too."""
    conclusive: bool = True
    """Whether every layer had a gradient to be verified by."""
    truth: Mapping[str, Tensor | None] = field(default_factory=dict, repr=False)
    """autograd's gradients for the first cotangent."""

    @property
    def right(self) -> bool:
        """Whether all that was recorded may be used."""
        return not (self.lost or self.reasons or self.mixed)


def verify(tape: Tape, f: Tensor, output: Layout, n: int, copies: Mapping[str, Tensor] | None = None) -> Verification:
    """Verify what a tape holds of the forward that gave f, whose examples are where `output` says."""
    copies = copies or {}
    u = noise(f)
    grads, params, of_copies = _pull(tape, f, u, copies)
    rows = [None if g is None else _row_sizes(event, g) for event, g in zip(tape.events, grads, strict=True)]
    flags = Flags()
    for i, r in enumerate(rows):
        flags.add(("seen", i), False if r is None else _tells(r))
    for name, g in (*params.items(), *zip(copies, of_copies, strict=True)):
        flags.add(("used", name), True if g is None else _tells(g))
    possible = [_possible(event, n) for event in tape.events]
    mixed: tuple[str, ...] = ()
    for number in range(ROUNDS if n > 1 else 0):
        scales = _scales(n, number, f)
        beside = copies if number == 0 else {}
        again, _, copies_again = _pull(tape, f, _scaled(u, output, n, scales), beside, with_params=False)
        for i, (event, r, g) in enumerate(zip(tape.events, rows, again, strict=True)):
            scaled = None if g is None else _row_sizes(event, g)
            for layout in possible[i]:
                ok = True if r is None or scaled is None else _follows(r, scaled, layout, n, scales, event.out_dtype)
                flags.add((i, layout), ok)
        for name, before, after in zip(beside, of_copies, copies_again, strict=False):
            flags.add(("own", name), _follows_copies(before, after, n, scales))
        told = flags.read()
        possible = [[layout for layout in left if told[i, layout]] for i, left in enumerate(possible)]
        mixed += tuple(name for name in beside if not told["own", name])
        if all(len(left) < 2 or not told["seen", i] for i, left in enumerate(possible)):
            break
    told = flags.read()
    # Without a gradient the likelier layout does no harm; with one that fits two, nothing is known.
    clear = [bool(left) and (n == 1 or len(left) == 1 or not told["seen", i]) for i, left in enumerate(possible)]
    layouts = {i: left[0] for i, (left, ok) in enumerate(zip(possible, clear, strict=True)) if ok}
    lost = [] if n == 1 else [e.site.module_name for e, ok in zip(tape.events, clear, strict=True) if not ok]
    tape.keep_layouts(layouts)
    skipped = {spec.name for spec in tape.table.layers if any(site.module_name in lost for site in spec.sites)}
    reasons = _unexplained(tape, grads, params, n, skipped) | used_elsewhere(tape, Graph.of(f))
    conclusive = all(ok for what, ok in told.items() if what[0] in ("seen", "used"))
    summed = [g if g is None or n == 1 else g.sum(0) for g in of_copies]
    truth = {**params, **dict(zip(copies, summed, strict=True))}
    return Verification(layouts, tuple(dict.fromkeys(lost)), reasons, mixed, conclusive, truth)


def modules_without_axis(tape: Tape, n: int) -> tuple[str, ...]:
    """Those with a call whose input has no axis, nor product of axes, of n entries."""
    without = (event.site.module_name for event in tape.events if n > 1 and not _possible(event, n))
    return tuple(dict.fromkeys(without))


def aligned_calls(tape: Tape, f: Tensor) -> frozenset[int]:
    """Calls whose rows are the output's positions, each with the gradient of that position alone; f is ``[N, S, C]``.

    Found as the examples are: positions are scaled in place of examples. A layer that mixes positions (attention) comes
    after those whose rows have gradients of several, and a layer over positions has features for its rows.
    """
    n, s = f.shape[:2]
    u = noise(f)
    scales = _scales(s, 0, f)
    rows = [_pull(tape, f, v, {}, with_params=False)[0] for v in (u, u * scales.to(u.dtype).view(1, -1, 1))]
    flags = Flags()
    for event, before, after in zip(tape.events, *rows, strict=True):
        told: Tensor | bool = False
        if before is not None and after is not None:
            by_example = [_position_sizes(tape, event, g, n) for g in (before, after)]
            if by_example[0].shape[1] == s:
                told = _follows(by_example[0], by_example[1], Layout(1), s, scales, event.out_dtype)
        flags.add(("aligned", event.order), told)
    return frozenset(order for (_, order), ok in flags.read().items() if ok)


def _tells(g: Tensor) -> Tensor:
    """Whether a gradient tells anything: it is neither infinite nor zero, nor so small that it loses digits."""
    largest = _largest(g) if g.numel() else g.sum()
    return torch.isfinite(largest) & (largest > _smallest(g.dtype))


def _largest(X: Tensor) -> Tensor:
    """The largest magnitude, without a copy for magnitudes."""
    return torch.linalg.vector_norm(X, torch.inf)


def _smallest(dtype: torch.dtype) -> float:
    """As far as gradients may be off where the precision's range ends, after some operations."""
    return 64 * torch.finfo(dtype).tiny * torch.finfo(dtype).eps


class Flags:
    """Boolean results on the device, read back together: each readback by itself would be a synchronization."""

    def __init__(self) -> None:
        self._pending: dict[tuple[Any, Any], Tensor] = {}
        self._read: dict[tuple[Any, Any], bool] = {}

    def add(self, what: tuple[Any, Any], answer: Tensor | bool) -> None:
        """One more, by its name: known already, or a tensor on the device."""
        if isinstance(answer, Tensor):
            self._pending[what] = answer
        else:
            self._read[what] = answer

    def read(self) -> dict[tuple[Any, Any], bool]:
        """All of them, after one readback."""
        if self._pending:
            values = Readback(torch.stack([t.reshape(()) for t in self._pending.values()])).array()
            self._read.update({what: bool(value) for what, value in zip(self._pending, values, strict=True)})
            self._pending = {}
        return self._read


def noise(f: Tensor) -> Tensor:
    """A random cotangent, the same for every output of this shape and kind of device.

    Drawn where f lies: an output of 3 × 1024 tokens over 50,000 words takes a CPU more than a second.
    """
    device = f.device if f.device.type == "cuda" else "cpu"
    return torch.randn(f.shape, generator=stream(0, "examine", device=device), device=device).to(f)


def _pull(
    tape: Tape, f: Tensor, u: Tensor, copies: Mapping[str, Tensor], with_params: bool = True
) -> tuple[list[Tensor | None], dict[str, Tensor | None], list[Tensor | None]]:
    """Gradients of every call's output, of every parameter and of the copies, in one backward."""
    edges = [event.edge for event in tape.events if event.edge is not None]
    params = {k: p for k, p in trainable(tape.model).items() if k in tape.table.shapes} if with_params else {}
    targets = [*edges, *params.values(), *copies.values()]
    found: Sequence[Tensor | None] = ()
    if targets:
        with tape.replaying(), explained():
            found = torch.autograd.grad(f, targets, u, retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
    found = [None if g is None else dense(g) for g in found]
    by_edge = iter(found[: len(edges)])
    of_events = [next(by_edge) if event.edge is not None else None for event in tape.events]
    of_events = [
        None if g is None else event.shaped(g, vectors=False) for g, event in zip(of_events, tape.events, strict=True)
    ]
    of_params = dict(zip(params, found[len(edges) : len(edges) + len(params)], strict=True))
    return of_events, of_params, found[len(edges) + len(params) :]


# --- where the examples are ------------------------------------------------------------------------------------------


def _possible(event: Event, n: int) -> list[Layout]:
    lead = event.site.rule.lead(event.site.module, event.site.key, event.x)
    possible = list(candidates(tuple(event.x.shape[:lead]), n))
    return possible[:1] or [Layout(0, "major")] * bool(lead) if n == 1 else possible


def _row_sizes(event: Event, grad: Tensor) -> Tensor:
    """Norms of a call's output gradient, one for each entry of the leading axes."""
    rule, module = event.site.rule, event.site.module
    lead = rule.lead(module, event.site.key, event.x)
    g = rule.outgrads(module, event.site.key, grad.unsqueeze(0))[0]
    g = g.reshape(*g.shape[:lead], -1).to(statistics_dtype(g.dtype))
    largest = _largest(g) if g.numel() else g.new_ones(())  # its square may be too small for the precision
    unit = torch.where(largest > 0, largest, 1.0)
    return (g / unit).norm(dim=-1) * unit


def _position_sizes(tape: Tape, event: Event, grad: Tensor, n: int) -> Tensor:
    """``[N, S]``: norms of a call's output gradient, the kernel's own positions included."""
    rule, module = event.site.rule, event.site.module
    lead = rule.lead(module, event.site.key, event.x)
    g = rule.outgrads(module, event.site.key, grad.unsqueeze(0))[0].to(statistics_dtype(grad.dtype))
    return tape.layout_of(event, n).front(g.norm(dim=(-2, -1)), lead, n).reshape(n, -1)


def _scales(n: int, number: int, f: Tensor) -> Tensor:
    """A power of two for each example; all different where there are few."""
    generator = stream(0, "scales", number)
    most = 2 if f.dtype == torch.float16 else POWERS  # float16 ends at 2¹⁶
    powers = torch.arange(n) % (2 * most + 1) - most
    return (2.0 ** powers[torch.randperm(n, generator=generator)].double()).to(f.device)


def _scaled(u: Tensor, output: Layout, n: int, scales: Tensor) -> Tensor:
    scaled = u.clone()
    front = output.front(scaled, u.ndim, n)
    front.mul_(scales.to(u.dtype).view(-1, *[1] * (front.ndim - 1)))
    return scaled


def _follows(rows: Tensor, scaled: Tensor, layout: Layout, n: int, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether every row is scaled as the example is that this layout says; rows of rounding noise say nothing."""
    before = layout.front(rows, rows.ndim, n).reshape(n, -1)
    after = layout.front(scaled, scaled.ndim, n).reshape(n, -1)
    expected = before * scales.to(before.dtype).unsqueeze(1)
    least = 64 * torch.finfo(before.dtype).eps
    floor = least * before.max() * scales.to(before.dtype).unsqueeze(1) + least * scaled.max() * 2.0**-POWERS
    floor = floor + (scales.to(before.dtype).max() + 1) * _smallest(dtype)
    apart = (after - expected).abs() > max(tolerance(dtype), 1e-3) * expected + floor
    return ~apart.any()  # of what is not finite nothing can be said


def _follows_copies(before: Tensor | None, after: Tensor | None, n: int, scales: Tensor) -> Tensor | bool:
    """Whether the gradient of each copy is its example's alone."""
    if before is None or after is None:
        return True
    sizes = [g.reshape(n, -1).double().norm(dim=1) for g in (before, after)]
    return _follows(sizes[0], sizes[1], Layout(), n, scales, before.dtype)


# --- whether the calls are all there is ------------------------------------------------------------------------------


def _unexplained(
    tape: Tape,
    grads: Sequence[Tensor | None],
    params: Mapping[str, Tensor | None],
    n: int,
    skipped: set[str],
) -> dict[str, str]:
    """Layers whose calls do not add up to autograd's gradient, with the reason."""
    for event, grad in zip(tape.events, grads, strict=True):
        event.grad = None if grad is None else grad.unsqueeze(0)
    specs = [spec for spec in tape.table.layers if spec.sites and spec.name not in skipped]
    device = next(tape.model.parameters()).device
    reasons: dict[str, str] = {}
    squares: dict[str, Tensor] = {}
    try:
        for spec in specs:
            own = _captured(tape, spec, n)
            if own is None:
                reasons[spec.name] = "its calls do not have the shape its rule expects"
            else:
                squares[spec.name] = _squares(own, {name: params.get(name) for name in spec.parameters}, spec, device)
    finally:
        for event in tape.events:
            event.grad = None
    if squares:
        read = Readback(torch.stack(list(squares.values()))).array()
        by_name = {spec.name: spec for spec in specs}
        for name, (gap, scale) in zip(squares, read, strict=True):
            calls = tape.calls_of(by_name[name])
            error = float(gap / scale) ** 0.5 if scale > 0 else float(gap) ** 0.5
            if not calls and error > 0:
                reasons[name] = "its weight is used, but its module is never called"
            elif calls and error > tolerance(calls[0].out_dtype, calls[0].x.device):
                reasons[name] = (
                    f"its calls explain another gradient than autograd's (relative error {error:.1g}): "
                    "the weight is used elsewhere, the forward is not the layer type's own, or the gradient is zero "
                    "but for rounding"
                )
    return reasons


def used_elsewhere(tape: Tape, graph: Graph) -> dict[str, str]:
    """Layers with a parameter that enters more operations than the layers' recorded calls have.

    Seen in the graph and not in the gradient, where a gate of zero would hide it, and rounding a small share.
    """
    calls = Counter[str]()
    for spec in tape.table.layers:
        for name in spec.parameters:
            calls[name] += len(tape.calls_of(spec))
    names, uses = parameter_names(trainable(tape.model).items()), graph.uses()
    more = {names[leaf] for leaf, count in uses.items() if leaf in names and count > calls[names[leaf]]}
    return {
        spec.name: "its weight (or bias) is used elsewhere too, outside its calls"
        for spec in tape.table.layers
        if spec.sites and tape.calls_of(spec) and more.intersection(spec.parameters)
    }


def _captured(tape: Tape, spec: LayerSpec, n: int) -> dict[Part, Tensor] | None:
    """The gradient that a layer's calls explain; empty without calls, None where they do not fit the rule."""
    if not tape.calls_of(spec):
        return {}
    try:
        return dict(spec.form.split(tape.io(spec, 1, n).grad()[0]))
    except (RuntimeError, ValueError, IndexError, InputError):
        return None


def _squares(
    own: Mapping[Part, Tensor], expected: Mapping[str, Tensor | None], spec: LayerSpec, device: torch.device
) -> Tensor:
    """Squares of the gap and of autograd's gradient, over weight and bias: one alone may be zero but for rounding. In
    units of that gradient's largest entry, with which they are in the range of single precision."""
    pairs = list[tuple[Tensor, Tensor]]()
    for part in spec.form.parts:
        truth, grad = expected[part.name], own.get(part)
        right = None if truth is None else part.of({part.name: truth})
        like = right if grad is None else grad
        if like is not None and like.numel():
            left, right = (torch.zeros_like(like) if X is None else X for X in (grad, right))
            pairs.append((left.to(statistics_dtype(left.dtype)), right.to(statistics_dtype(right.dtype))))
    gap = scale = torch.zeros((), dtype=torch.float64, device=device)
    if pairs:
        largest = torch.stack([_largest(right).to(device) for _, right in pairs]).max()
        unit = torch.where(largest > 0, largest, 1.0)
        for left, right in pairs:
            own_unit = unit.to(right.device)
            gap = gap + _sum_of_squares((left - right) / own_unit).to(device)
            scale = scale + _sum_of_squares(right / own_unit).to(device)
    return torch.stack([gap, scale])


def _sum_of_squares(X: Tensor) -> Tensor:
    """In double precision, of rows whose norms are in X's own: of a large matrix a fifth of the time."""
    return torch.linalg.vector_norm(torch.atleast_2d(X).flatten(1), dim=1).double().square().sum()
