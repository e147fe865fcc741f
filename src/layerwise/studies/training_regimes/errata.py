"""Where chapters 5 and 6 of George (2023) err: each printed reading and its correction, against a computation.

Every function draws a small instance and returns how far both readings are from the truth, relative to it; the truth is
computed without the formula in question (by steps of a flow, a supremum over all signs, gradients themselves, …).
"""

import itertools
from collections.abc import Callable

import numpy as np

from layerwise import theory
from layerwise.studies.feature_learning.errata import Readings
from layerwise.theory import QuadraticModel

Array = np.ndarray
Number = float | np.floating
Random = np.random.Generator


def _both(printed: Array | Number, corrected: Array | Number, truth: Array | Number) -> Readings:
    """Relative errors."""
    errors = (np.linalg.norm(np.asarray(found) - truth) / np.linalg.norm(truth) for found in (printed, corrected))
    return Readings(**dict(zip(("printed", "corrected"), map(float, errors), strict=True)))


def _model(random: Random, scale: float = 0.2) -> QuadraticModel:
    return theory.quadratic_model(random.standard_normal((4, 5)), random.standard_normal(4), scale=scale)


def _diagonal(random: Random, scale: float) -> QuadraticModel:
    """Modes of speeds 1, 1.6, 2.6 and 4.1, each disturbed, in some order of their sizes."""
    mu = np.sort(random.uniform(1, 3, 4))[::-1]
    speeds = random.permutation([1.0, 1.6, 2.6, 4.1]) * random.uniform(0.95, 1.05, 4)
    return theory.quadratic_model(np.diag(np.sqrt(mu)), speeds / np.sqrt(mu), scale=scale)


def _integrated(velocity: Callable[[Array], Array], start: Array, horizon: float, steps: int = 2000) -> Array:
    """Runge and Kutta's fourth order."""
    h, w = horizon / steps, start
    for _ in range(steps):
        a = velocity(w)
        b = velocity(w + h / 2 * a)
        c = velocity(w + h / 2 * b)
        w = w + h / 6 * (a + 2 * b + 2 * c + velocity(w + h * c))
    return w


def _reached(path: Callable[[float], float], target: float, horizon: float) -> float:
    """When a rising function of time is at its target, by bisection."""
    low, high = 0.0, horizon
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if path(middle) < target else (low, middle)
    return high


def linearized_flow(random: Random) -> Readings:
    """(5.4.6): weights of the linearized model by integration of their gradient.

    >>> found = linearized_flow(np.random.default_rng(0))
    >>> found.printed > 0.01, found.corrected < 1e-8
    (True, True)
    """
    model, t = _model(random), 1.0
    A, w0 = model.X @ model.V, np.sqrt(2 * model.start)
    w = _integrated(lambda w: -w0 * (A.T @ (A @ (w0 * (w - w0) + w0**2 / 2) - model.y)), w0, t)
    truth = w0 * (w - w0) + w0**2 / 2
    at = np.array([t])
    return _both(model.printed_linearized_flow(at)[0], model.linearized_flow(at)[0], truth)


def linearized_parameters(random: Random) -> Readings:
    """θ̄ of the linearized model near the start, against ½w² there (differences of second order are left)."""
    model = _model(random)
    w = np.sqrt(2 * model.start) * (1 + 1e-6 * random.standard_normal(len(model.start)))
    return _both(model.printed_linearized_parameters(w), model.linearized_parameters(w), w**2 / 2)


def times(random: Random) -> Readings:
    """(5.4.7), left: when the modes of the non-linear flow are ε-close, by bisection of the flow."""
    return _times(random, linearized=False)


def linearized_times(random: Random) -> Readings:
    """(5.4.7), right: when those of the linearized flow are."""
    return _times(random, linearized=True)


def _times(random: Random, linearized: bool) -> Readings:
    model, eps = _diagonal(random, scale=2e-3), 1e-3
    flow = model.linearized_flow if linearized else model.flow
    names = ("printed_linearized_times", "linearized_times") if linearized else ("printed_times", "times")
    printed, corrected = (getattr(model, name)(eps) for name in names)
    truth = [
        _reached(lambda t, k=k: float(flow(np.array([t]))[0, k]), float(model.target[k]) - eps, 3 * float(printed[k]))
        for k in range(4)
    ]
    return _both(printed, corrected, np.array(truth))


def ratio_of_times(random: Random) -> Readings:
    """t_k/t_l of the fastest and the slowest mode, from a start so small that logarithms hardly differ."""
    model = _diagonal(random, scale=1e-12)
    k, l = int(model.speeds[:4].argmax()), int(model.speeds[:4].argmin())
    exact = model.exact_times(1e-6)
    return _both(model.printed_ratio_of_times(k, l), model.ratio_of_times(k, l), exact[k] / exact[l])


def when_converged(random: Random) -> Readings:
    """(5.4.8): where slower modes are when the second one has converged, by the flow at that time."""
    scale, eps = 1e-5, 1e-3
    model = _diagonal(random, scale)
    k = int(np.argsort(model.speeds[:4])[-2])
    time = _reached(lambda t: float(model.flow(np.array([t]))[0, k]), float(model.target[k]) - eps, 100.0)
    (truth,) = model.flow(np.array([time]))
    return _both(model.printed_when_converged(k, eps, scale), model.when_converged(k, eps, scale), truth[:4])


def learned_first(random: Random) -> Readings:
    """Example 2: by how much flipped labels have been learned when the others' squared error is 0.3, in three bases.

    As printed for the η = 5 of the authors' code, and for η = 1, which meets the condition on ỹ_1.
    """
    seed = int(random.integers(2**31))

    def learned(noise: float) -> float:
        errors = []
        for basis in ("lapack", "random", "aligned"):
            model, clean = theory.label_noise(noise=noise, basis=basis, seed=seed, d=25)
            curve = np.square(model.outputs(model.flow(np.geomspace(1e-3, 10, 4000))) - model.y)
            (at, *_) = np.flatnonzero(curve[:, clean].mean(1) <= 0.3)
            errors.append(curve[at, ~clean].mean())
        return max(0.0, 1 - min(errors))  # the squared error at the start is one

    return Readings(printed=learned(5.0), corrected=learned(1.0))


def spurious_coordinate(random: Random) -> Readings:
    """Example 3: a spurious feature has the label's sign in the majority alone; share of the minority where not."""
    n = int(random.integers(8, 30))
    q = int(random.integers(1, (n - 1) // 2 + 1))
    model, majority = theory.spurious_feature(n, q, d=n + 3)
    agrees = np.sign(model.X[:, :2]) == model.y[:, None]
    wrong = np.abs(agrees.astype(float) - majority[:, None]).mean(0) / (q / n)
    return Readings(printed=float(wrong[1]), corrected=float(wrong[0]))


def _regression(random: Random, n: int = 5, P: int = 8) -> tuple[Array, Array, Array, Array]:
    """Features, labels, and singular vectors and eigenvalues of the kernel."""
    Phi, y = random.standard_normal((n, P)), random.standard_normal(n)
    U, singular, _ = np.linalg.svd(Phi, full_matrices=False)
    return Phi, y, U, singular**2


def step_along_modes(random: Random) -> Readings:
    """After (B.1.28): v_jᵀδw of a step of descent, itself."""
    Phi, y, U, lam = _regression(random)
    eta, df = 0.1, -y
    V = Phi.T @ U / np.sqrt(lam)
    printed = np.sqrt(lam) * (U.T @ df)
    return _both(printed, -eta * printed, V.T @ (-eta * Phi.T @ df))


def time_constant(random: Random) -> Readings:
    """Appendix B.1.5.2: by how much modes shrink in three steps of descent at η = 1/λ_1."""
    Phi, y, U, lam = _regression(random)
    w, steps = np.zeros(Phi.shape[1]), 3
    for _ in range(steps):
        w = w - Phi.T @ (Phi @ w - y) / lam[0]
    left = np.abs(U.T @ (Phi @ w - y) / (U.T @ y))[1:]
    truth = -steps / np.log(left)
    decay = np.log(1 - lam[1:] / lam[0])
    return _both(-decay, -1 / decay, truth)


def singular_values(random: Random) -> Readings:
    """Appendix B.1.5.2: the features from their singular vectors and the kernel's eigenvalues."""
    Phi, _, U, lam = _regression(random)
    V = Phi.T @ U / np.sqrt(lam)
    return _both((U * lam) @ V.T, (U * np.sqrt(lam)) @ V.T, Phi)


def centering(random: Random, n: int = 12, c: int = 3, P: int = 6) -> Readings:
    """(6.3.3): the alignment of centred features, Φ(x) − E Φ(x) as in section 6.3.1, with centred labels."""
    Phi = random.standard_normal((n, c, P)) + 2 * random.standard_normal((1, c, P))
    labels = np.eye(c)[random.permutation(np.arange(n) % c)]

    def aligned(features: Array, y: Array) -> float:
        K = features.reshape(n * c, P) @ features.reshape(n * c, P).T
        return float(y.ravel() @ K @ y.ravel() / (np.linalg.norm(K) * (y**2).sum()))

    C, Cn = np.eye(n * c) - 1 / (n * c), np.eye(n) - 1 / n
    flat, each = Phi.reshape(n * c, P), np.kron(Cn, np.eye(c))
    printed, corrected = (
        aligned((centre @ flat).reshape(n, c, P), (centre @ labels.ravel()).reshape(n, c)) for centre in (C, each)
    )
    return _both(printed, corrected, aligned(Phi - Phi.mean(0), labels - labels.mean(0)))


def top_eigenvalues(random: Random) -> Readings:
    """(6.3.2): the share of the trace that the best approximation of rank k has."""
    Phi, _, _, lam = _regression(random)
    k, K = 2, Phi @ Phi.T
    values, U = np.linalg.eigh(K)
    truth = np.trace(U[:, -k:].T @ K @ U[:, -k:]) / values.sum()
    return _both(lam[: k - 1].sum() / lam.sum(), lam[:k].sum() / lam.sum(), truth)


def indicator(random: Random) -> Readings:
    """Before (B.2.23): δ from ε = 2δ − 1."""
    delta = random.permutation([1.0, 0.0, *random.integers(0, 2, 6)])
    eps = 2 * delta - 1
    return _both((eps + 0.5) / 2, (eps + 1) / 2, delta)


def classes_apart(random: Random, functions: int = 6, n: int = 6, c: int = 3) -> Readings:
    """(B.2.22): E sup Σ_y against Σ_y E sup, over all signs, for a few functions.

    How far the two are from equal, and by how much the first exceeds the second.
    """
    margins = random.standard_normal((functions, n, c))
    own = np.eye(c)[random.integers(0, c, n)]
    signs = np.array(list(itertools.product((-1.0, 1.0), repeat=n)))
    sums = np.einsum("si,fiy,iy->sfy", signs, margins, own)
    together, apart = sums.sum(2).max(1).mean(), sums.max(1).mean(0).sum()
    return Readings(printed=abs(together - apart) / apart, corrected=max(0.0, (together - apart) / apart))


def square_of_the_norm(random: Random) -> Readings:
    """(B.2.37): the trace of the rescaled kernel, from the rescaled features."""
    Phi, _, U, lam = _regression(random)
    nu = random.uniform(0.5, 2, len(lam))
    V = Phi.T @ U / np.sqrt(lam)
    A = (V * (np.sqrt(nu) - 1)) @ V.T + np.eye(Phi.shape[1])
    norm = np.linalg.norm(np.linalg.solve(A, Phi.T))
    return _both(norm, norm**2, (lam / nu).sum())


def kappa(random: Random, draws: int = 20) -> Readings:
    """(6.4.10): SuperNat's error at the end over gradient descent's, if the trace of the kernel is kept, and if κ is.

    Means over some regressions with noise that can be fitted.
    """
    from layerwise.studies.tangent_alignment.supernat import NoisyRegression

    study, seeds = NoisyRegression(steps=200), [int(seed) for seed in random.integers(0, 2**31, draws)]
    gd, kept, trace = (
        float(study.curves(seeds, method).test[:, -1].mean()) for method in ("gd", "supernat", "supernat-trace")
    )
    return Readings(printed=trace / gd, corrected=kept / gd)
