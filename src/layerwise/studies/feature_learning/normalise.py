"""Normalised inputs for AMGD: four readings of "batch-norm approximately whitens the inputs"."""

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, unknown
from layerwise.studies.feature_learning.batch import Batch, Samples
from layerwise.studies.feature_learning.covariance import power

NORMS = ("coord_batch", "coord_pop", "whiten_batch", "whiten_pop")
EPSILON = 1e-5
"""What torch.nn.BatchNorm1d adds to a variance."""


def check_norm(norm: str | None) -> None:
    """Refuse a name that is no normalisation."""
    if norm is not None and norm not in NORMS:
        raise InputError(unknown("normalisation", norm, NORMS))


def normaliser(
    norm: str, batch: Batch, Sigma: Float[Tensor, "*s dx dx"]
) -> tuple[Float[Tensor, "*s dx dx"], Float[Tensor, "*s dx"] | None]:
    """N and m of x ↦ N (x − m): by coordinate or whitening (ZCA), from the batch or from the true Σ (where m is 0)."""
    check_norm(norm)
    m, C = None, Sigma
    if norm.endswith("batch"):
        m = batch.samples().x.mean(-2)
        C = batch.Sx - m.unsqueeze(-1) * m.unsqueeze(-2)
    if norm.startswith("whiten"):
        return power(C, -0.5), m
    extra = EPSILON if norm == "coord_batch" else 0.0
    return torch.diag_embed((C.diagonal(dim1=-2, dim2=-1) + extra).rsqrt()), m


def normalised(batch: Batch, N: Float[Tensor, "*s dx dx"], m: Float[Tensor, "*s dx"] | None = None) -> Batch:
    """The batch with inputs N (x − m), where m is its own mean x̄ or nothing, and labels as they are.

    XᵀX/n becomes N (Sx − x̄x̄ᵀ) N and YᵀX/n becomes (Syx − ȳx̄ᵀ) N.
    """
    Sx, Syx = batch.Sx, batch.Syx
    if m is not None:
        x, y = m.unsqueeze(-1), batch.samples().y.mean(-2).unsqueeze(-1)
        Sx, Syx = Sx - x * x.mT, Syx - y * x.mT

    def samples() -> Samples:
        drawn = batch.samples()
        return drawn._replace(x=(drawn.x if m is None else drawn.x - m.unsqueeze(-2)) @ N)

    return Batch(Sx=N @ Sx @ N, Syx=Syx @ N, Syy=batch.Syy, samples=samples)
