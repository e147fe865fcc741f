"""Predicted noise floors against a plain recursion with numpy, and the terms of a step against explicit inverses."""

import math

import numpy as np
import pytest
import torch

from layerwise.foundations.errors import InputError
from layerwise.foundations.random import stream
from layerwise.studies import feature_learning as fl
from layerwise.studies.feature_learning.batch import draw_batch
from layerwise.studies.feature_learning.covariance import haar, log_spaced, power
from layerwise.studies.feature_learning.noise_floor import (
    deviation_of_level,
    dfw_floor,
    kfac_floor,
    step_terms,
    with_level,
)
from layerwise.studies.feature_learning.population import distances, tilted
from layerwise.studies.feature_learning.problem import Task
from layerwise.studies.feature_learning.two_layer import least_squares_head

K, DX, DY, N = 2, 8, 3, 60


def drawn(seed=0, level=0.02):
    random = stream(seed, "problem")
    G, Sigma = haar(K, DX, random), log_spaced(DX, 4.0, random)
    F = haar(K, DY, random).mT * torch.tensor([1.0, 0.5], dtype=torch.float64)
    task = Task(Sigma=Sigma, root=power(Sigma, 0.5), map=F @ G, deviation=0.0, uniform=False)
    return G, with_level(G, task, N, level)


def recursion(G, task, eta, kfac, steps=1500):
    """The mean of ‖D‖ over D⁺ = (I − ηM)D + noise with inputs drawn anew, D and its noise outside rowsp(G⋆)."""
    rng = np.random.default_rng(0)
    F, root, star = (task.map @ G.mT).numpy(), task.root.numpy(), G.numpy()
    M = np.eye(K) if kfac else F.T @ F
    D, found = np.zeros((K, DX)), []
    for t in range(steps):
        X, E = rng.standard_normal((N, DX)) @ root, task.deviation * rng.standard_normal((N, DY))
        noise = F.T @ np.linalg.solve(X.T @ X, X.T @ E).T
        noise = np.linalg.solve(F.T @ F, noise) if kfac else noise
        D = D - eta * M @ D + eta * (noise - noise @ star.T @ star)
        found.append(np.linalg.norm(D, 2) if t > 100 else 0)
    return np.mean(found[101:])


@pytest.mark.parametrize("eta", [0.2, 0.8])
def test_floors_are_those_of_the_recursions(eta):
    G, task = drawn()
    random = stream(0, "prediction")
    assert kfac_floor(G, [task], N, eta, random, 2000) == pytest.approx(recursion(G, task, eta, True), rel=0.06)
    assert dfw_floor(G, task, N, eta, random, 2000) == pytest.approx(recursion(G, task, eta, False), rel=0.08)


def test_a_level_is_that_of_the_theorem():
    G, task = drawn(level=0.07)
    s = float(torch.linalg.svdvals(task.map @ G.mT)[-1]) * float(torch.linalg.eigvalsh(task.Sigma)[0]) ** 0.5
    assert task.deviation / s * math.sqrt(DX / N) == pytest.approx(0.07)
    assert deviation_of_level(G, task, 4 * N, 0.07) == pytest.approx(2 * task.deviation)


def test_four_equal_tasks_halve_the_floor():
    G, task = drawn()
    one, four = (kfac_floor(G, [task] * T, N, 0.5, stream(0, T), 1000) for T in (1, 4))
    assert four / one == pytest.approx(0.5, rel=0.05)
    with pytest.raises(InputError, match="dx"):
        kfac_floor(G, [task], DX + 1, 0.5, stream(0, "prediction"))


def test_terms_of_a_step_by_explicit_inverses():
    G, task = drawn()
    start = tilted(G, torch.full((K,), 0.01, dtype=torch.float64), stream(0, "start"))
    first, second = (draw_batch(task, N, stream(0, name)) for name in "ab")
    found = step_terms(start, G, task, first, second, lr=0.4)
    F = least_squares_head(start, first)
    plus, (x, y, _) = torch.linalg.pinv(F), second.samples()
    noise = plus @ (y - x @ task.map.mT).mT @ x @ torch.linalg.inv(x.mT @ x)
    assert found.noise == pytest.approx(float(torch.linalg.matrix_norm(noise, 2)), rel=1e-8)
    least = float(torch.linalg.svdvals(task.map @ G.mT)[-1])
    assert found.head == pytest.approx(float(torch.linalg.matrix_norm(plus, 2)) * least, rel=1e-8)
    moved = start - 0.4 * fl.KFAC().direction(F, start, second)
    assert found.factor == pytest.approx(float(torch.linalg.svdvals(moved)[-1]), rel=1e-9)


def test_runs_begin_at_starts_and_heads_of_ones_choice():
    G, task = drawn(level=0.0)
    starts = torch.stack([haar(K, DX, stream(0, i)) for i in range(3)])

    def draw():
        return draw_batch(task, N, stream(0, "train"))

    together = distances(fl.KFAC(lr=[0.5] * 3), starts, G, draw, 4)
    alone = [distances(fl.KFAC(lr=[0.5]), start, G, draw, 4)[0] for start in starts]
    assert torch.allclose(together, torch.stack(alone), rtol=1e-9)
    other = torch.randn(DY, K, generator=stream(0, "head"), dtype=torch.float64)
    wrong = distances(fl.KFAC(lr=[0.5]), starts[0], G, draw, 4, other)[0]
    assert float(wrong[0]) == float(together[0, 0])
    assert not torch.allclose(wrong[1], together[0, 1])
