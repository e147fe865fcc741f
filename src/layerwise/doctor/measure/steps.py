"""What the next step of each optimizer would do, in the quadratic model of the loss, and what the loss does there.

Statistics and direction d come from one half of the examples, gradient and curvature along d from the other: a
direction that has only learned the noise of its own examples gets no credit for it.
"""

import copy
import dataclasses
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from layerwise import optim
from layerwise.doctor.clock import Clock
from layerwise.doctor.measure.layer_sums import eigh_seconds, factor_sizes
from layerwise.doctor.measurements import OwnStep, Step
from layerwise.foundations.errors import LayerwiseError
from layerwise.foundations.likelihoods import Likelihood, Terms
from layerwise.foundations.vectors import ParamVector
from layerwise.layers.capture.examine import examined_as
from layerwise.layers.capture.linearize import Linearization
from layerwise.layers.capture.model_call import call, undisturbed
from layerwise.layers.capture.recorder import Batch, ModelRecorder
from layerwise.layers.table import LayerTable

MEMBERS = ("SGD", "Adam", "Sign", "Muon", "FOOF", "KFAC", "EKFAC", "SOAP", "Shampoo")
"""In the order in which they are measured: cheap ones first."""
WARM_UP = 5
"""Steps at rate zero that fill an optimizer's running means before its direction is looked at."""

DECOMPOSE = {"EKFAC": 1.6, "SOAP": 1.6, "Shampoo": 1.6}
"""Members that decompose both factors of a layer; the null space of a factor of few rows is decomposed as well."""
GRADIENTS_ALONE = ("SGD", "Adam", "Sign", "Muon", "SOAP", "Shampoo")
"""Members that look at no forward: one backward of each batch serves all of them."""
HELD_BYTES = 2**30
"""Memory for those gradients; beyond it they are computed again."""
RATE = 1e-3
"""At which a direction is looked at: small enough for no bound on updates, large enough for float32."""


@dataclass(frozen=True, eq=False)
class Line:
    """The quadratic model along directions: ``L(θ − η d) ≈ L − η ∇Lᵀd + ½ η² dᵀF d``."""

    model: nn.Module
    recorder: ModelRecorder
    likelihood: Likelihood
    batches: Sequence[Batch]
    _linearization: list[Linearization] = field(default_factory=list, repr=False)
    _only_terms: list[Terms] = field(default_factory=list, init=False, repr=False)
    """Of a single batch, with their graph: every direction is pushed through the same. New for other batches."""

    _held: dict[int, dict[str, Tensor]] = field(default_factory=dict, init=False, repr=False)
    """Gradients of single batches, by their number."""

    def batch_gradient(self, batch: Batch) -> dict[str, Tensor]:
        """Of the mean loss of one batch, for the parameters that it reaches."""
        if batch.number in self._held:
            return self._held[batch.number]
        params = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        with undisturbed(self.model), torch.enable_grad():
            losses, weights = self._terms(batch)
            grads = torch.autograd.grad(losses / weights, list(params.values()), allow_unused=True)
        found = {name: grad for name, grad in zip(params, grads, strict=True) if grad is not None}
        size = sum(grad.numel() * grad.element_size() for grad in found.values())
        if size * (len(self._held) + 1) <= HELD_BYTES:
            self._held[batch.number] = found
        return found

    def loss(self) -> float:
        """At the parameters as they are, a mean over terms."""
        total = weight = 0.0
        with torch.no_grad(), undisturbed(self.model):
            for batch in self.batches:
                losses, weights = self._terms(batch)
                total, weight = total + float(losses), weight + float(weights)
        return total / max(weight, 1e-300)

    def gradient(self) -> ParamVector:
        """Of that mean."""
        names = list(self.recorder.table.shapes)
        params = dict(self.model.named_parameters())
        total, weight = {name: torch.zeros_like(params[name]) for name in names}, 0.0
        with undisturbed(self.model):
            for batch in self.batches:
                with torch.enable_grad():
                    losses, weights = self._terms(batch)
                    if not losses.requires_grad:
                        continue
                    grads = torch.autograd.grad(losses, [params[name] for name in names], allow_unused=True)
                weight += float(weights)
                for name, grad in zip(names, grads, strict=True):
                    if grad is not None:
                        total[name] += grad
        return ParamVector({name: grad / max(weight, 1e-300) for name, grad in total.items()})

    def curvature(self, d: ParamVector) -> float:
        """``dᵀ F d = 1/Σw Σ (J d)ᵀ H (J d)`` with the exact Fisher matrix, all layers together."""
        if not self._linearization:
            self._linearization.append(Linearization(self.model, list(self.recorder.table.shapes)))
        linear, total, weight = self._linearization[0], 0.0, 0.0
        columns = {name: direction.unsqueeze(0) for name, direction in d.items()}
        with undisturbed(self.model):
            for batch in self.batches:
                n = self.recorder.examples(batch)

                def standard(out: Tensor, batch: Batch = batch, n: int = n) -> Terms:
                    return self.recorder.terms(out, batch, self.likelihood, n)

                if self._only_terms:
                    terms = self._only_terms[0]
                else:
                    self.recorder.seed_forward(batch)
                    with torch.enable_grad():
                        terms = standard(linear.run(batch.x))
                    if len(self.batches) == 1:
                        self._only_terms.append(terms)
                self.recorder.seed_forward(batch)
                pushed = linear.push(batch.x, terms.f, columns, lambda out, standard=standard: standard(out).f)
                total += float((self.likelihood.hessian_product(terms, pushed) * pushed).sum())
                weight += float(terms.weight.sum())
        return total / max(weight, 1e-300)

    def loss_after(self, d: ParamVector, rate: float) -> float:
        """``L(θ − η d)``."""
        params = dict(self.model.named_parameters())
        with _restored(params.values()):
            for name, direction in d.items():
                params[name].data.sub_(direction.to(params[name].dtype), alpha=rate)
            return self.loss()

    def _terms(self, batch: Batch) -> tuple[Tensor, Tensor]:
        n = self.recorder.examples(batch)
        self.recorder.seed_forward(batch)
        terms = self.recorder.terms(call(self.model, batch.x), batch, self.likelihood, n)
        return self.likelihood.loss(terms).sum(), terms.weight.sum()


@contextmanager
def _restored(parameters: Any) -> Iterator[None]:
    """Parameters get their values back.

    All through ``.data``, which autograd does not count as a change: graphs of before are used afterwards.
    """
    held = [(p, p.detach().clone()) for p in parameters]
    try:
        yield
    finally:
        for p, before in held:
            p.data.copy_(before)


def measure_steps(
    line: Line, training: Sequence[Batch], clock: Clock, share: float, members: Sequence[str] = MEMBERS
) -> tuple[tuple[Step, ...], list[str]]:
    """A `Step` for each member of `lw.optim` that there is time for, best first, and notes on the others."""
    if members and not clock.has(share):
        return (), [f"No time for the steps of {', '.join(members)} (seconds={clock.seconds:g})."]
    begun = time.perf_counter()
    start = line.loss()
    gradient = line.gradient()
    slowest = guess = 1.5 * (time.perf_counter() - begun)
    """What a member takes beside decompositions; at first a guess."""
    if clock.left() > 3 * guess:
        line.curvature(gradient)  # finds the way to J d, once for all members
    theta = ParamVector({name: p.detach() for name, p in line.model.named_parameters() if name in gradient.dict()})
    found, notes = list[Step](), list[str]()
    decomposing = _decomposing_seconds(line) if not DECOMPOSE.keys().isdisjoint(members) else 0.0
    late = []
    for name in members:
        extra = DECOMPOSE.get(name, 0.0) * decomposing
        if not clock.has(share) or clock.left() < 1.3 * slowest + extra:
            late.append(name)
            continue
        begun = time.perf_counter()
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                d = direction(line, training, name)
            notes += [f"{name}: {str(one.message).partition('.')[0]}." for one in said]
            step = _judged(line, name, d, start, gradient, theta, line.recorder.table)
        except (LayerwiseError, RuntimeError) as error:
            notes.append(f"The step of {name} was not measured: {error}")
            continue
        took = time.perf_counter() - begun
        slowest = took if slowest is guess else max(slowest, took - extra)
        if step is not None:
            found.append(dataclasses.replace(step, seconds=took))
    if late:
        notes.append(f"No time for the steps of {', '.join(late)} (seconds={clock.seconds:g}).")
    found.sort(key=lambda step: -step.predicted)
    return tuple(found), notes


def _decomposing_seconds(line: Line) -> float:
    """Of the factors of all layers, once."""
    factored = [spec for spec in line.recorder.table.layers if spec.sites and spec.form.kronecker]
    return eigh_seconds(factor_sizes(factored), next(line.model.parameters()).device)


def direction(line: Line, training: Sequence[Batch], name: str) -> ParamVector:
    """What a member subtracts at rate one, after some steps at rate zero that fill its running means."""
    model = copy.deepcopy(line.model)
    examined_as(model, line.recorder.findings, training[0].x)
    for p in model.parameters():
        p.grad = None
    model.training = True  # optimizers take statistics of training forwards; the modules inside stay in eval mode
    kind = getattr(optim, name)
    needs = {"likelihood": line.likelihood} if name in ("KFAC", "EKFAC") else {}
    refresh = {"refresh_every": WARM_UP} if name in ("FOOF", "KFAC", "EKFAC", "SOAP", "Shampoo") else {}
    opt = kind(model, lr=0.0, weight_decay=0.0, **needs, **refresh)
    before = {key: p.detach().clone() for key, p in model.named_parameters() if p.requires_grad}
    warm = [training[place % len(training)] for place in range(WARM_UP if len(training) > 1 else 0)]
    for place, batch in enumerate([*warm, training[-1]]):
        if place == len(warm):
            for group in opt.param_groups:
                group["lr"] = RATE
        if name in GRADIENTS_ALONE:
            grads = line.batch_gradient(batch)
            for key, p in model.named_parameters():
                p.grad = None if key not in grads else grads[key].clone()
        else:
            _backward(line, model, batch, opt)
        opt.step()
    after = dict(model.named_parameters())
    return ParamVector({key: (value - after[key].detach()) / RATE for key, value in before.items()})


def _backward(line: Line, model: nn.Module, batch: Batch, opt: Any) -> None:
    """Gradients of a copy of the model; where its examples are, is known from the model itself."""
    opt.zero_grad()
    n = line.recorder.examples(batch)
    with torch.enable_grad(), torch.random.fork_rng(devices=_devices(model)):
        line.recorder.seed_forward(batch)
        terms = line.recorder.terms(call(model, batch.x), batch, line.likelihood, n)
        (line.likelihood.loss(terms).sum() / terms.weight.sum()).backward()


def _devices(model: nn.Module) -> list[int]:
    return sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})


def _judged(
    line: Line,
    name: str,
    d: ParamVector,
    start: float,
    gradient: ParamVector,
    theta: ParamVector,
    table: LayerTable,
) -> Step | None:
    slope, bend = float(gradient @ d), line.curvature(d)
    if not (math.isfinite(slope) and math.isfinite(bend)) or slope <= 0 or bend <= 0:
        return None
    rate = slope / bend
    if start > 0:  # a loss that cannot be negative: its tangent says nothing beyond where it meets zero
        rate = min(rate, start / slope)
    after = line.loss_after(d, rate)
    layers = {}
    blocks, weights = table.to_blocks(d.dict()), table.to_blocks(theta.dict())
    for spec in table.layers:
        size = float(weights[spec.name].norm())
        layers[spec.name] = rate * float(blocks[spec.name].norm()) / size if size > 0 else math.inf
    norm = float(theta.norm())
    return Step(
        name,
        rate,
        rate * (slope - 0.5 * rate * bend),
        start - after,
        rate * float(d.norm()) / max(norm, 1e-300),
        layers,
    )


def measure_own_step(
    line: Line, training: Sequence[Batch], optimizer: torch.optim.Optimizer, trained: Sequence[str]
) -> OwnStep:
    """The next step of a given optimizer, with its own rate and state, on a copy of both."""
    model, opt = copy.deepcopy((line.model, optimizer))
    model.training = True
    names = {id(p): name for name, p in model.named_parameters()}
    held = {names[id(p)] for group in opt.param_groups for p in group["params"] if id(p) in names}
    missing = tuple(name for name in trained if name not in held)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    start, gradient = line.loss(), line.gradient()
    _backward(line, model, training[-1], opt)
    opt.step()
    after = dict(model.named_parameters())
    d = ParamVector({key: before[key] - after[key].detach() for key in gradient.dict()})
    slopes, bends = float(gradient @ d), line.curvature(d)
    if slopes <= 0:  # noise: the step of one half raises the loss of the other, at any rate. Its own half can say more
        line = dataclasses.replace(line, batches=[training[-1]])
        start, gradient = line.loss(), line.gradient()
        slopes, bends = float(gradient @ d), line.curvature(d)
    predicted = slopes - 0.5 * bends
    measured = start - line.loss_after(d, 1.0)
    multiple = slopes / bends if bends > 0 else math.inf
    rates = [float(group["lr"]) for group in opt.param_groups if "lr" in group]
    best = 0.5 * slopes * multiple if bends > 0 and slopes > 0 else 0.0
    return OwnStep(type(optimizer).__name__, max(rates, default=math.nan), multiple, predicted, best, measured, missing)
