"""`Tape`: the one capture. It records every layer's input and pulls back its output gradient.

    with Tape(model, table) as tape:
        f = model(x)
    ios = tape.pull(f, v)                    # v: [V, N, *out], explicit
    tape.listen(); loss.backward(); ios = tape.heard()   # passive: the user's own backward

Gradients are taken with respect to gradient *edges*, not tensors: an in-place operation on a layer's output
(``ReLU(inplace=True)``) would silently make the stored tensor stand for something else.
"""

import weakref
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from layerwise.foundations.errors import InputError, UnsupportedError, describe
from layerwise.foundations.sharded import is_sharded, local, whole_gradient, whole_input
from layerwise.foundations.types import unwrap
from layerwise.layers.capture.graph import Graph
from layerwise.layers.capture.model_call import backward_of_another, in_own_forward, own_backward, without_fast_path
from layerwise.layers.capture.uses import ProductTracer, Use, same_use
from layerwise.layers.capture.vectorised import batched_grad
from layerwise.layers.form import RULES
from layerwise.layers.io.layer_io import CHUNK_BYTES, LayerCall, LayerIO, Layout, RecordedIO
from layerwise.layers.rules.linear import LinearRule
from layerwise.layers.rules.products import Product
from layerwise.layers.table import LayerSpec, LayerTable, Site, has_own_forward

SiteKey = tuple[str, str, int]
"""Module name, call site, and how many calls came before: what a layout is kept under."""


@dataclass(frozen=True)
class Divided:
    """A call of a layer that several ranks make together, each with a part of its weight (tensor parallelism)."""

    mesh: Any
    shape: torch.Size
    """Of the output that this rank has."""
    blocks: bool

    def whole(self, g: Tensor, shape: torch.Size) -> Tensor:
        """The gradient of the whole output. A collective, but for `blocks`."""
        return whole_gradient(g if is_sharded(g) else g.reshape(self.shape), self.mesh, shape, self.blocks)


@dataclass(slots=True, weakref_slot=True, eq=False)
class Event:
    """One recorded call."""

    site: Site
    number: int
    order: int
    """Its place among all calls."""
    x: Tensor
    version: int
    edge: GradientEdge | None
    """None where the output needs no gradient, and in a tape that only listens."""
    out_shape: torch.Size
    out_dtype: torch.dtype
    live: bool = True
    """Whether a gradient may come."""
    lent: bool = False
    """Whether somebody may write over x: see `_lent`."""
    waiting: int = 0
    """Layers that still need the gradient."""
    divided: "Divided | None" = None
    """How the output is divided among ranks (tensor parallelism); `out_shape` is that of the whole."""
    grad: Tensor | None = field(default=None, repr=False)

    @property
    def key(self) -> SiteKey:
        """Where its layout is kept."""
        return self.site.module_name, self.site.key, self.number

    def shaped(self, g: Tensor, vectors: bool = True) -> Tensor:
        """A gradient of the output's own shape; that of a view's base has another."""
        if self.divided is not None:
            return self.divided.whole(g, self.out_shape)
        return g.reshape((*g.shape[:1], *self.out_shape) if vectors else self.out_shape)

    def missing_grad(self, vectors: int) -> Tensor:
        """The gradient of a call that the output does not depend on."""
        return torch.zeros((), dtype=self.out_dtype, device=self.x.device).expand(vectors, *self.out_shape)


_PATCHES: "weakref.WeakKeyDictionary[nn.Module, dict[int, Callable[..., None]]]" = weakref.WeakKeyDictionary()
"""Modules whose forward is replaced by their rule's at present, with the record function of each open tape."""


OUTPUT_PROJECTION = nn.modules.linear.NonDynamicallyQuantizableLinear
"""What the output projection of attention is, and nothing else."""
GRAPHED = ("GraphedBackward", "CompiledFunctionBackward")
"""What makes outputs of `torch.cuda.make_graphed_callables`, and of compiled functions, which may be graphs."""


def _unpatch(module: nn.Module, tape: "Tape") -> None:
    """Take a tape off a patched module; after the last one, the forward of its class is restored."""
    recorders = _PATCHES.get(module, {})
    recorders.pop(id(tape), None)
    if not recorders and "forward" in vars(module):
        del module.forward


def _hidden_parents(model: nn.Module, sites: Collection[nn.Module]) -> list[nn.Module]:
    """Modules that call a recorded child only in their rule's forward: an attention whose own projections fall back."""
    if not any(isinstance(module, OUTPUT_PROJECTION) for module in sites):
        return []
    own = [(module, RULES.find(type(module))) for module in model.modules() if module not in sites]
    return [
        module
        for module, rule in own
        if rule is not None
        and rule.own_forward
        and has_own_forward(module)
        and any(child in sites for child in module.children())
    ]


def _in_checkpoint() -> bool:
    """Whether saved tensors are intercepted, as inside a checkpoint that does not re-enter autograd."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None  # type: ignore[attr-defined]


class Tape:
    """Records the calls of a model's layers while active; see the module's docstring."""

    def __init__(
        self,
        model: nn.Module,
        table: LayerTable,
        layouts: Mapping[SiteKey, Layout] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        broadcast: Collection[str] = (),
        examples: int = 1,
        until_released: bool = False,
        listens: bool = False,
        by_rows: bool = False,
        sizes: Mapping[str, int] | None = None,
        blocks: bool = False,
    ) -> None:
        self.broadcast, self.examples = broadcast, examples
        self.blocks = blocks
        """Whether of a layer that ranks divide among them each has its own features alone, among zeros, so that
        second moments are block-diagonal; else features are gathered."""
        self.sizes = sizes
        """Numbers of input entries of the modules in `broadcast`, recorded without broadcasting: an input with more of
        them has got its example axis from an earlier module already. None: inputs are not compared."""
        self.spread: set[str] = set()
        """Modules of `broadcast` whose input was given an axis for the examples."""
        self.by_rows = by_rows
        """Whether a layer whose rows are no examples' (tokens that are routed) is handed over, each row an example."""
        self.listens = listens
        """Whether it takes gradients from the user's backward alone: then it holds no part of the graph."""
        self.until_released = until_released
        """Whether modules inside a checkpoint keep the rule's forward after the tape is closed, until `release`."""
        self.model, self.table = unwrap(model), table
        self.layouts: Mapping[SiteKey, Layout] = layouts or {}
        self.chunk_bytes = chunk_bytes
        self.aligned: Container[int] = range(2**62)
        """Calls, by their place, whose rows are the output's positions: there a mask of positions holds."""
        self.kept: int | None = None
        """How many positions the mask of the outputs keeps, where that is known."""
        self.events: list[Event] = []
        self._events_at: dict[tuple[str, str], list[Event]] = {}
        self._recording = False
        self._arrived: Callable[[Event, Tensor], None] | None = None
        self._handles: list[Any] = []
        self._patched: list[nn.Module] = []
        self._forwards: list[tuple[nn.Module, Callable[..., Any]]] = []
        self._held: list[nn.Module] = []
        self._own = False
        self._tracer: ProductTracer | None = None
        self._self: weakref.ref[Tape] = weakref.ref(self)

    # --- recording ---------------------------------------------------------------------------------------

    def __enter__(self) -> "Tape":
        sites: dict[nn.Module, list[Site]] = {}
        by_use = dict[str, list[Site]]()
        for spec in self.table.layers:
            for site in spec.sites:
                if site.used is not None:
                    for part in site.used.form.parts:
                        by_use.setdefault(part.name, []).append(site)
                    continue
                known = sites.setdefault(site.module, [])
                if site not in known:
                    known.append(site)
        for module in _hidden_parents(self.model, sites):
            self._patch(module, [])
        self._open = without_fast_path()
        self._open.__enter__()
        for module, of_module in sites.items():
            if of_module[0].rule.own_forward:
                self._patch(module, of_module)
                continue
            if of_module[0].module_name in self.broadcast:
                hook = partial(self._spread, of_module[0].module_name)
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._hook(of_module), with_kwargs=True))
        self._recording, self._own = True, in_own_forward()
        if by_use:
            self._tracer = ProductTracer(self.model, self._product(by_use))
            self._tracer.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._recording = False
        if self._tracer is not None:
            self._tracer.__exit__(None, None, None)
            self._tracer = None
        self._open.__exit__(None, None, None)
        for handle in self._handles:
            handle.remove()
        for module in self._patched:
            if module not in self._held:
                _unpatch(module, self)
        self._handles, self._patched = [], []

    def release(self) -> None:
        """Nothing more is expected: nobody is notified, and modules inside a checkpoint have their own forward back."""
        self._recording, self._arrived = False, None
        for module in self._held:
            _unpatch(module, self)
        self._held = []

    def _spread(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give an input that all examples share (position indices) an axis of its own for them."""
        x = args[0] if args else next(iter(kwargs.values()))
        if self.sizes is not None and x.numel() > self.sizes[name]:
            return args, kwargs
        self.spread.add(name)
        own_axis = x.ndim > 1 and x.shape[0] == 1
        spread = x.expand(self.examples, *(x.shape[1:] if own_axis else x.shape))
        return ((spread, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): spread})

    def _hook(self, sites: list[Site]) -> Callable[..., None]:
        only = sites[0] if len(sites) == 1 else None

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            x = args[0] if args else next(iter(kwargs.values()), None)
            if only is not None:
                self._record(only, x, out)
                return
            for site in sites:
                self._record(site, x, out)

        return hook

    def _product(self, by_use: Mapping[str, list[Site]]) -> Callable[[Use, Product, Tensor], Tensor]:
        def seen(use: Use, product: Product, out: Tensor) -> Tensor:
            known = [*by_use.get(use.weight, ()), *by_use.get(use.bias or "", ())]
            sites = [site for site in dict.fromkeys(known) if site.used is not None and same_use(site.used, use)]
            if not sites or not out.requires_grad:
                return out
            rows = product.to_rows(out)  # gradients come with the axes of the rows
            for site in sites:
                self._record(site, product.x, rows)
            return product.from_rows(rows)

        return seen

    def _patch(self, module: nn.Module, sites: list[Site]) -> None:
        by_key = {site.key: site for site in sites}
        rule = RULES.find(type(module))
        assert rule is not None

        def record(key: str, x: Tensor, out: Tensor) -> None:
            if key in by_key:
                self._record(by_key[key], x, out)

        def forward(*args: Any, **kwargs: Any) -> Any:
            return rule.forward(module, record, *args, **kwargs)

        def for_all(*args: Any, **kwargs: Any) -> Any:
            if self._recording and self.until_released and _in_checkpoint() and module not in self._held:
                self._held.append(module)  # it is run again in the backward, and must then do the same

            def tell(key: str, x: Tensor, out: Tensor) -> None:
                for recorder in list(_PATCHES.get(module, {}).values()):
                    recorder(key, x, out)

            return rule.forward(module, tell, *args, **kwargs)

        vars(forward)["of_rule"] = vars(for_all)["of_rule"] = True
        recorders = _PATCHES.setdefault(module, {})
        if "forward" not in vars(module) or not recorders:
            module.forward = for_all  # type: ignore[method-assign]
        recorders[id(self)] = record
        self._patched.append(module)
        self._forwards.append((module, forward))

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Modules with a forward of the rule's own keep it, for a checkpoint that runs them again in the backward."""
        again = [(module, vars(module).get("forward"), forward) for module, forward in self._forwards]
        for module, _, forward in again:
            module.forward = forward  # type: ignore[method-assign]
        try:
            yield
        finally:
            for module, before, _ in again:
                if before is None:
                    del module.forward
                else:
                    module.forward = before  # type: ignore[method-assign]

    def _record(self, site: Site, x: Any, out: Any) -> None:
        if not self._recording or not isinstance(x, Tensor) or not isinstance(out, Tensor):
            return
        if in_own_forward() != self._own:  # a forward of the library's inside one of the user's, or the reverse
            return
        where = (site.module_name, site.key)
        before = self._events_at.get(where)
        if before is None:
            before = self._events_at[where] = []
        live = out.requires_grad
        if not live or not out.numel():  # under no_grad, such as targets that are not differentiated; or of no rows
            return
        base = _base_of(out)
        edge = None if self.listens else base or get_gradient_edge(out)
        order, divided, shape = len(self.events), None, out.shape
        if is_sharded(x):
            if not isinstance(site.rule, LinearRule):  # falls back: see `layerwise.optim.engine`
                return
            held: Any = x
            module: Any = site.module
            divided = Divided(held.device_mesh, local(out).shape, self.blocks)
            shape = torch.Size((*x.shape[:-1], module.out_features))
            raw, lent = whole_input(x, self.blocks)
        else:
            raw, lent = x.detach(), _lent(x if x._base is None else x._base)
        event = Event(site, len(before), order, raw, raw._version, edge, shape, out.dtype, live, lent, divided=divided)
        self.events.append(event)
        before.append(event)
        notify = _notify(self._self, weakref.ref(event))
        if base is None:
            out.register_hook(notify)
        else:
            place = base.output_nr
            base.node.register_prehook(lambda grads: None if grads[place] is None else notify(grads[place]))

    def on_grad(self, event: Event, g: Tensor) -> None:
        """A gradient reached a recorded output."""
        arrived = self._arrived
        if arrived is not None and not backward_of_another(self):
            as_it_is = g.shape == event.out_shape and event.divided is None
            arrived(event, g if as_it_is else event.shaped(g, vectors=False))

    # --- pulling back ------------------------------------------------------------------------------------

    def pull(
        self,
        f: Float[Tensor, "N *out"],
        v: Float[Tensor, "V N *out"],
        retain_graph: bool = False,
        mask: Tensor | None = None,
    ) -> dict[str, LayerIO]:
        """Pull V cotangents back to every layer at once, in one batched backward."""
        return self.pull_beside(f, v, (), retain_graph, mask)[0]

    def pull_beside(
        self,
        f: Float[Tensor, "N *out"],
        v: Float[Tensor, "V N *out"],
        leaves: Sequence[Tensor],
        retain_graph: bool = False,
        mask: Tensor | None = None,
    ) -> tuple[dict[str, LayerIO], list[Tensor | None]]:
        """The same, and the gradients of `leaves` from the same backward."""
        self._check_inputs()
        live = [event for event in self.events if event.edge is not None]
        with own_backward(self):
            grads = batched_grad(f, [*(event.edge for event in live), *leaves], v, retain_graph)
        for event, grad in zip(live, grads[: len(live)], strict=True):
            event.grad = None if grad is None else event.shaped(grad)
        ios: dict[str, LayerIO] = {
            spec.name: self.io(spec, v.shape[0], f.shape[0], mask) for spec in self._recorded_specs()
        }
        for event in self.events:
            event.grad = None
        return ios, grads[len(live) :]

    def stream(
        self,
        f: Float[Tensor, "N *out"],
        v: Float[Tensor, "N *out"],
        consume: Callable[[LayerSpec, LayerIO], None],
        retain_graph: bool = False,
        mask: Tensor | None = None,
        leaves: Sequence[Tensor] = (),
        forgetting: bool = False,
    ) -> list[Tensor | None]:
        """Pull one cotangent back and hand over each layer as its gradient arrives, so that none is kept.

        Returns the gradients of `leaves`, which are taken in the same backward. `forgetting` leaves out calls on which
        the output does not depend (`forget_unreached`), and reads the graph only if there are some.
        """
        self._check_inputs()
        examples = f.shape[0]
        remaining = {spec.name: spec for spec in self._recorded_specs()}
        waiting, missing = self._subscribe(remaining.values())

        def hand_over(spec: LayerSpec) -> None:
            consume(spec, self.io(spec, 1, examples, mask))
            del remaining[spec.name]
            for event in self.calls_of(spec):
                event.waiting -= 1
                if event.waiting == 0:
                    event.grad = None

        def arrived(event: Event, g: Tensor) -> None:
            event.grad = g.detach().unsqueeze(0)
            for spec in waiting.pop(id(event), []):
                missing[spec.name] -= 1
                if missing[spec.name] == 0:
                    hand_over(spec)

        sources = _sources(self.events)
        self._arrived = arrived
        grads: tuple[Tensor | None, ...] = ()
        try:
            targets = [*sources, *leaves]
            if targets:
                with own_backward(self):
                    grads = torch.autograd.grad(f, targets, v, retain_graph=retain_graph, allow_unused=True)
            ends = {edge.node: g for edge, g in zip(sources, grads, strict=False) if g is not None}
            for event in self.events:  # the node at which a backward ends is not run, and calls no hook of its own
                if id(event) in waiting and event.edge is not None and event.edge.node in ends:
                    arrived(event, event.shaped(ends[event.edge.node], vectors=False))
        finally:
            self._arrived = None
        if remaining and forgetting:  # the output does not depend on some of their calls
            self.forget_unreached(Graph.of(f).places)
        for spec in list(remaining.values()):
            if self.calls_of(spec):
                hand_over(spec)
        return list(grads[len(sources) :])

    def listen(self) -> None:
        """Fill output gradients from the next backward that the user makes."""
        self._recording = False
        heard: dict[int, Tensor] = {}

        def arrived(event: Event, g: Tensor) -> None:
            heard[id(event)] = heard[id(event)] + g.detach() if id(event) in heard else g.detach()
            event.grad = heard[id(event)].unsqueeze(0)

        self._arrived = arrived

    def heard(self, examples: int | None = None, mask: Tensor | None = None) -> dict[str, LayerIO]:
        """What `listen` has caught. `examples` is N; by default the size of the first recorded input."""
        self._arrived = None
        self._check_inputs()
        if examples is None:
            first = self.events[0]
            layout = self.layouts.get(first.key, Layout())
            examples = first.x.shape[layout.axis]
        return {spec.name: self.io(spec, 1, examples, mask) for spec in self._recorded_specs()}

    def forget_unreached(self, reached: Container[Any]) -> None:
        """Leave out calls on which the output does not depend: of stop-gradient targets, of other outputs."""
        kept = [event for event in self.events if event.edge is not None and event.edge.node in reached]
        if len(kept) < len(self.events):
            self.events, self._events_at = [], {}
            for order, event in enumerate(kept):
                before = self._events_at.setdefault((event.site.module_name, event.site.key), [])
                event.number, event.order = len(before), order
                before.append(event)
                self.events.append(event)

    def keep_layouts(self, layouts: Mapping[int, Layout]) -> None:
        """Where the examples are in every call, by its place among all."""
        if layouts:
            self.layouts = {event.key: layouts[event.order] for event in self.events if event.order in layouts}

    def subscriptions(self) -> tuple[dict[int, list[LayerSpec]], dict[str, int]]:
        """For callers with hooks of their own: the layers that need each event's gradient, and how many each lacks."""
        self._recording = False
        return self._subscribe(self._recorded_specs())

    def notify(self, arrived: Callable[[Event, Tensor], None] | None) -> None:
        """Call this with every recorded output's gradient from now on; None: no more."""
        self._recording = False
        self._arrived = arrived

    def calls_of(self, spec: LayerSpec) -> list[Event]:
        """The recorded calls of a layer, in order."""
        if len(spec.sites) == 1:
            site = spec.sites[0]
            return self._events_at.get((site.module_name, site.key), [])
        places = dict.fromkeys((site.module_name, site.key) for site in spec.sites)
        found = [event for place in places for event in self._events_at.get(place, ())]
        return found if len(places) == 1 else sorted(found, key=lambda event: event.order)

    def _recorded_specs(self) -> list[LayerSpec]:
        return [spec for spec in self.table.layers if spec.sites and self.calls_of(spec)]

    def _subscribe(self, specs: Iterable[LayerSpec]) -> tuple[dict[int, list[LayerSpec]], dict[str, int]]:
        """The layers that need each event's gradient, and how many gradients each layer still lacks."""
        waiting: dict[int, list[LayerSpec]] = {}
        missing: dict[str, int] = {}
        for spec in specs:
            for event in self.calls_of(spec):
                event.waiting += 1
                if event.live:
                    waiting.setdefault(id(event), []).append(spec)
                    missing[spec.name] = missing.get(spec.name, 0) + 1
        return waiting, missing

    def io(
        self, spec: LayerSpec, vectors: int, examples: int, mask: Tensor | None = None, reached: bool = False
    ) -> RecordedIO:
        """What a layer did, from the gradients its calls now hold (zero where they hold none).

        `reached` leaves those without a gradient out.
        """
        events = [event for event in self.calls_of(spec) if not reached or event.grad is not None]
        if self.by_rows and not all(self._fits(event, examples) for event in events):
            return self._io_of_rows(spec, events, vectors)
        calls = []
        for event in events:
            dy = event.missing_grad(vectors) if event.grad is None else event.grad
            layout, aligned = self.layout_of(event, examples), event.order in self.aligned
            calls.append(LayerCall(event.site, event.x, dy, layout, event.lent, aligned))
        return RecordedIO(spec, tuple(calls), examples, mask, self.chunk_bytes, None if mask is None else self.kept)

    def _io_of_rows(self, spec: LayerSpec, events: Sequence[Event], vectors: int) -> RecordedIO:
        """All rows of all calls as one call, each an example of its own."""
        inputs, grads = [], []
        for event in events:
            lead = event.site.rule.lead(event.site.module, event.site.key, event.x)
            dy = event.missing_grad(vectors) if event.grad is None else event.grad
            inputs.append(event.x.flatten(0, lead - 1) if lead else event.x.unsqueeze(0))
            grads.append(dy.flatten(1, lead) if lead else dy.unsqueeze(1))
        x, dy = torch.cat(inputs), torch.cat(grads, dim=1)
        call = LayerCall(events[0].site, x, dy, Layout(), any(event.lent for event in events), aligned=False)
        return RecordedIO(spec, (call,), x.shape[0], None, self.chunk_bytes)

    def _known_layout(self, event: Event) -> Layout:
        site = event.site
        known = self.layouts.get((site.module_name, site.key, event.number))
        return self.layouts.get((site.module_name, site.key, 0), Layout()) if known is None else known

    def _fits(self, event: Event, examples: int) -> bool:
        known, site = self._known_layout(event), event.site
        lead = event.x.shape[: site.rule.lead(site.module, site.key, event.x)]
        return known.fits(lead, examples) or (examples == 1 and known.merged is not None)

    def layout_of(self, event: Event, examples: int) -> Layout:
        """Where the examples are in this call."""
        site, x, known = event.site, event.x, self._known_layout(event)
        if not self._fits(event, examples):
            raise InputError(
                describe(
                    f"layer {site.module_name!r} called on an input of shape {tuple(x.shape)}",
                    f"{examples} examples on axis {known.axis}{' merged with positions' if known.merged else ''}, "
                    "as in the first batch",
                    "give batches of one kind, or leave the layer out with select=",
                )
            )
        return known

    def _check_inputs(self) -> None:
        self._recording = False
        for event in self.events:
            if event.x._version != event.version:
                raise InputError(
                    describe(
                        f"an in-place change of the input of layer {event.site.module_name!r} after the layer used it",
                        "inputs that stay as the layer saw them",
                        "replace the in-place operation (x += y, relu_(x), …) by one that makes a new tensor",
                    )
                )


def _base_of(out: Tensor) -> GradientEdge | None:
    """Where the gradient of an output comes by that is a view of what its layer computed, as of ``[N, T, I]`` rows.

    An operation in place on a view takes the view's own node out of the graph (autograd then copies into the base).
    """
    base, node = out._base, out.grad_fn
    if base is None or node is None or type(node).__name__ != "ViewBackward0" or base.numel() != out.numel():
        return None
    before, place = node.next_functions[0]
    return None if before is None else GradientEdge(before, place)


def _lent(x: Tensor) -> bool:
    """Whether x is the user's own (one that has a gradient of its own, too), or of a CUDA graph that is replayed."""
    return x.is_leaf or (x.grad_fn is not None and x.grad_fn.name() in GRAPHED)


def _notify(tape: "weakref.ref[Tape]", event: "weakref.ref[Event]") -> Callable[[Tensor], None]:
    """A hook that keeps neither alive: the graph holds the hook, and an event holds the graph.

    The garbage collector does not see such a cycle through autograd's nodes, and would never free it.
    """

    def hook(g: Tensor) -> None:
        listener, recorded = tape(), event()
        if listener is not None and recorded is not None:
            listener.on_grad(recorded, g)

    return hook


@contextmanager
def explained() -> Iterator[None]:
    """Say what to do about a model that autograd refuses to differentiate this way."""
    try:
        yield
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise UnsupportedError(
            describe(
                "a model with checkpoint(…, use_reentrant=True)",
                "gradients with respect to chosen tensors, which that kind does not allow",
                "pass use_reentrant=False to torch.utils.checkpoint.checkpoint",
            )
        ) from error


def _sources(events: Iterable[Event]) -> list[GradientEdge]:
    """Edges from which no other recorded edge can be reached.

    A backward down to these passes through every recorded layer, and keeps no gradient but theirs. From most edges
    another one is some operations away, which a search by breadth meets first: not the whole graph is read.
    """
    recorded = {event.edge.node: event.edge for event in events if event.edge is not None}
    dead_ends, found = set[Any](), list[GradientEdge]()
    for first, edge in recorded.items():
        met, left, reaches = {first}, deque([first]), False
        while left and not reaches:
            for child, _ in left.popleft().next_functions:
                if child in recorded:
                    reaches = True
                elif child is not None and child not in met and child not in dead_ends:
                    met.add(child)
                    left.append(child)
        if not reaches:
            dead_ends |= met - {first}
            found.append(edge)
    return found
