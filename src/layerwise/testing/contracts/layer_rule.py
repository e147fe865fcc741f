"""`check_layer_rule`: a rule puts its layer in standard form, and the form tells autograd's gradients."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from layerwise.foundations.likelihoods import Gaussian
from layerwise.foundations.types import Tree, leaves, map_leaves
from layerwise.layers.capture.model_call import call, output_tensor, take
from layerwise.layers.capture.recorder import Batch, ModelRecorder
from layerwise.layers.capture.tape import Event, Tape
from layerwise.layers.form import RULES, Form, LayerRule, Part
from layerwise.layers.io.one_hot import OneHot
from layerwise.layers.table import LayerTable
from layerwise.testing.contracts.agreement import Agreement


def check_layer_rule(
    module: nn.Module,
    x: Tree,
    *,
    dtype: torch.dtype = torch.float64,
    tol: float = 1e-8,
    uncovered: tuple[str, ...] = (),
) -> None:
    """Check the rule registered for a module's type, on a copy of the module in eval mode.

    Its forms must cover the module's parameters; per-example gradients by the standard form must be those of
    plain autograd, example by example, for one and for several cotangents, with each parameter frozen in turn,
    with further leading axes and with examples on another axis where the layer allows them; and the rule's fast
    routes to second moments must agree with its `inputs`.

    >>> check_layer_rule(nn.Linear(3, 2), torch.randn(4, 3))

    Args:
        module: a layer of the type that the rule is for.
        x: what it is called with, examples on axis 0: a tensor, a tuple (``module(*x)``) or a mapping
            (``module(**x)``). Three or four examples are enough.
        dtype: the model and floating inputs are brought to it.
        tol: relative to the largest entry.
        uncovered: parameters that the rule leaves to the fall-back on purpose.

    Raises:
        AssertionError: naming the rule and what differs.
    """
    kind = type(module).__name__
    rule = RULES.find(type(module))
    if rule is None:
        raise AssertionError(f"{kind} has no layer rule; register one with @lw.layer_rule({kind})")
    agree = Agreement(f"{type(rule).__name__} for {kind}", tol)
    why = rule.refuses(module)
    agree.require(why is None, f"refuses this module: {why}")
    subject = _Subject(rule, _prepared(module, dtype), _cast(x, dtype), agree)
    with agree.step("forms"):
        _check_forms(subject, uncovered)
    for vectors in (1, 3):
        with agree.step(f"the standard form with V={vectors}"):
            _check_gradients(subject, vectors)
    with agree.step("the standard form after examination"):
        _check_found(subject, swap=False)
    with agree.step("second moments"):
        _check_moments(subject)
    _check_frozen(subject, uncovered)
    _check_leading_axes(subject)


class _Model(nn.Module):
    """The layer and a non-linearity; with `swap`, the layer has the first two axes exchanged."""

    def __init__(self, layer: nn.Module, swap: bool = False) -> None:
        super().__init__()
        self.layer, self.swap = layer, swap

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """tanh of the layer."""
        if self.swap:
            args = tuple(t.transpose(0, 1) for t in args)
        out = output_tensor(self.layer(*args, **kwargs)).tanh()
        return out.transpose(0, 1) if self.swap else out


@dataclass(frozen=True)
class _Subject:
    """A rule, a layer of its type, inputs, and the judge."""

    rule: LayerRule
    module: nn.Module
    x: Tree
    agree: Agreement

    @property
    def examples(self) -> int:
        return next(leaves(self.x)).shape[0]

    def record(self) -> tuple[Tape, Tensor]:
        """A forward of the layer under a tape, without any examination that would let a wrong rule fall back."""
        model = _Model(self.module)
        with torch.enable_grad(), Tape(model, LayerTable.from_model(model)) as tape:
            f = call(model, self.x)
        return tape, f

    def trainable(self) -> dict[str, nn.Parameter]:
        """The layer's own parameters, by name inside it."""
        return {name: p for name, p in self.module.named_parameters(recurse=False) if p.requires_grad}

    def forms(self) -> dict[str, Form]:
        """What the rule says of the trainable parameters."""
        parts = {name: Part(name, tuple(p.shape)) for name, p in self.trainable().items()}
        return self.rule.forms(self.module, parts)


def _cast(x: Tree, dtype: torch.dtype) -> Tree:
    return map_leaves(lambda t: t.detach().to(dtype) if t.is_floating_point() else t, x)


def _prepared(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy in eval mode, every parameter trainable and away from its initial value."""
    copied = copy.deepcopy(module).to(dtype).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in copied.parameters():
            p.requires_grad_(True)
            p.add_(0.2 * torch.randn(p.shape, generator=generator).to(p))
    return copied


# --- forms ------------------------------------------------------------------------------------------------


def _check_forms(subject: _Subject, uncovered: tuple[str, ...]) -> None:
    agree, parameters, forms = subject.agree, subject.trainable(), subject.forms()
    covered = {name: torch.zeros(p.shape, dtype=torch.int64) for name, p in parameters.items()}
    for site, form in forms.items():
        _check_sizes(agree, site, form, parameters)
        for part in form.parts:
            part.of(covered).add_(1)
    for name, count in covered.items():
        if name in uncovered:
            agree.require(not bool(count.any()), f"parameter {name!r} is in a form, though it is said to be left out")
            continue
        agree.require(bool((count > 0).all()), f"no form covers all of parameter {name!r}")
        agree.require(bool((count < 2).all()), f"several forms cover parameter {name!r}")
    generator = torch.Generator().manual_seed(1)
    for site, form in forms.items():
        values = {name: torch.randn(2, *p.shape, generator=generator) for name, p in parameters.items()}
        for part, piece in form.split(form.join(values)):
            agree.close(piece, part.of(values), f"site {site!r}: split(join(·)) of {part.name!r}", tol=0.0)
        W = torch.randn(3, *form.shape, generator=generator)
        again = form.join({part.name: _embed(part, piece) for part, piece in form.split(W)})
        agree.close(again, W, f"site {site!r}: join(split(·))", tol=0.0)


def _check_sizes(agree: Agreement, site: str, form: Form, parameters: Mapping[str, Tensor]) -> None:
    for part in form.parts:
        agree.require(part.name in parameters, f"site {site!r}: {part.name!r} is no trainable parameter of the layer")
    k, o, i = form.groups, form.outputs, form.weight_inputs
    if form.weight is not None:
        shape = form.weight.part_shape()
        agree.require(k * o * i == math.prod(shape), f"site {site!r}: K·O·I = {k}·{o}·{i} does not fit weight {shape}")
    else:
        agree.require(i == 0, f"site {site!r}: weight_inputs is {i} though no weight takes part")
    if form.bias is not None:
        shape = form.bias.part_shape()
        agree.require(k * o == math.prod(shape), f"site {site!r}: K·O = {k}·{o} does not fit bias {shape}")


def _embed(part: Part, piece: Tensor) -> Tensor:
    """A tensor of the whole parameter's shape that has `piece` in the part's rows."""
    lead = piece.shape[: piece.ndim - len(part.shape)]
    whole = piece.new_zeros(*lead, *part.shape)
    part.of({part.name: whole}).copy_(piece)
    return whole


# --- gradients --------------------------------------------------------------------------------------------


def _cotangents(vectors: int, f: Tensor) -> Tensor:
    drawn = torch.randn(vectors, *f.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return drawn.to(f)


def _example_gradients(subject: _Subject, v: Tensor) -> dict[str, Tensor]:
    """``{parameter: [V, N, *shape]}`` by plain autograd, one example and one cotangent at a time."""
    parameters, model = subject.trainable(), _Model(subject.module)
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for n in range(subject.examples):
        with torch.enable_grad():
            f = call(model, take(subject.x, n, n + 1, 0))
        for v_n in v[:, n : n + 1]:
            grads = torch.autograd.grad(f, list(parameters.values()), v_n, retain_graph=True, allow_unused=True)
            for (name, p), grad in zip(parameters.items(), grads, strict=True):
                rows[name].append(torch.zeros_like(p) if grad is None else grad)
    by_example = {name: torch.stack(r).unflatten(0, (subject.examples, len(v))) for name, r in rows.items()}
    return {name: t.transpose(0, 1) for name, t in by_example.items()}


def _check_gradients(subject: _Subject, vectors: int) -> None:
    """Without examination, so that the message can say what differs."""
    agree = subject.agree
    tape, f = subject.record()
    agree.require(
        f.shape[:1] == (subject.examples,),
        f"the layer's output has shape {tuple(f.shape)}, which does not begin with the {subject.examples} examples",
    )
    v = _cotangents(vectors, f)
    expected = _example_gradients(subject, v)
    own = {id(site.module): None for spec in tape.table.layers for site in spec.sites}
    agree.require(id(subject.module) in own, "no form of the layer was recorded in a table")
    for event in tape.events:
        if event.site.module is subject.module:
            _check_shapes(subject, event)
    for name, io in tape.pull(f, v).items():
        spec = tape.table.spec(name)
        if spec.sites[0].module is not subject.module:
            continue
        for part, rows in spec.form.split(io.rows()):
            local = part.name.removeprefix("layer.")
            truth = Part(local, part.shape, part.rows).of(expected)
            where = f"{local!r} (site {spec.sites[0].key!r}, V={vectors})"
            agree.close(rows, truth, f"per-example gradients of {where}, against autograd's,")
        summed = torch.stack([chunk.grad() for chunk in io.chunks(gradients=False)]).sum(0)
        for part, grad in spec.form.split(summed):
            local = part.name.removeprefix("layer.")
            truth = Part(local, part.shape, part.rows).of(expected).sum(1)
            agree.close(grad, truth, f"the gradient of {local!r} summed over examples (V={vectors})")
    called = {event.site.key for event in tape.events if event.site.module is subject.module}
    for site in subject.forms():
        agree.require(site in called, f"site {site!r} has a form, but no call of it was recorded")


def _check_shapes(subject: _Subject, event: Event) -> None:
    """`inputs` and `outgrads` have the axes the form says."""
    agree, rule, site = subject.agree, subject.rule, event.site.key
    form = subject.forms()[site]
    lead = rule.lead(subject.module, site, event.x)
    agree.require(1 <= lead <= event.x.ndim, f"lead is {lead} for an input of shape {tuple(event.x.shape)}")
    front = tuple(event.x.shape[:lead])
    g = rule.outgrads(subject.module, site, torch.zeros(2, *event.out_shape, dtype=event.out_dtype))
    if form.weight is not None:
        a = rule.inputs(subject.module, site, event.x)
        wanted = (*front, "S", form.groups, form.weight_inputs)
        fits = a.shape[:lead] == front and len(a.shape) == lead + 3 and a.shape[-2:] == wanted[-2:]
        agree.require(fits, f"site {site!r}: inputs has shape {tuple(a.shape)}, expected {wanted}")
        agree.require(isinstance(a, OneHot) == form.one_hot, f"site {site!r}: one_hot is {form.one_hot} in the form")
        same = g.ndim == lead + 4 and a.shape[lead] == g.shape[lead + 1]
        agree.require(same, f"site {site!r}: inputs has shape {tuple(a.shape)}, outgrads {tuple(g.shape)}: S differs")
    wanted = (2, *front, "S", form.groups, form.outputs)
    fits = g.ndim == lead + 4 and g.shape[: lead + 1] == (2, *front) and g.shape[-2:] == wanted[-2:]
    agree.require(fits, f"site {site!r}: outgrads has shape {tuple(g.shape)}, expected {wanted}")


def _check_found(subject: _Subject, swap: bool) -> None:
    """As the library itself records: the examples' axis is found, and the layer does not fall back."""
    agree = subject.agree
    model = _Model(subject.module, swap)
    f = call(model, subject.x).detach()
    v = _cotangents(2, f)
    expected = _example_gradients(subject, v)
    recorder = ModelRecorder(model, LayerTable.from_model(model), example_axis=0)
    with recorder.session():
        recorded = recorder.record(Batch(subject.x, None, None, 0), Gaussian(), batched=True)
        rows = recorded.all_layers(v.reshape(2, *recorded.terms.f.shape), last=True)
    where = ", with examples on axis 1 of the layer" if swap else ""
    for site in subject.forms():
        name = f"layer.{site}" if site else "layer"
        reasons = [spec.reason for spec in recorder.table.layers if spec.reason and not spec.sites]
        agree.require(name in rows, f"site {site!r} falls back{where}: {'; '.join(reasons) or 'it was not recorded'}")
        for part, grad in recorder.table.spec(name).form.split(rows[name].rows()):
            local = part.name.removeprefix("layer.")
            truth = Part(local, part.shape, part.rows).of(expected)
            agree.close(grad, truth, f"per-example gradients of {local!r}{where}")


# --- fast routes, frozen parameters, leading axes ---------------------------------------------------------


def _check_moments(subject: _Subject) -> None:
    """Fast routes against the product of `inputs` with itself."""
    forms, rule, agree = subject.forms(), subject.rule, subject.agree
    for event in subject.record()[0].events:
        if event.site.module is not subject.module or forms[event.site.key].weight is None:
            continue
        site, form = event.site.key, forms[event.site.key]
        a = rule.inputs(subject.module, site, event.x)
        if isinstance(a, OneHot):
            continue
        rows = a.reshape(-1, *a.shape[-2:]).movedim(1, 0)
        plain = (rows.mT @ rows, rows.sum(1), rows.shape[1])
        found = {"input_moment": rule.input_moment(subject.module, site, event.x)}
        if form.taps == 1:
            found["channel_moment"] = rule.channel_moment(subject.module, site, event.x)
        for route, moment in found.items():
            if moment is not None:
                agree.close(moment[0], plain[0], f"Σ aaᵀ by {route}, against that of inputs,")
                agree.close(moment[1], plain[1], f"Σ a by {route}, against that of inputs,")
                agree.require(moment[2] == plain[2], f"{route} counts {moment[2]} rows, inputs has {plain[2]}")


def _check_frozen(subject: _Subject, uncovered: tuple[str, ...]) -> None:
    """Every parameter that has a peer, frozen in turn."""
    parameters = subject.trainable()
    if len(parameters) < 2:
        return
    for name, parameter in parameters.items():
        parameter.requires_grad_(False)
        try:
            with subject.agree.step(f"the standard form with {name!r} frozen"):
                _check_forms(subject, tuple(n for n in uncovered if n != name))
                if subject.forms():
                    _check_gradients(subject, 2)
        finally:
            parameter.requires_grad_(True)


def _check_leading_axes(subject: _Subject) -> None:
    """One more leading axis, and the examples on the second, where rule and layer allow them."""
    if not isinstance(subject.x, Tensor) or subject.rule.own_forward:
        return
    x = torch.stack([subject.x, subject.x.flip(0)], dim=1)
    deeper = _Subject(subject.rule, subject.module, x, subject.agree)
    sites = list(subject.forms())
    grows = all(_lead(subject, site, x) == _lead(subject, site, subject.x) + 1 for site in sites)
    if not grows or not _runs(lambda: call(_Model(subject.module), x)):
        return
    with subject.agree.step("the standard form with one more leading axis"):
        _check_gradients(deeper, 2)
        _check_found(deeper, swap=True)


def _lead(subject: _Subject, site: str, x: Tensor) -> int:
    return subject.rule.lead(subject.module, site, x)


def _runs(forward: Callable[[], Tensor]) -> bool:
    try:
        forward()
    except (RuntimeError, ValueError, IndexError):
        return False
    return True
