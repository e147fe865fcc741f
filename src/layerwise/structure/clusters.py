"""Logit gradients by class and logit, and how they cluster (Wu 2023, (C.262)–(C.263)).

    Δ_ij = E[row j of Q_x ∂z/∂w | class i],     Q_x = diag(√p) (I − 1 pᵀ),   A = Qᵀ Q

At initialisation they cluster by logit j, near minima (weakly, sometimes not) by class i. The thesis shows pictures;
here the number is the variance within clusters over that between them.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from layerwise.foundations.cotangents import Cotangent
from layerwise.foundations.errors import InputError, describe, not_one_of
from layerwise.foundations.likelihoods import Categorical, Likelihood, Terms
from layerwise.layers.capture.model_call import in_own_arithmetic
from layerwise.layers.capture.recorder import RecordedBatch
from layerwise.layers.io.layer_io import LayerIO
from layerwise.layers.io.standard import Standard
from layerwise.structure.one_layer import Observe, OneLayer, one_layer


@dataclass(frozen=True)
class LogitRoot(Cotangent):
    """Rows of ``Q = diag(√p)(I − 1 pᵀ)``, one a logit: ``Σ_j q_j q_jᵀ = diag p − p pᵀ``."""

    likelihood: Likelihood

    def count(self, terms: Terms) -> int:
        """C."""
        return terms.f.shape[-1]

    def slice(self, terms: Terms, start: int, stop: int, batch: int) -> Float[Tensor, "V N S C"]:
        """``√p_j (e_j − p)``."""
        p = terms.f.detach().softmax(-1)
        e = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)[start:stop]
        rows = p[..., start:stop].movedim(-1, 0).unsqueeze(-1).sqrt() * (e[:, None, None] - p)
        return rows * terms.weight.sqrt().unsqueeze(-1)


@dataclass(frozen=True)
class Clusters:
    """Mean logit gradients, [class, logit, entries], and the variance within clusters over that between them."""

    means: Float[Tensor, "c l d"]
    by_logit: float
    """Clusters are the logits j; small where gradients of one logit are alike for all classes."""
    by_class: float
    """Clusters are the classes i."""


@in_own_arithmetic
def logit_gradient_clusters(
    model: nn.Module,
    data: Any,
    layer: str,
    likelihood: str | Likelihood = "categorical",
    *,
    of: Literal["weight", "output"] = "weight",
    bias: bool = False,
    **options: Any,
) -> Clusters:
    """Mean gradients of logits given the class, and whether they cluster by logit or by class.

    >>> import torch, layerwise as lw
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    >>> found = lw.structure.logit_gradient_clusters(net, (torch.rand(60, 4), torch.arange(60) % 3), "0")
    >>> found.means.shape, found.by_logit < found.by_class  # at initialisation
    (torch.Size([3, 3, 24]), True)

    Args:
        model: as for `layer_hessian`, with one output position an example.
        data: with class labels; gone over once.
        layer: as for `layer_hessian`.
        likelihood: categorical.
        of: "weight" for Δ (gradients in the layer's weight), "output" for Γ (in its output, added up over positions).
        bias: whether the bias takes part.
        options: as for `layer_hessian`.
    """
    if of not in ("weight", "output"):
        raise InputError(not_one_of("of", of, ("weight", "output")))
    chosen = one_layer(model, data, layer, likelihood, bias=bias, cotangent=LogitRoot, **options)
    if not isinstance(chosen.sweep.likelihood, Categorical):
        raise InputError(
            describe(f"likelihood {likelihood!r}", "a categorical likelihood: logits and classes", "use a classifier")
        )
    sums, counts = class_sums(chosen, of)
    present = counts > 0
    means = sums[present] / counts[present].view(-1, 1, 1)
    return Clusters(means, variance_ratio(means.transpose(0, 1)), variance_ratio(means))


def class_sums(layer: OneLayer, of: str) -> tuple[Float[Tensor, "c l d"], Float[Tensor, "c"]]:
    """Sums of logit gradients of each class, in float64, and how many examples it has."""
    sums: list[Tensor] = []
    counts: list[Tensor] = []

    def begin() -> Observe:
        sums.clear()
        counts.clear()
        logits: list[int] = [0]

        def observe(io: LayerIO, first: bool, recorded: RecordedBatch) -> None:
            layer.require_rule("logit gradients")
            terms = recorded.terms
            _, s, c = terms.f.shape
            if s != 1:
                raise InputError(
                    describe(f"outputs with {s} positions an example", "one label an example", "use a classifier")
                )
            labels = terms.target()[:, 0]
            k, o, i = layer.shape
            if not sums:
                d = k * o * (i if of == "weight" else 1)
                sums.append(torch.zeros(c, c, d, dtype=torch.float64, device=layer.device))
                counts.append(torch.zeros(c, dtype=torch.float64, device=layer.device))
            logits[0] = 0 if first else logits[0]
            if first:
                counted = torch.ones_like(terms.weight) if terms.mask is None else terms.mask
                counts[0].scatter_add_(0, labels, counted[:, 0].double())
            at = 0
            for chunk in layer.chunks(io, gradients=of == "weight"):
                assert isinstance(chunk, Standard)
                v, size = chunk.g.shape[:2]
                sums[0][:, logits[0] : logits[0] + v] += _by_class(chunk, labels[at : at + size], c, of)
                at += size
            logits[0] += v

        return observe

    layer.each(begin, "logit gradients")
    return sums[0], counts[0]


def _by_class(chunk: Standard, labels: Int[Tensor, "N"], classes: int, of: str) -> Float[Tensor, "c v d"]:
    """Of each class the sum over its examples: one product, not one gradient an example."""
    found = []
    for c in range(classes):
        mine = (labels == c).to(chunk.g.dtype).view(1, -1, 1, 1, 1)
        g = chunk.g * mine
        total = Standard(chunk.a, g).grad().flatten(1) if of == "weight" else g.sum((1, 2)).flatten(1)
        found.append(total.double())
    return torch.stack(found)


def variance_ratio(clusters: Float[Tensor, "c p d"]) -> float:
    """The mean squared distance of points to their cluster's mean, over that of these means to the mean of all.

    >>> import torch
    >>> variance_ratio(torch.tensor([[[0.0], [1.0]], [[2.0], [3.0]]]))
    0.25
    """
    centres = clusters.mean(1)
    within = (clusters - centres.unsqueeze(1)).square().sum(-1).mean()
    between = (centres - centres.mean(0)).square().sum(-1).mean()
    return float(within) / float(between) if float(between) else float("inf")
