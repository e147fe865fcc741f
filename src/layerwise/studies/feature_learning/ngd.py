"""Natural gradient of the joint Fisher of (F, G): in closed form, or by solving with the dense matrix.

The Fisher is singular, with nullity k² (F → FL, G → L⁻¹G leaves f as it is), so "solve" alone is undefined. In closed
form exact NGD moves G exactly as KFAC does; only its head and the gauge differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe, unknown
from layerwise.studies.feature_learning.algorithms import Algorithm, Weights
from layerwise.studies.feature_learning.batch import Batch, solve_right
from layerwise.studies.feature_learning.two_layer import grad_F, grad_G, orthonormal_rows, pull_back, times_moment

FISHERS = ("exact", "mc", "empirical")
SOLVERS = ("closed_form", "damped", "pinv", "raw")


@dataclass(frozen=True, kw_only=True)
class NGD(Algorithm):
    """θ − η M⁺ ∇ on (F, G) together, then Ortho with the head compensated, which leaves FG as it is.

    `fisher`: "exact" expectation over labels of the model, "mc" with one drawn label a sample, "empirical" with the
    data's. `solver`: "closed_form" (exact Fisher only), "pinv", "damped" with M + damping·I, or "raw" LU without any.
    """

    lr: float | int | Sequence[float | int] = 1e-4
    fisher: str = "exact"
    solver: str = "closed_form"
    damping: float | int = 1e-4
    ortho: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind, name, known in (("Fisher", self.fisher, FISHERS), ("solver", self.solver, SOLVERS)):
            if name not in known:
                raise InputError(unknown(kind, name, known))
        if self.solver == "closed_form" and self.fisher != "exact":
            given = f"fisher={self.fisher!r} with solver='closed_form'"
            raise InputError(describe(given, "fisher='exact'", "pass solver='damped' or solver='pinv'"))

    @property
    def inverts_inputs(self) -> bool:
        """In closed form."""
        return self.solver == "closed_form"

    def step(self, w: Weights, lr: Float[Tensor, "*r 1 1"], first: Batch, second: Batch) -> Weights:
        """One simultaneous step on the first batch."""
        if self.solver == "closed_form":
            dF, dG = gauss_newton(w.F, w.G, first)
        else:
            dF, dG = self._dense(w, first)
        F, G = w.F - lr * dF, w.G - lr * dG
        if not self.ortho:
            return Weights(F, G)
        Q = orthonormal_rows(G)
        return Weights(F @ (G @ Q.mT), Q)

    def _dense(self, w: Weights, batch: Batch) -> tuple[Tensor, Tensor]:
        M = fisher(w.F, w.G, batch) if self.fisher == "exact" else sampled_fisher(w.F, w.G, batch, self.fisher)
        g = torch.cat([grad_G(w.F, w.G, batch).flatten(-2), grad_F(w.F, w.G, batch).flatten(-2)], -1)
        d = _solve(M, g, self.solver, float(self.damping))
        dG, dF = d.tensor_split([w.G.shape[-2] * w.G.shape[-1]], -1)
        return dF.unflatten(-1, w.F.shape[-2:]), dG.unflatten(-1, w.G.shape[-2:])


def gauss_newton(
    F: Float[Tensor, "*r dy k"], G: Float[Tensor, "*r k dx"], batch: Batch
) -> tuple[Float[Tensor, "*r dy k"], Float[Tensor, "*r k dx"]]:
    """M⁺∇ up to gauge. With W = (FG Sx − Syx) Sx⁻¹: dG = F⁺W, dF = (I − FF⁺) W Sx Gᵀ (G Sx Gᵀ)⁻¹."""
    W = F @ G - batch.ols
    dG = pull_back(F, W)
    GSx = times_moment(G, batch.Sx)
    outside = (W - F @ dG) @ GSx.mT
    return solve_right(GSx @ G.mT, outside), dG


def fisher(F: Float[Tensor, "*r dy k"], G: Float[Tensor, "*r k dx"], batch: Batch) -> Float[Tensor, "*r p p"]:
    """The joint Fisher of (G, F), rows by rows: [[FᵀF ⊗ Sx, ·], [·, I ⊗ G Sx Gᵀ]], size k dx + dy k."""
    Sxz = times_moment(G, batch.Sx).mT
    (dy, k), dx = F.shape[-2:], G.shape[-1]
    Sx = batch.Sx.expand(*G.shape[:-2], dx, dx)
    GG = torch.einsum("...ij,...ab->...iajb", F.mT @ F, Sx).reshape(*F.shape[:-2], k * dx, k * dx)
    GF = torch.einsum("...pi,...aj->...iapj", F, Sxz).reshape(*F.shape[:-2], k * dx, dy * k)
    eye = torch.eye(dy, dtype=F.dtype, device=F.device)
    FF = torch.einsum("pq,...ij->...piqj", eye, G @ Sxz).reshape(*F.shape[:-2], dy * k, dy * k)
    return torch.cat([torch.cat([GG, GF], -1), torch.cat([GF.mT, FF], -1)], -2)


def sampled_fisher(
    F: Float[Tensor, "*r dy k"], G: Float[Tensor, "*r k dx"], batch: Batch, kind: str
) -> Float[Tensor, "*r p p"]:
    """mean of J rrᵀ Jᵀ over samples: r drawn from the model ("mc") or the data's residual ("empirical")."""
    x, y, normal = batch.samples()
    z = x @ G.mT
    r = normal.expand(*z.shape[:-1], y.shape[-1]) if kind == "mc" else z @ F.mT - y
    by_G = ((r @ F).unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)
    by_F = (r.unsqueeze(-1) * z.unsqueeze(-2)).flatten(-2)
    rows = torch.cat([by_G, by_F], -1)
    return rows.mT @ rows / rows.shape[-2]


def _solve(M: Tensor, g: Tensor, solver: str, damping: float) -> Tensor:
    if solver == "raw":
        return torch.linalg.solve_ex(M, g)[0]
    if solver == "pinv":
        return (torch.linalg.pinv(M, hermitian=True, rtol=1e-10) @ g.unsqueeze(-1)).squeeze(-1)
    eye = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    return solve_right(M + damping * eye, g.unsqueeze(-2)).squeeze(-2)
