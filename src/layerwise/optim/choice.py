"""Which rule: that of an optimizer's arguments, whether a layer gets it, and with which others."""

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from layerwise.foundations.errors import InputError, describe
from layerwise.layers.table import LayerSpec
from layerwise.optim.backend import Backend
from layerwise.optim.kronecker import KroneckerRoots
from layerwise.optim.options import known
from layerwise.optim.reference import Reference
from layerwise.optim.rule import Shape, UpdateRule
from layerwise.optim.sharding.plan import Bucket
from layerwise.optim.statistics.accumulate import Moments
from layerwise.optim.step.stack import Stack
from layerwise.optim.step.update import UpdateSize, averages_before

Group = Mapping[str, Any]
"""A parameter group."""

CHOSEN = "overrides"
"""The reason of layers for which the user has asked for the fallback's update."""


def rule_of(
    left: str, right: str, power: float | tuple[float, float], basis: str, split: str | None, max_factor: int
) -> UpdateRule:
    """That of the optimizer's arguments."""
    powers = power if isinstance(power, tuple) else (float(power), float(power))
    known("basis", basis, ("factors", "eigen"))
    if basis == "factors":
        return KroneckerRoots(left, right, powers, split or "trace", max_factor)
    if "gradient" in (left, right):
        from layerwise.optim.members.soap import RotatedAdam  # members are built on the engine, which asks here

        return RotatedAdam(left, right, powers, max_factor)
    from layerwise.optim.members.ekfac import CorrectedEigenvalues

    return CorrectedEigenvalues(left, right, powers, split or "exact", max_factor)


def check_rule(rule: UpdateRule) -> None:
    """A rule that was written for the interface of before would fail in the middle of a step."""
    given = inspect.signature(type(rule).direction).parameters
    if "health" in given or "backend" not in inspect.signature(type(rule).init).parameters:
        raise InputError(
            describe(
                f"{type(rule).__name__} with direction({', '.join(given)}) and init(self, shape)",
                "direction(self, state, grad, context), where health is context.health, and init(self, shape, backend)",
                "see `UpdateRule`: what a rule needs to see is said by its method `requirements`",
            )
        )


@dataclass(frozen=True)
class Choice:
    """Which layers get the optimizer's rule, which the fallback's, which are treated together, and by which backend."""

    rule: UpdateRule
    fallback: UpdateRule
    size: UpdateSize
    solver: str
    precision: str
    host_may_sync: bool

    def backend(self, device: torch.device, precision: str | None = None) -> Backend:
        """The reference on a CPU; that of `cuda` on a GPU, or where factors are to be refined by products."""
        if self.host_may_sync and device.type == "cpu" and self.solver != "products":
            return Reference(self.solver)
        from layerwise.optim.cuda.backend import CudaBackend  # the GPU's code is not read where there is none

        return CudaBackend(self.solver, precision or self.precision)

    def rule_for(self, spec: LayerSpec, group: Group) -> UpdateRule:
        """The rule that a layer gets."""
        return self.fallback if self.why_fallback(spec, group) else self.rule

    def why_fallback(self, spec: LayerSpec, group: Group) -> str | None:
        """Why a layer gets the fallback's update, or None."""
        requires, form = self.rule.requirements(), spec.form
        if group.get("update") == "fallback":
            return CHOSEN
        if not requires.matrices_only:
            return None
        if spec.reason is not None:
            return spec.reason
        if not spec.sites and (requires.inputs or requires.outgrads):
            return "no layer rule"
        if not requires.kronecker_only:
            return None
        if not form.kronecker or form.weight is None:
            return f"{spec.kind}: a vector, not a matrix"
        if min(form.outputs, form.inputs) == 1 and not requires.inputs:
            return "a vector, not a matrix"
        if form.one_hot and not (requires.inputs and self.size.method == "formula"):
            return "an embedding"
        return self.rule.requirements(self.shape_of(self.rule, spec, group)).refused

    def shape_of(self, rule: UpdateRule, spec: LayerSpec, group: Group) -> Shape:
        """Of a layer alone."""
        name = spec.parameters[0]
        first = {name: group["params"][group["param_names"].index(name)]}
        return Stack(rule, (spec,), dict(group), first, self.backend(first[name].device)).shape

    def moments_of(self, spec: LayerSpec, groups: Iterable[Group]) -> Moments | None:
        """Which second moments the rule wants of a layer; None where the layer gets the fallback's update."""
        group = next((g for g in groups if spec.parameters[0] in g.get("param_names", ())), None)
        if group is None or self.why_fallback(spec, group):
            return None
        wanted = self.rule.requirements(self.shape_of(self.rule, spec, group))
        return wanted.outgrads, wanted.inputs

    def buckets(
        self, layers: Iterable[LayerSpec], params: Mapping[str, nn.Parameter], group_of: Mapping[int, dict[str, Any]]
    ) -> list[Bucket]:
        """What goes into one stack: layers of one shape, group and rule."""
        found: dict[Any, tuple[UpdateRule, dict[str, Any], list[LayerSpec]]] = {}
        for spec in layers:
            form, first = spec.form, params[spec.parameters[0]]
            group = group_of.get(id(first))
            if group is None:
                continue
            rule = self.rule_for(spec, group)
            by_channel = rule is self.rule and rule.requirements().by_channel
            size = (form.outputs, form.inputs, form.one_hot, form.taps if by_channel else 1)
            groups = tuple(id(group_of.get(id(params[name]))) for name in spec.parameters)
            key = (id(rule), groups, *size, first.dtype, first.device)
            found.setdefault(key, (rule, group, []))[2].append(spec)
        buckets = []
        for (*_, dtype, _), (rule, group, specs) in found.items():
            own, requires = rule is self.rule, rule.requirements()
            sized = self.size.method == "adam" and requires.matrices_only
            averaged = averages_before(requires.own_momentum, sized or requires.averages, own)
            momentum = bool(group["momentum"]) and not averaged
            buckets.append(Bucket(rule, group, tuple(specs), not own, dtype, sized, momentum))
        return buckets


@dataclass(frozen=True)
class FallenMatrices:
    """Matrix parameters that get the fallback's update although nobody asked for it, counted in entries."""

    total: int
    """Of all matrix parameters that are trained: two or more axes longer than one, tables of embeddings left out."""
    by_reason: Mapping[str, int]
    """The commonest reason first."""
    example: Mapping[str, str]
    """One parameter for each reason."""

    @property
    def share(self) -> float:
        """Between 0 and 1."""
        return sum(self.by_reason.values()) / max(self.total, 1)


def fallen_matrices(layers: Iterable[tuple[LayerSpec, str | None]], model: nn.Module) -> FallenMatrices:
    """Which of a model's matrices fall back, from its layers with the reasons why they do."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    params, total = dict(model.named_parameters()), 0
    by_reason, example = Counter[str](), dict[str, str]()
    for spec, why in layers:
        for part in spec.form.parts:
            if id(params[part.name]) in tables or sum(size > 1 for size in part.shape) < 2:
                continue
            total += part.numel()
            if why is not None and why != CHOSEN:
                by_reason[why] += part.numel()
                example.setdefault(why, part.name)
    return FallenMatrices(total, dict(by_reason.most_common()), example)
