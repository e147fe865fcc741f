"""The algorithms once more: one run at a time, numpy, from raw samples, with explicit inverses and autograd-free sums.

Shares nothing with the library but the draws.
"""

import numpy as np

from layerwise.foundations.random import stream
from layerwise.studies.feature_learning.batch import draw_batch
from layerwise.studies.feature_learning.covariance import haar
from layerwise.studies.feature_learning.problem import draw_problem

inv = np.linalg.inv


def raw(task, n, generator):
    drawn = draw_batch(task, n, generator).samples()
    return drawn.x.numpy(), drawn.y.numpy(), drawn.normal.numpy()


def ortho(G):
    Q, R = np.linalg.qr(G.T)
    return (Q * np.sign(np.diag(R))).T


def head(G, X, Y):
    return np.linalg.lstsq(X @ G.T, Y, rcond=None)[0].T


def gradients(F, G, X, Y):
    R = X @ G.T @ F.T - Y  # n × dy
    n = len(X)
    return R.T @ (X @ G.T) / n, (R @ F).T @ X / n


def root(A, exponent):
    values, V = np.linalg.eigh(A)
    return V @ np.diag(values**exponent) @ V.T


def direction(name, F, G, X, Y):
    """P⁻¹ ∇_G Q⁻¹ of the alternating family."""
    g, Sx = gradients(F, G, X, Y)[1], X.T @ X / len(X)
    if name == "amgd":
        return g
    if name == "dfw":
        return g @ inv(Sx)
    if name in ("kfac", "altminmin"):
        return inv(F.T @ F) @ g @ inv(Sx)
    if name == "kfac_ridge":
        return inv(F.T @ F) @ g @ inv(Sx + 0.3 * np.eye(len(Sx)))
    P, Q = root(F.T @ F, -0.5), root(Sx, -0.5)
    U, s, Vt = np.linalg.svd(P @ g @ Q, full_matrices=False)
    return s.sum() * P @ U @ Vt @ Q


def both_layers(name, g, S, lr):
    if name == "foof":
        return g @ inv(S + 0.1 * np.eye(len(S)))
    if name == "locoprop":
        return g @ inv(np.eye(len(S)) + lr * S)
    if name == "sign":
        return np.sign(g)
    U, _, Vt = np.linalg.svd(g, full_matrices=False)
    return U @ Vt


def joint_fisher(F, G, X, r):
    """mean over samples, sum over vectors r (n × v × dy) of J r rᵀ Jᵀ."""
    by_G = np.einsum("oi,nvo,na->nvia", F, r, X)
    by_F = np.einsum("nvo,nj->nvoj", r, X @ G.T)
    rows = np.concatenate([by_G.reshape(-1, G.size), by_F.reshape(-1, F.size)], axis=1)
    return rows.T @ rows / len(X)


def natural(F, G, X, Y, normal, fisher="exact", solver="pinv", damping=0.0):
    dy = F.shape[0]
    R = X @ G.T @ F.T - Y
    if solver == "closed_form":
        Sx = X.T @ X / len(X)
        W, pinv = R.T @ X / len(X) @ inv(Sx), np.linalg.pinv(F)
        return (np.eye(dy) - F @ pinv) @ W @ Sx @ G.T @ inv(G @ Sx @ G.T), pinv @ W
    r = {"exact": np.tile(np.eye(dy), (len(X), 1, 1)), "mc": normal[:, None], "empirical": R[:, None]}[fisher]
    M = joint_fisher(F, G, X, r)
    gF, gG = gradients(F, G, X, Y)
    g = np.concatenate([gG.ravel(), gF.ravel()])
    if solver == "damped":
        d = np.linalg.solve(M + damping * np.eye(len(M)), g)
    else:
        d = np.linalg.pinv(M, rcond=1e-10, hermitian=True) @ g
    return d[G.size :].reshape(F.shape), d[: G.size].reshape(G.shape)


def normalise(norm, X, Sigma):
    if norm is None:
        return X
    C = np.cov(X.T, bias=True) if norm.endswith("batch") else Sigma
    m = X.mean(0) if norm.endswith("batch") else 0.0
    if norm.startswith("whiten"):
        return (X - m) @ root(C, -0.5)
    return (X - m) / np.sqrt(np.diag(C) + (1e-5 if norm == "coord_batch" else 0.0))


def run(name, setting, seed, lr, steps, *, norm=None, same_batch=False, head_lr=1.0, **natural_options):
    """F, G and the loss on the last batch after some steps."""
    problem = draw_problem(setting, stream(seed, "problem"))
    Sigma = problem.train.Sigma.numpy()

    def batch(*names):
        X, Y, normal = raw(problem.train, setting.batch, stream(seed, "train", *names))
        return normalise(norm, X, Sigma), Y, normal

    G = haar(setting.k, setting.dx, stream(seed, "init")).numpy()
    X, Y, _ = batch(0)
    F = head(G, X, Y)
    m = [np.zeros_like(F), np.zeros_like(G)]
    v = [np.zeros_like(F), np.zeros_like(G)]
    for t in range(1, steps + 1):
        X1, Y1, normal = batch(t, "first")
        X2, Y2, _ = (X1, Y1, None) if same_batch else batch(t, "second")
        if name == "sgd":
            gF, gG = gradients(F, G, X1, Y1)
            F, G = F - lr * gF, G - lr * gG
        elif name == "adam":
            theta = []
            for i, (p, g) in enumerate(zip((F, G), gradients(F, G, X1, Y1), strict=True)):
                m[i] = 0.9 * m[i] + 0.1 * g
                v[i] = 0.999 * v[i] + 0.001 * g**2
                theta.append(p - lr * (m[i] / (1 - 0.9**t)) / (np.sqrt(v[i] / (1 - 0.999**t)) + 1e-8))
            F, G = theta
        elif name == "ngd":
            dF, dG = natural(F, G, X1, Y1, normal, **natural_options)
            F, G = F - lr * dF, G - lr * dG
            Q = ortho(G)
            F, G = F @ (G @ Q.T), Q
        elif name in ("foof", "locoprop", "sign", "spectral", "shampoo"):
            G = G - lr * both_layers(name, gradients(F, G, X1, Y1)[1], X1.T @ X1 / len(X1), lr)
            Z = X2 @ G.T
            F = F - lr * both_layers(name, gradients(F, G, X2, Y2)[0], Z.T @ Z / len(Z), lr)
        else:
            G = ortho(G - lr * direction(name, F, G, X1, Y1))
            F = (1 - head_lr) * F + head_lr * head(G, X2, Y2)
    return F, G, 0.5 * np.mean(np.sum((Y2 - X2 @ G.T @ F.T) ** 2, 1))
