"""Which rule: that of an optimizer's arguments, and whether a layer gets it."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from layerwise.layers.table import LayerSpec
from layerwise.optim.eigenbasis import CorrectedEigenvalues
from layerwise.optim.factors import Factors
from layerwise.optim.options import known
from layerwise.optim.rotated_adam import RotatedAdam
from layerwise.optim.rule import UpdateRule
from layerwise.optim.stack import Stack


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
        return "overrides"
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
