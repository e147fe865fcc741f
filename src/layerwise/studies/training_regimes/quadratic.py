"""The quadratic model against an ODE solver and gradient descent, its examples, and dense networks beside it."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from layerwise.foundations.errors import NumericalError, describe
from layerwise.foundations.random import stream
from layerwise.theory import QuadraticModel, quadratic_model

Array = np.ndarray
REGIMES = ("non-linear", "linearized")


def random_model(seed: int, n: int = 6, d: int = 8) -> QuadraticModel:
    """Data drawn from a normal law, with modes of label zero in between."""
    rng = np.random.default_rng([seed, 5])
    X, y = rng.standard_normal((n, d)), rng.standard_normal(n)
    U = np.linalg.svd(X)[0]
    y = y - U[:, 2] * (U[:, 2] @ y)  # one mode whose end is zero
    return quadratic_model(X, y, scale=float(rng.uniform(0.05, 0.2)))


def trajectory(model: QuadraticModel, regime: str, times: Float[Array, "T"]) -> Float[Array, "T d"]:
    """θ(t) in closed form."""
    return (model.flow if regime == "non-linear" else model.linearized_flow)(times)


def solved(model: QuadraticModel, regime: str, times: Float[Array, "T"]) -> Float[Array, "T d"]:
    """The same by an ODE solver, for the weights w themselves: dw/dt = −∇_w ½‖Xθ − y‖², θ = ½w² or its tangent."""
    from scipy.integrate import solve_ivp

    A = model.X @ model.V  # of coordinates in the basis v
    w0 = np.sqrt(2 * model.start)

    def velocity(_: float, w: Array) -> Array:
        theta, slope = (w**2 / 2, w) if regime == "non-linear" else (model.linearized_parameters(w), w0)
        return -slope * (A.T @ (A @ theta - model.y))

    found = solve_ivp(velocity, (0, times[-1]), w0, method="DOP853", t_eval=times, rtol=1e-12, atol=1e-13)
    w = found.y.T
    return w**2 / 2 if regime == "non-linear" else np.stack([model.linearized_parameters(row) for row in w])


def error_of_closed_form(model: QuadraticModel, regime: str, horizon: float = 4.0) -> float:
    """The largest difference from the solver on a grid of times."""
    times = np.linspace(0, horizon, 60)
    return float(np.abs(trajectory(model, regime, times) - solved(model, regime, times)).max())


def error_of_descent(model: QuadraticModel, step: float, horizon: float = 2.0) -> float:
    """How far gradient descent on w, with rate `step`, is from the flow at most."""
    A, w = model.X @ model.V, np.sqrt(2 * model.start)
    path = [w]
    for _ in range(round(horizon / step)):
        w = w - step * w * (A.T @ (A @ (w**2 / 2) - model.y))
        path.append(w)
    flow = model.flow(step * np.arange(len(path)))
    return float(np.abs(np.stack(path) ** 2 / 2 - flow).max())


def first_time(reached: Callable[[Array], Bool[Array, "T"]], unit: float) -> float:
    """The first of many times at which something is reached, between 10⁻⁴ and 10⁵ units, then by bisection."""
    grid = unit * np.geomspace(1e-4, 1e5, 4_001)
    hits = reached(grid)
    if not hits.any():
        raise NumericalError(
            describe(f"nothing reached until t={grid[-1]:.3g}", "a crossing", "take a lower threshold")
        )
    k = int(hits.argmax())
    low, high = (grid[k - 1] if k else 0.0), grid[k]
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(np.array([middle]))[0] else (middle, high)
    return float(high)


def unit_of_time(model: QuadraticModel, regime: str) -> float:
    """One over the largest rate of a mode."""
    return float(1 / (2 * (model.speeds if regime == "non-linear" else model.mu * model.start).max()))


def half_times(model: QuadraticModel, regime: str) -> list[float]:
    """For each example, when its output is half of its label."""

    def half(times: Array) -> Array:
        return model.outputs(trajectory(model, regime, times)) / model.y >= 0.5

    unit = unit_of_time(model, regime)
    return [first_time(lambda times, i=i: half(times)[:, i], unit) for i in range(len(model.y))]


class AtProgress(NamedTuple):
    """Mean squared errors of both groups at one moment."""

    time: float
    easy: float
    difficult: float


def at_progress(model: QuadraticModel, easy: Bool[Array, "n"], regime: str, threshold: float) -> AtProgress:
    """When the easy examples' mean squared error first is at the threshold."""

    def errors(times: Array) -> Array:
        return np.square(model.outputs(trajectory(model, regime, times)) - model.y)

    time = first_time(lambda times: errors(times)[:, easy].mean(1) <= threshold, unit_of_time(model, regime))
    (found,) = errors(np.array([time]))
    return AtProgress(time, float(found[easy].mean()), float(found[~easy].mean()))


def error_of_times(model: QuadraticModel, eps: float) -> dict[str, float]:
    """The largest relative error of the formulas (5.4.7), corrected, over the modes, in both regimes."""
    pairs = {
        "non-linear": (model.times(eps), model.exact_times(eps)),
        "linearized": (model.linearized_times(eps), model.exact_linearized_times(eps)),
    }
    return {regime: float(np.abs(found / exact - 1).max()) for regime, (found, exact) in pairs.items()}


@torch.no_grad()
def dense_networks(
    model: QuadraticModel, seed: int, *, alpha: float, steps: int, networks: int, lr: float = 1e-3
) -> Float[Tensor, "T n"]:
    """Mean outputs α(f − f₀) of networks of two linear layers that descend the mean squared error at lr/α².

    Width is that of the inputs, weights are half of PyTorch's; all networks are one tensor program.
    """
    X, y = torch.from_numpy(model.X), torch.from_numpy(model.y)
    n, d = X.shape
    generator, edge = stream(seed, "dense networks"), 0.5 / d**0.5
    W1 = edge * (2 * torch.rand(networks, d, d, generator=generator, dtype=torch.float64) - 1)
    W2 = edge * (2 * torch.rand(networks, 1, d, generator=generator, dtype=torch.float64) - 1)
    f0, curve = (X @ W1.mT @ W2.mT).squeeze(-1), []
    for _ in range(steps + 1):
        hidden = X @ W1.mT
        f = alpha * ((hidden @ W2.mT).squeeze(-1) - f0)
        curve.append(f.mean(0))
        error = (2 / n * alpha * (f - y)).unsqueeze(1)  # ∂L/∂f, [networks, 1, n]
        W1, W2 = W1 - lr / alpha**2 * W2.mT @ (error @ X), W2 - lr / alpha**2 * error @ hidden
    return torch.stack(curve)


def relative_half_steps(curve: Float[Tensor, "T n"]) -> list[int]:
    """For each example, the first step at which its output is half of its last."""
    return [int((column >= column[-1] / 2).nonzero()[0]) for column in curve.T]
