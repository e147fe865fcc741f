"""When masking finds the truth: theorem 2.3.6 of Wu (2023), its support oracle, and what OMP is promised to find."""

import math

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from layerwise.foundations.errors import InputError, describe


def incoherence(A: Float[Tensor, "d p"]) -> float:
    """μ: the largest |⟨A_i, A_j⟩| of two unit columns.

    >>> incoherence(torch.tensor([[1.0, 0.6], [0.0, 0.8]]))
    0.6000000238418579
    """
    unit = A / A.norm(dim=0)
    gram = (unit.mT @ unit).abs()
    return float(gram.fill_diagonal_(0).max())


def oracle_prediction(
    Y: Float[Tensor, "n d"],
    A: Float[Tensor, "d p"],
    supports: Int64[Tensor, "n k"],
    visible: Bool[Tensor, " d"],
    *,
    sigma: float | int,
    signal: float | int,
    printed: bool = False,
) -> Float[Tensor, "n hidden"]:
    """Hidden coordinates as a Bayes estimator predicts them that sees the others, and knows each sample's support S.

    Its risk is a lower bound for every dictionary and decoder: with Λ = P_M A_S, it predicts
    P_{Mᶜ} A_S (ΛᵀΛ + (σ²/σ_z²) I)⁻¹ Λᵀ [y]_M, for z ~ N(0, σ_z² I) on S and noise N(0, σ² I).

    Args:
        Y: samples.
        A: the truth.
        supports: which atoms each sample has.
        visible: M, the coordinates that are seen.
        sigma: standard deviation of the noise.
        signal: σ_z, that of the entries of z.
        printed: with the ridge 1/σ_z² of (A.15), which lacks the noise.
    """
    if visible.all() or not visible.any():
        given = "visible coordinates that are all, or none"
        raise InputError(describe(given, "some of both", "hide some coordinates"))
    if not (signal > 0 and sigma >= 0):
        raise InputError(describe(f"sigma={sigma}, signal={signal}", "σ ≥ 0 and σ_z > 0", "correct them"))
    atoms = A.mT[supports]  # [n, k, d]
    seen, k = atoms[..., visible], supports.shape[1]
    ridge = (1 if printed else sigma**2) / signal**2
    gram = seen @ seen.mT + ridge * torch.eye(k, dtype=A.dtype, device=A.device)
    products = seen @ Y[:, visible, None]
    z = torch.linalg.solve(gram, products) if ridge else torch.linalg.pinv(gram, hermitian=True) @ products
    return (atoms[..., ~visible].mT @ z)[..., 0]


def least_coefficient(sigma: float | int, k: int, p: int, mu: float | int, eta: float | int = 1.0) -> float:
    """γ of (A.21): OMP takes atoms with |z_i| ≥ γ, with the probability that `missed_support` says (Cai, Wang 2011).

    >>> round(least_coefficient(0.1, k=2, p=80, mu=0.195), 3)
    2.853
    """
    if not (sigma >= 0 and k >= 1 and p >= 2):
        raise InputError(describe(f"sigma={sigma}, k={k}, p={p}", "σ ≥ 0, k ≥ 1 and p ≥ 2", "correct them"))
    if not 0 <= mu < 1 / (2 * k - 1):
        given = f"incoherence {mu} with k={k}"
        raise InputError(describe(given, f"less than 1/(2k − 1) = {1 / (2 * k - 1):.3g}", "take fewer atoms a sample"))
    return 2 * sigma * math.sqrt(k) * math.sqrt(2 * (1 + eta) * math.log(p)) / (1 - (2 * k - 1) * mu)


def missed_support(
    sigma: float | int,
    signal: float | int,
    k: int,
    p: int,
    mu: float | int,
    eta: float | int = 1.0,
    *,
    printed: bool = False,
) -> float:
    """A bound of the probability that OMP misses the support: k p^−η/√(2 log p) + k γ √(2/π)/σ_z, at most 1.

    `printed` is (A.23), where the first term is multiplied by the probability that all |z_i| < γ (the text has ≥, and
    evaluates <): a sample whose z_i are not all large, nor all small, is forgotten.

    >>> missed_support(0.1, 30.0, 2, 80, 0.195) > 0.1 > missed_support(0.1, 30.0, 2, 80, 0.195, printed=True)
    True
    """
    if not signal > 0:
        raise InputError(describe(f"signal={signal}", "σ_z > 0", "correct it"))
    gamma = least_coefficient(sigma, k, p, mu, eta)
    chosen_wrongly = k * p**-eta / math.sqrt(2 * math.log(p))
    one_small = min(1.0, gamma * math.sqrt(2 / math.pi) / signal)
    return chosen_wrongly * one_small**k if printed else min(1.0, chosen_wrongly + k * one_small)


def largest_chi_square(n: int) -> float:
    """3 log n + (3/2) log 3, which the mean of the largest of n squares of normal numbers does not exceed (A.1.2).

    >>> largest_chi_square(1) >= 1
    True
    """
    if n < 1:
        raise InputError(describe(f"n={n}", "at least one", "take more"))
    return 3 * math.log(n) + 1.5 * math.log(3)
