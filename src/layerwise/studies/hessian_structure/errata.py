"""Where chapter 4 and appendix C of Wu (2023) err: each printed reading and its correction, against a computation.

Every function draws a small instance and returns how far both readings are from the truth, relative to it; the truth is
computed without the formula in question.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

from layerwise import theory
from layerwise.studies.feature_learning.errata import Readings

Array = np.ndarray
Random = np.random.Generator


def _both(printed: Array | float, corrected: Array | float, truth: Array | float) -> Readings:
    """Relative errors."""
    size = float(np.linalg.norm(truth))
    errors = [float(np.linalg.norm(np.asarray(found) - truth)) / size for found in (printed, corrected)]
    return Readings(printed=errors[0], corrected=errors[1])


def _softmax(f: Array) -> Array:
    e = np.exp(f - f.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def kronecker(random: Random) -> Readings:
    """Section 4.2: entries of M ⊗ N, against (M ⊗ N)(u ⊗ v) = Mu ⊗ Nv."""
    M, N = random.standard_normal((2, 3, 3))
    printed, corrected = np.zeros((9, 9)), np.zeros((9, 9))
    for a in range(9):
        for b in range(9):
            (i1, i2), (j1, j2) = divmod(a, 3), divmod(b, 3)
            printed[a, b] = M[i1, i2] * N[j1, j2]
            corrected[a, b] = M[i1, j1] * N[i2, j2]
    u, v = random.standard_normal((2, 3))
    both = np.outer(u, v).ravel()
    return _both(printed @ both, corrected @ both, np.outer(M @ u, N @ v).ravel())


def matricization(random: Random) -> Readings:
    """Definition 4.2.2: entries of Mat(h), m × n, against Mat(u ⊗ v) = u vᵀ."""
    m, n = 3, 5
    u, v = random.standard_normal(m), random.standard_normal(n)
    h = np.array([a * b for a in u for b in v])
    i, j = np.meshgrid(np.arange(m), np.arange(n), indexing="ij")
    return _both(h[i * m + j], h[i * n + j], np.outer(u, v))


def mask(random: Random) -> Readings:
    """Section 4.4: D with ones where the unit's *output* is ≥ 0, against the Hessian by autograd."""
    W2, z = random.standard_normal((3, 6)), random.standard_normal(6)
    z[:3], z[3:] = abs(z[:3]), -abs(z[3:])  # some are active, some are not
    second, inputs = torch.from_numpy(W2), torch.from_numpy(z).requires_grad_()
    loss = nn.functional.cross_entropy(second @ inputs.relu(), torch.tensor(0))
    (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
    truth = torch.stack([torch.autograd.grad(g, inputs, retain_graph=True)[0] for g in gradient]).numpy()
    y = np.maximum(z, 0)
    p = _softmax(W2 @ y)
    A = np.diag(p) - np.outer(p, p)
    M = [np.diag(active) @ W2.T @ A @ W2 @ np.diag(active) for active in ((y >= 0) * 1.0, (z > 0) * 1.0)]
    return _both(M[0], M[1], truth)


def mean_loss(random: Random) -> Readings:
    """(C.2): the Hessian of the loss, a mean over N examples, as the sum of theirs; of linear regression."""
    X, y, w, h = random.standard_normal((8, 3)), random.standard_normal(8), random.standard_normal(3), 1e-3

    def loss(w: Array) -> float:
        return float(((X @ w - y) ** 2).mean() / 2)

    steps = h * np.eye(3)
    truth = np.array(
        [[loss(w + a + b) - loss(w + a - b) - loss(w - a + b) + loss(w - a - b) for b in steps] for a in steps]
    ) / (4 * h * h)
    return _both(X.T @ X, X.T @ X / len(X), truth)


def sum_of_weights(random: Random) -> Readings:
    """Lemma C.2.1: the variance of a sum of n weights of variance 1/n."""
    n, draws = 100, 20_000
    sums = random.standard_normal((draws, n)).sum(1) / math.sqrt(n)
    return _both(1 / n, 1.0, float((sums**2).mean()))


def products_of_vectors(random: Random) -> Readings:
    """Before (C.261): unrelated unit vectors have products of √(1/m), or squared products of 1/m, in the mean."""
    m = 20
    first, second = random.standard_normal((2, 20_000, m))
    products = np.einsum("sm,sm->s", first, second)
    products /= np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    printed = abs(math.sqrt(1 / m) - abs(products).mean()) / abs(products).mean()
    return Readings(printed=float(printed), corrected=float(abs(m * (products**2).mean() - 1)))


def overlap_as_a_sum(random: Random) -> Readings:
    """(C.261): the overlap of two spaces by their bases, against the cosines of the angles between them."""
    m, k = 12, 4
    U, V = (np.linalg.qr(random.standard_normal((m, k)))[0] for _ in range(2))
    projected = U @ U.T @ V @ V.T
    truth = float(np.trace(projected)) / k  # Σ cos² / k, which knows no basis
    products = (U.T @ V) ** 2
    return _both(float(np.trace(products)), float(products.sum() / k), truth)


def clusters(random: Random) -> Readings:
    """(C.264): E[M] from mean logit gradients, as a mean over classes and logits, or a sum over the latter.

    One example a class, so that there is no variance within classes, which both readings leave out.
    """
    c, m = 4, 6
    G, f = random.standard_normal((c, c, m)), random.standard_normal((c, c))
    p = _softmax(f)
    A = np.einsum("ia,ab->iab", p, np.eye(c)) - np.einsum("ia,ib->iab", p, p)
    truth = np.einsum("iam,iab,ibn->mn", G, A, G) / c
    Q = np.sqrt(p)[:, :, None] * (np.eye(c) - p[:, None, :])
    gamma = np.einsum("ijk,ikm->ijm", Q, G)
    total = np.einsum("ijm,ijn->mn", gamma, gamma)
    return _both(total / c**2, total / c, truth)


def default_start(random: Random) -> Readings:
    """Section C.5: the deviation of weights that `nn.Linear` draws: Xavier's, or that of evenly within ± fan-in^-½."""
    fan_in, fan_out = 400, 100
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(random.integers(2**31)))
        weight = nn.Linear(fan_in, fan_out).weight.detach().double()
    return _both(math.sqrt(2 / (fan_in + fan_out)), 1 / math.sqrt(3 * fan_in), float(weight.std()))


def rescaling(random: Random) -> Readings:
    """Section C.2.3: by how much the norm of E[xxᵀ]/d² and of E[xxᵀ]/d changes if there are 16 times as many inputs.

    The proof needs a norm that neither vanishes nor grows.
    """
    d = int(random.integers(200, 400))

    def norm(d: int) -> float:
        leading, others = theory.rectified_input_spectrum(d)
        return math.sqrt(leading**2 + (d - 1) * others**2)  # of E[xxᵀ]/d

    corrected = norm(16 * d) / norm(d)
    return Readings(printed=abs(corrected / 16 - 1), corrected=abs(corrected - 1))
