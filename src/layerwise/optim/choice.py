"""Which rule: that of an optimizer's arguments, and whether a layer gets it."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from layerwise.layers.table import LayerSpec
from layerwise.optim.eigenbasis import CorrectedEigenvalues
from layerwise.optim.factors import Factors
from layerwise.optim.options import known
from layerwise.optim.rotated_adam import RotatedAdam
from layerwise.optim.rule import UpdateRule
from layerwise.optim.step.stack import Stack

CHOSEN = "overrides"
"""The reason of layers for which the user has asked for the fallback's update."""


def rule_of(
    left: str, right: str, power: float | tuple[float, float], basis: str, split: str | None, max_factor: int
) -> UpdateRule:
    """That of the optimizer's arguments."""
    powers = power if isinstance(power, tuple) else (float(power), float(power))
    known("basis", basis, ("factors", "eigen"))
    if basis == "factors":
        return Factors(left, right, powers, split or "trace", max_factor)
    if "gradient" in (left, right):
        return RotatedAdam(left, right, powers, max_factor=max_factor)
    return CorrectedEigenvalues(left, right, powers, split or "exact", max_factor)


def why_fallback(rule: UpdateRule, spec: LayerSpec, group: Mapping[str, Any], model: nn.Module) -> str | None:
    """Why a layer gets the fallback's update, or None."""
    if group.get("update") == "fallback":
        return CHOSEN
    if not rule.matrix_only:
        return None
    if spec.reason is not None:
        return spec.reason
    if not spec.sites and (rule.needs_inputs or rule.needs_outgrads):
        return "no layer rule"
    if not rule.kronecker_only:
        return None
    if not spec.form.kronecker or spec.form.weight is None:
        return f"{spec.kind}: a vector, not a matrix"
    if min(spec.form.outputs, spec.form.inputs) == 1 and not rule.needs_inputs:
        return "a vector, not a matrix"
    if spec.form.one_hot and not (rule.needs_inputs and rule.treats_embeddings):
        return "an embedding"
    first = dict(model.named_parameters())[spec.parameters[0]]
    return rule.accepts(Stack(rule, (spec,), dict(group), {spec.parameters[0]: first}).shape)


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
