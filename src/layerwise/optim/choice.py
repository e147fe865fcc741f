"""Which rule: that of an optimizer's arguments, and whether a layer gets it."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.sharded import Division
from layerwise.layers.rules.linear import LinearRule
from layerwise.layers.table import LayerSpec, LayerTable
from layerwise.optim.kronecker import KroneckerRoots
from layerwise.optim.options import known
from layerwise.optim.rule import Requirements, Shape, UpdateRule

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


ShapeOf = Callable[[UpdateRule, LayerSpec, Mapping[str, Any]], Shape]


def why_fallback(
    rule: UpdateRule, requires: Requirements, spec: LayerSpec, group: Mapping[str, Any], embeddings: bool, of: ShapeOf
) -> str | None:
    """Why a layer gets the fallback's update, or None; `embeddings`: whether one is a matrix to rules of inputs."""
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
    if not spec.form.kronecker or spec.form.weight is None:
        return f"{spec.kind}: a vector, not a matrix"
    if min(spec.form.outputs, spec.form.inputs) == 1 and not requires.inputs:
        return "a vector, not a matrix"
    if spec.form.one_hot and not (requires.inputs and embeddings):
        return "an embedding"
    return rule.requirements(of(rule, spec, group)).refused


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


def beyond_tensor_parallelism(table: LayerTable, divided: Mapping[str, Division]) -> dict[str, str]:
    """Layers that ranks divide among them and whose statistics cannot be put together, and why."""
    cut = {name for name, division in divided.items() if division.axis is not None}
    return {
        spec.name: "tensor parallelism divides it, and it is no nn.Linear"
        for spec in table.layers
        if spec.sites and cut & set(spec.parameters) and not all(isinstance(s.rule, LinearRule) for s in spec.sites)
    }
