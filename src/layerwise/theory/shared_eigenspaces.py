"""How far leading eigenspaces of two models' layer Hessians overlap, if both are Kronecker products: Wu (2023), C.7.

H = M ⊗ S has the eigenvectors u_i ⊗ v_j with eigenvalues τ_i γ_j. If γ₁ is much larger than γ₂, the m leading ones all
have the factor v₁ = t, the mean input, which two models share, beside the m vectors u_i, which fill the space of the
layer's outputs. So the overlap of the k leading eigenvectors grows to (t₁ · t₂)² at k = m, however unlike the u_i are.
"""

import numpy as np
from jaxtyping import Float

from layerwise.foundations.errors import InputError, describe

Array = np.ndarray


def shared_overlap(t1: Float[Array, "n"], t2: Float[Array, "n"], k: int, m: int) -> float:
    """(k/m)(t₁ · t₂)², the expected overlap of the k ≤ m leading eigenvectors of M₁ ⊗ S₁ and M₂ ⊗ S₂ (Thm C.7.1).

    Args:
        t1: the leading eigenvector of S₁, the moment of the layer's inputs in one model, of length one.
        t2: that of the other model.
        k: eigenvectors of each.
        m: outputs of the layer.

    It needs `is_led_by_one_input` of both models, and eigenvectors of M₁ and M₂ that have nothing to do with each
    other: then each pair of them has an expected *squared* product of 1/m (the thesis prints √(1/m) for the product
    itself, and leaves out a sum and a 1/k; the result is right). Where the outputs are classes, which no permutation
    of units hides, the factor k/m is about 1 instead.

    >>> t = np.array([1.0, 0.0])
    >>> round(shared_overlap(t, np.array([0.6, 0.8]), k=5, m=20), 6)
    0.09
    """
    if not 1 <= k <= m:
        raise InputError(describe(f"k={k} for m={m} outputs", "1 ≤ k ≤ m", "take another k"))
    for t in (t1, t2):
        if not abs(float(t @ t) - 1) < 1e-6:
            given = f"a vector of length {float(t @ t) ** 0.5:.6g}"
            raise InputError(describe(given, "an eigenvector of length 1", "divide it by its length"))
    return k / m * float(t1 @ t2) ** 2


def is_led_by_one_input(tau: Float[Array, "m"], gamma: Float[Array, "n"], k: int | None = None) -> bool:
    """Whether the k leading eigenvectors of M ⊗ S all are u_i ⊗ v₁: τ_k γ₁ > τ₁ γ₂ (k = m if left away).

    Args:
        tau: eigenvalues of M, in any order.
        gamma: eigenvalues of S, in any order.
        k: the leading eigenvectors in question.

    >>> is_led_by_one_input(np.array([3.0, 1.0]), np.array([8.0, 2.0]))
    True
    >>> is_led_by_one_input(np.array([5.0, 1.0]), np.array([8.0, 2.0]))
    False
    """
    tau, gamma = np.sort(tau)[::-1], np.sort(gamma)[::-1]
    k = len(tau) if k is None else k
    if not 1 <= k <= len(tau):
        raise InputError(describe(f"k={k} for m={len(tau)} outputs", "1 ≤ k ≤ m", "take another k"))
    second = gamma[1] if len(gamma) > 1 else 0.0
    return bool(tau[k - 1] * gamma[0] > tau[0] * second)
