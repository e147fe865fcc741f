"""Every member of the family on the single-index problem: what does one full-batch step teach the first layer?

The student fᵀσ(Gx) is an ordinary model and the members are the library's own optimizers. Only G moves, as in the
theory. By Theorem 3.9 the gradient is nearly a f₀bᵀ with b = Xᵀy/n, and a member's step shows what it makes of that:

- with (Sx + λI)⁻¹ on the right (FOOF, LocoProp) b becomes the ridge estimator of β⋆;
- with P⁻¹ on the left b stays, but P = E[∂f/∂h ∂f/∂hᵀ] is largest along f₀: if it is really inverted, f₀bᵀ shrinks and
  what remains of the gradient does not (KFAC, EKFAC and NGD with little damping);
- sign g is sign f₀ sign bᵀ, which is further from β⋆ than b is;
- UVᵀ gives f₀bᵀ no more weight than every other direction (Muon, Shampoo, SOAP, descent in the Mahalanobis norm).
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, describe, unknown
from layerwise.foundations.random import stream
from layerwise.studies.feature_learning.covariance import haar
from layerwise.studies.feature_learning.index_members import INDEX_MEMBERS as INDEX_MEMBERS
from layerwise.studies.feature_learning.index_members import IndexMember as IndexMember
from layerwise.studies.feature_learning.one_step import predicted_correlations, slope_mean
from layerwise.studies.feature_learning.single_index import (
    ACTIVATIONS,
    Sample,
    SingleIndex,
    Trial,
    draw_trial,
    hermite_link,
)
from layerwise.theory import hermite_constants, rank_one_coefficient

LAYERS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "identity": nn.Identity}


def rotation(setting: SingleIndex, seed: int) -> Float[Tensor, "dx dx"]:
    """The random basis of a trial.

    >>> rotation(SingleIndex(dx=4), 0).shape
    torch.Size([4, 4])
    """
    return haar(setting.dx, setting.dx, stream(seed, "single-index", "rotation"))


def turned_trial(setting: SingleIndex, seed: int) -> Trial:
    """A trial whose Σ is turned by a random rotation: coordinates mean something to Sign and Adam.

    >>> trial = turned_trial(SingleIndex(dx=4, n=10, dh=5), 0)
    >>> trial.sample.x.shape
    torch.Size([10, 4])
    """
    trial, O = draw_trial(setting, seed), rotation(setting, seed)
    return replace(trial, index=O @ trial.index, sample=Sample(x=trial.sample.x @ O.mT, y=trial.sample.y))


def student(trial: Trial) -> nn.Sequential:
    """fᵀσ(Gx) at f = f₀/√dh and G₀, as a model in float64.

    >>> student(draw_trial(SingleIndex(dx=4, n=10, dh=5), 0))[0].weight.shape
    torch.Size([5, 4])
    """
    dh, dx = trial.G0.shape
    first, head = nn.Linear(dx, dh, bias=False), nn.Linear(dh, 1, bias=False)
    model = nn.Sequential(first, LAYERS[trial.setting.activation](), head).double()
    with torch.no_grad():
        first.weight.copy_(trial.G0)
        head.weight.copy_(trial.f0[None] / dh**0.5)
    return model


def member_step(name: str, trial: Trial, damping: float | int) -> Float[Tensor, "dh dx"]:
    """G₁ − G₀ of a member after one full-batch step on ½ mean (y − f)², with the head as it was.

    >>> trial = draw_trial(SingleIndex(dx=4, n=40, dh=5), 0)
    >>> foof, loco = (member_step(name, trial, 0.5) for name in ("foof", "locoprop"))
    >>> torch.allclose(foof, loco)  # LocoProp at rate 1/λ is FOOF with damping λ
    True
    """
    if name not in INDEX_MEMBERS:
        raise InputError(unknown("member", name, INDEX_MEMBERS))
    if not 0 < damping < math.inf:
        raise InputError(describe(f"damping={damping}", "a number > 0", "pass e.g. 0.1"))
    model = student(trial)
    model[2].requires_grad_(False)
    optimizer = INDEX_MEMBERS[name].make(model, float(damping))
    optimizer.zero_grad()
    loss = (model(trial.sample.x)[:, 0] - trial.sample.y).square().mean() / 2
    loss.backward()
    optimizer.step()
    weight = model[0].weight
    assert isinstance(weight, Tensor)
    return weight.detach() - trial.G0


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """How much of β⋆ is in a change of G."""

    correlation: float
    """|v₁ᵀβ⋆| / ‖β⋆‖ with v₁ the top right singular vector; an accident where `gap` is one, as it is for UVᵀ."""
    share: float
    """‖ΔG β⋆‖ / (‖ΔG‖_F ‖β⋆‖): |bᵀβ⋆|/(‖b‖‖β⋆‖) for a matrix f₀bᵀ, 1/√dx for one with dx equal singular values."""
    gap: float
    """Second singular value over the first."""


def recovery(change: Float[Tensor, "dh dx"], index: Float[Tensor, "dx"]) -> Recovery:
    """Both measures of a change.

    >>> change = torch.ones(3, 1).double() @ torch.tensor([[3.0, 4.0]]).double()
    >>> found = recovery(change, torch.tensor([1.0, 0.0]).double())
    >>> round(found.correlation, 6), round(found.share, 6)
    (0.6, 0.6)
    """
    _, s, Vh = torch.linalg.svd(change, full_matrices=False)
    unit = index / index.norm()
    return Recovery(
        correlation=float((Vh[0] @ unit).abs()),
        share=float((change @ unit).norm() / change.norm()),
        gap=float(s[1] / s[0]) if len(s) > 1 else 0.0,
    )


def predicted_recovery(setting: SingleIndex, damping: float | int) -> dict[str, float]:
    """The correlation of one step by theory: Lemma 3.10, Lemma 3.12 at λ, and Lemma 3.10 times `sign_factor`.

    >>> found = predicted_recovery(SingleIndex(dx=80, n=2000, anisotropy=0.9), 0.1)
    >>> {name: round(rho, 3) for name, rho in found.items()}
    {'sgd': 0.72, 'foof': 0.867, 'sign': 0.606}
    """
    sgd, foof = predicted_correlations(setting, [damping]).tolist()
    return {"sgd": sgd, "foof": foof, "sign": sgd * sign_factor(setting)}


def sign_factor(setting: SingleIndex) -> float:
    """What sign takes from the correlation of b: E[zh(z)] / (E h(z)²)^½ for h(z) = 2Φ(κz) − 1 and z ~ N(0, 1).

    In a random basis the entries of b are Gaussian. Row i of the gradient is f_i (a b + noise), and the mean over rows
    of its signs is 2Φ(a b_j/τ) − 1 with τ² = Var[σ′] E[y²]/n; so κ = a sd(b_j)/τ. Without noise κ = ∞ and the factor is
    √(2/π). An approximation of this study, not of the paper.

    >>> round(sign_factor(SingleIndex(dx=80, n=2000, anisotropy=0.9)), 3), round(sign_factor(SingleIndex(n=10**9)), 3)
    (0.841, 0.798)
    """
    t1, t2 = float(setting.eigenvalues.mean()), float(setting.eigenvalues.square().mean())
    link = hermite_constants(lambda z: hermite_link(torch.from_numpy(z)).numpy(), None, t1)
    energy = link.cs2 + float(setting.noise) ** 2

    def squared_slope(z: np.ndarray) -> np.ndarray:
        return ACTIVATIONS[setting.activation](torch.from_numpy(z))[1].numpy() ** 2

    a = slope_mean(setting)
    spread = max(0.0, rank_one_coefficient(squared_slope, t1) - a * a)  # zero for the identity, up to rounding
    tau2 = spread * energy * t1 / setting.n
    b2 = (link.c1**2 * t2 + energy * t1 * setting.dx / setting.n) / setting.dx
    share = a * a * b2 / (a * a * b2 + tau2)  # κ²/(1 + κ²)
    return math.sqrt(share) / math.sqrt(math.asin(share))
