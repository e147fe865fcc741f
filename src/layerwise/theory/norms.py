"""Preconditioned steps as steepest descent in a norm: Definition D.1 and Proposition D.2 (corrected), arXiv 2502.01763.

Steepest descent for a gradient g minimises ⟨g, M⟩ + ‖M‖²/(2η) over M; its value is −(η/2)‖g‖²_dual.
"""

import numpy as np
from jaxtyping import Float

from layerwise.foundations.errors import InputError, describe
from layerwise.theory.random_matrices import Number

Array = np.ndarray


def preconditioned_norm(M: Float[Array, "m n"], P: Float[Array, "m m"], Q: Float[Array, "n n"]) -> float:
    """‖P^½ M Q^½‖_F, the norm whose steepest descent is −η P⁻¹ g Q⁻¹ (Proposition D.2, corrected); P, Q > 0.

    >>> round(preconditioned_norm(np.eye(2), 4 * np.eye(2), np.eye(2)) ** 2, 9)
    8.0
    """
    return float(np.linalg.norm(_power(P, 0.5) @ M @ _power(Q, 0.5)))


def preconditioned_dual_norm(g: Float[Array, "m n"], P: Float[Array, "m m"], Q: Float[Array, "n n"]) -> float:
    """‖P^−½ g Q^−½‖_F, the dual of `preconditioned_norm`.

    >>> round(preconditioned_dual_norm(np.eye(2), 4 * np.eye(2), np.eye(2)) ** 2, 9)
    0.5
    """
    return float(np.linalg.norm(_power(P, -0.5) @ g @ _power(Q, -0.5)))


def preconditioned_descent(
    g: Float[Array, "m n"], P: Float[Array, "m m"], Q: Float[Array, "n n"], lr: Number = 1.0
) -> Float[Array, "m n"]:
    """−η P⁻¹ g Q⁻¹, steepest descent in `preconditioned_norm` (Proposition D.2, corrected).

    >>> preconditioned_descent(np.eye(2), 4 * np.eye(2), np.eye(2)).tolist()
    [[-0.25, -0.0], [-0.0, -0.25]]
    """
    _check_definite(P, "P")
    _check_definite(Q, "Q")
    return -float(lr) * np.linalg.solve(Q, np.linalg.solve(P, g).T).T


def printed_norm(M: Float[Array, "m n"], P: Float[Array, "m m"], Q: Float[Array, "n n"]) -> float:
    """‖Pᵀ M Qᵀ‖_F, as Proposition D.2 prints it. Kept as a counterexample: see `printed_descent`.

    >>> round(printed_norm(np.eye(2), 4 * np.eye(2), np.eye(2)) ** 2, 9)
    32.0
    """
    return float(np.linalg.norm(P.T @ M @ Q.T))


def printed_descent(
    g: Float[Array, "m n"], P: Float[Array, "m m"], Q: Float[Array, "n n"], lr: Number = 1.0
) -> Float[Array, "m n"]:
    """−η (PPᵀ)⁻¹ g (QᵀQ)⁻¹, what steepest descent in `printed_norm` is: the preconditioners come out squared.

    The paper claims −η P⁻¹ g Q⁻¹ for that norm, which is wrong.

    >>> printed_descent(np.eye(2), 4 * np.eye(2), np.eye(2)).tolist()
    [[-0.0625, -0.0], [-0.0, -0.0625]]
    """
    return -float(lr) * np.linalg.solve(Q.T @ Q, np.linalg.solve(P @ P.T, g).T).T


def mahalanobis_norm(M: Float[Array, "m n"], P: Float[Array, "m m"], Q: Float[Array, "n n"]) -> float:
    """max over x of √((Mx)ᵀP(Mx)) / √(xᵀQ⁻¹x) = ‖P^½ M Q^½‖_op, the norm induced by P and Q⁻¹.

    >>> round(mahalanobis_norm(np.eye(2), 4 * np.eye(2), np.eye(2)), 9)
    2.0
    """
    return float(np.linalg.norm(_power(P, 0.5) @ M @ _power(Q, 0.5), ord=2))


def mahalanobis_descent(
    g: Float[Array, "m n"], P: Float[Array, "m m"], Q: Float[Array, "n n"], lr: Number = 1.0
) -> Float[Array, "m n"]:
    """−η tr(S) P^−½ U Vᵀ Q^−½ with USVᵀ = P^−½ g Q^−½: steepest descent in `mahalanobis_norm`; value −(η/2) tr(S)².

    >>> mahalanobis_descent(np.eye(2), 4 * np.eye(2), np.eye(2)).round(9).tolist()
    [[-0.5, 0.0], [0.0, -0.5]]
    """
    left, right = _power(P, -0.5), _power(Q, -0.5)
    U, S, Vt = np.linalg.svd(left @ g @ right, full_matrices=False)
    return -float(lr) * S.sum() * left @ U @ Vt @ right


def _power(A: Array, exponent: float) -> Array:
    _check_definite(A, "P or Q")
    values, V = np.linalg.eigh((A + A.T) / 2)
    return (V * values**exponent) @ V.T


def _check_definite(A: Array, name: str) -> None:
    if not np.allclose(A, A.T, rtol=1e-8, atol=1e-12 * float(np.abs(A).max())):
        raise InputError(describe(f"{name} that is not symmetric", "P and Q symmetric", "pass (A + Aᵀ)/2"))
    smallest = float(np.linalg.eigvalsh(A)[0])
    if smallest <= 0:
        given = f"{name} with smallest eigenvalue {smallest:.3g}"
        raise InputError(describe(given, "P and Q positive definite", "add a damping to the diagonal"))
