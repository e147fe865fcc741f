"""Hessians of random ReLU networks at their start: Wu (2023), theorem 4.4.1, corrected, and (C.265).

Two layers: x = relu(N(0, I_d)), f = W₂ relu(W₁ x) with entries N(0, 1/d) and N(0, 1/n), no biases. The Hessian of the
cross-entropy in the outputs of the first layer is M = E[D W₂ᵀ A W₂ D], with D = diag(1[W₁x > 0]) and
A = diag(p) − ppᵀ. The thesis takes each unit to be active for half of the inputs. It is not: inputs have a mean, so
that unit i is active for the share q_i = Φ(N(0, 1/(π − 1))) of them (`active_probability`), and the leading space of M
is spanned by the rows of W₂ diag(q), not of W₂. What the thesis prints is there too, as ``printed_…``.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from layerwise.foundations.errors import InputError, describe

Array = np.ndarray


class Moments(NamedTuple):
    """Of one number."""

    mean: float
    variance: float
    fourth: float
    """The fourth central moment."""


def rectified_gaussian() -> Moments:
    """Mean, variance and fourth central moment of relu(N(0, 1)).

    >>> [round(moment, 4) for moment in rectified_gaussian()]
    [0.3989, 0.3408, 0.6282]
    """
    return Moments(
        mean=1 / math.sqrt(2 * math.pi),
        variance=(math.pi - 1) / (2 * math.pi),
        fourth=(6 * math.pi**2 - 10 * math.pi - 3) / (4 * math.pi**2),
    )


class InputSpectrum(NamedTuple):
    """Eigenvalues of E[xxᵀ]/d."""

    leading: float
    """Of the direction of all ones."""
    others: float
    """Of all d − 1 other directions."""


def rectified_input_spectrum(d: int) -> InputSpectrum:
    """The two eigenvalues of E[xxᵀ]/d for x = relu(N(0, I_d)): 1/2π + (π − 1)/2πd, and (π − 1)/2πd.

    >>> leading, others = rectified_input_spectrum(1000)
    >>> round(leading, 5), round(others, 5)
    (0.1595, 0.00034)
    """
    _refuse_below_one("d", d)
    moments = rectified_gaussian()
    return InputSpectrum(moments.mean**2 + moments.variance / d, moments.variance / d)


def active_probability(W1: Float[Array, "n d"]) -> Float[Array, "n"]:
    """q_i = P(w_iᵀx > 0 | W₁) of each unit for x = relu(N(0, I_d)) and large d, by the central limit theorem.

    w_iᵀx has the mean Σ_j w_ij / √2π and the variance ‖w_i‖² (π − 1)/2π. A unit whose weights sum to zero is active for
    half of the inputs; the sums of N(0, 1/d) entries have variance 1, and do not vanish with growing d, as Lemma C.2.1
    of the thesis has it.

    >>> W1 = np.array([[0.1, -0.1] * 50, [0.1, 0.1] * 50])
    >>> active_probability(W1).round(4).tolist()
    [0.5, 1.0]
    """
    moments = rectified_gaussian()
    deviation = np.sqrt(moments.variance) * np.linalg.norm(W1, axis=1)
    if not (np.isfinite(deviation).all() and deviation.all()):
        given = "weights with a row that is zero or not finite"
        raise InputError(describe(given, "finite rows, not zero", "draw W1 anew"))
    return _normal_cdf(moments.mean * W1.sum(1) / deviation)


def initial_output_hessian(
    W2: Float[Array, "c n"], A: Float[Array, "c c"], q: Float[Array, "n"]
) -> Float[Array, "n n"]:
    """M* = E[D'D'ᵀ] ∘ W₂ᵀ E[A] W₂ with D' independent of A: q_i q_j off the diagonal and q_i on it (4.4.1, corrected).

    Args:
        W2: weights of the second layer.
        A: E[A], the mean Hessian of the loss in the logits.
        q: how often each unit is active, see `active_probability`.

    Its c − 1 leading eigenvectors are, for large n, in the span of the rows of W₂ diag(q).

    >>> W2, A = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[0.25, -0.25], [-0.25, 0.25]])
    >>> initial_output_hessian(W2, A, np.array([0.5, 1.0])).tolist()
    [[0.125, -0.125], [-0.125, 0.25]]
    """
    both = np.outer(q, q)
    np.fill_diagonal(both, q)
    return both * (W2.T @ A @ W2)


def printed_initial_output_hessian(W2: Float[Array, "c n"], A: Float[Array, "c c"]) -> Float[Array, "n n"]:
    """M* = ¼ (W₂ᵀ E[A] W₂ + diag(·)), as theorem 4.4.1 prints it: every unit is active for half of the inputs.

    It is right where the rows of W₁ sum to zero. Otherwise its leading space has an overlap of `printed_overlap` with
    that of M.

    >>> W2, A = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[0.25, -0.25], [-0.25, 0.25]])
    >>> printed_initial_output_hessian(W2, A).tolist()
    [[0.125, -0.0625], [-0.0625, 0.125]]
    """
    return initial_output_hessian(W2, A, np.full(W2.shape[1], 0.5))


def mean_squared_probability() -> float:
    """E[q²] = ¼ + arcsin(1/π)/2π for q = Φ(N(0, 1/(π − 1))): two inputs share the mean, which is 1/π of the variance.

    >>> round(mean_squared_probability(), 6)
    0.301558
    """
    return 0.25 + math.asin(1 / math.pi) / (2 * math.pi)


def printed_overlap() -> float:
    """The limit of the overlap of the leading space that is printed with the true one: (E q)²/E[q²], not 1.

    >>> round(printed_overlap(), 3)
    0.829
    """
    return 0.25 / mean_squared_probability()


def deep_output_hessian(weights: Sequence[Float[Array, "_ _"]], A: Float[Array, "c c"]) -> Float[Array, "m m"]:
    """M̃_p = 4^-(L − p) S_pᵀ E[A] S_p with S_p = W_L … W_{p+1}, of rank c − 1 (C.265): a heuristic for deeper networks.

    It takes every unit to be active for half of the inputs, as the printed theorem does.

    Args:
        weights: W_{p+1}, …, W_L, those behind the layer; none for the last layer, where M̃ is E[A] itself.
        A: E[A].

    >>> A = np.array([[0.25, -0.25], [-0.25, 0.25]])
    >>> deep_output_hessian([np.eye(2)], A).tolist()
    [[0.0625, -0.0625], [-0.0625, 0.0625]]
    """
    S = np.eye(len(A))
    for W in reversed(weights):
        if W.shape[0] != S.shape[1]:
            given = f"weights of shapes {[tuple(W.shape) for W in weights]} and {len(A)} classes"
            raise InputError(describe(given, "matrices that follow one another, the last with c rows", "check them"))
        S = S @ W
    return 4.0 ** -len(weights) * (S.T @ A @ S)


def _normal_cdf(values: Float[Array, "n"]) -> Float[Array, "n"]:
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in values.tolist()])


def _refuse_below_one(name: str, value: int) -> None:
    if value < 1:
        raise InputError(describe(f"{name}={value}", f"{name} ≥ 1", "take a larger one"))
