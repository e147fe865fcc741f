"""Labels or values of the data, added up batch by batch."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from layerwise.doctor.measurements import Inputs, Targets
from layerwise.foundations.likelihoods import Terms
from layerwise.foundations.types import Tree, leaves


@dataclass(eq=False)
class TargetSums:
    """Counts of classes, or moments of values, over terms that count."""

    classes: int | None = None
    counts: Tensor | None = None
    total: Tensor | None = None
    """``Σ y`` and ``Σ y²`` of every output, [2, C]."""
    terms: float = 0.0
    positions: int = 1

    def add(self, terms: Terms) -> None:
        """The targets of a batch."""
        keep = terms.weight.detach() > 0
        self.terms += float(keep.sum())
        self.positions = max(self.positions, terms.f.shape[1])
        if terms.y is None:
            return
        if terms.y.ndim == 2 and not terms.y.is_floating_point():
            labels = terms.y[keep]
            self.classes = terms.f.shape[-1]
            counts = torch.bincount(labels.long(), minlength=self.classes).cpu()
            self.counts = counts if self.counts is None else self.counts + counts
        elif terms.y.ndim == 3:
            y = terms.y[keep].double()
            sums = torch.stack([y.sum(0), y.square().sum(0)]).cpu()
            self.total = sums if self.total is None else self.total + sums

    def measured(self, likelihood: str) -> Targets:
        """What they say."""
        n = max(self.terms, 1.0)
        if self.counts is not None:
            p = self.counts.double() / self.counts.sum().clamp_min(1)
            seen = p[p > 0]
            entropy = float(-(seen * seen.log()).sum())
            return Targets(
                "classes",
                int(self.terms),
                self.classes,
                float(p.max()),
                float(seen.min()) if seen.numel() else None,
                int((p > 0).sum()),
                entropy,
                None,
                None,
                self.positions,
                entropy,
            )
        if self.total is None:
            return Targets("other", int(self.terms), None, None, None, None, None, None, None, self.positions, None)
        mean, square = self.total / n
        variance = (square - mean.square()).clamp_min(0)
        constant = float(variance.sum()) / 2
        if likelihood == "bernoulli":
            q = mean.clamp(1e-12, 1 - 1e-12)
            constant = float(-(q * q.log() + (1 - q) * (1 - q).log()).sum())
        return Targets(
            "values",
            int(self.terms),
            None,
            None,
            None,
            None,
            None,
            float(mean.square().mean().sqrt()),
            math.sqrt(float(square.mean())),
            self.positions,
            constant if likelihood in ("gaussian", "bernoulli") else None,
        )


FEW = 4
"""Features below which nothing is said of what they have in common."""


def measure_inputs(x: Tree, convolutional: bool) -> Inputs | None:
    """Scales and offsets of features; None for integer inputs."""
    values = next((t for t in leaves(x) if t.is_floating_point() and t.ndim >= 2), None)
    if values is None or values.shape[0] < 2:
        return None
    axis = 1 if values.ndim > 3 or values.ndim == 2 or convolutional else values.ndim - 1
    rows = values.detach().double().movedim(axis, -1).reshape(-1, values.shape[axis])
    mean, std = rows.mean(0), rows.std(0)
    scale = float(rows.square().mean().sqrt())
    constant = std <= 1e-6 * max(scale, 1e-30)
    live = std[~constant]
    if not live.numel():
        return Inputs(len(std), scale, 0.0, 0.0, math.inf, 1.0, 1.0)
    common = None
    if values.ndim == 2 and live.numel() >= FEW and len(rows) > live.numel():
        z = (rows - mean)[:, ~constant] / live
        common = float(torch.linalg.matrix_norm(z.mT @ z, 2) / z.square().sum())
    return Inputs(
        len(std),
        scale,
        float(live.max()),
        float(live.min()),
        float((mean.abs()[~constant] / live).median()),
        float(live.max() / live.median()),
        float(constant.double().mean()),
        common,
    )
