"""All tasks and step sizes at once, against one task at a time by plain gradient descent."""

import re

import numpy as np
import pytest
import torch

from error_sentences import WORDED
from layerwise.foundations.errors import InputError, NameLookupError
from layerwise.meta import LeastSquares


def plain(x, y, eta, steps, limit):
    """One task, step by step; weights that reach the limit are frozen."""
    w = torch.zeros(x.shape[1], dtype=x.dtype)
    for _ in range(steps):
        w = w - eta * x.T @ (x @ w - y) / len(y)
        if limit is not None and float(w.norm()) >= limit:
            return None
    return w


@pytest.mark.parametrize("n", [5, 12])
def test_every_run_is_plain_gradient_descent(n):
    tasks = LeastSquares.draw(tasks=3, n=n + 4, d=8, noise=1.5).split(n)
    etas = torch.tensor([1e-3, 0.1, 0.4, 3.0], dtype=torch.float64)
    found = tasks.descend(etas, 9)
    assert found.truncated.any()
    assert not found.truncated.all()
    assert found.validation_loss is not None
    for i in range(3):
        for j, eta in enumerate(etas):
            w = plain(tasks.x[i], tasks.y[i], eta, 9, tasks.limit)
            assert (w is None) == bool(found.truncated[i, j])
            if w is None:
                w = found.weights[i, j]
                assert float(w.norm()) == pytest.approx(60.0)  # 40 σ
            torch.testing.assert_close(found.weights[i, j], w, rtol=1e-9, atol=1e-12)
            train = 0.5 * (tasks.y[i] - tasks.x[i] @ w).square().mean()
            valid = 0.5 * (tasks.y_valid[i] - tasks.x_valid[i] @ w).square().mean()
            torch.testing.assert_close(found.train_loss[i, j], train, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(found.validation_loss[i, j], valid, rtol=1e-9, atol=1e-12)
            error = (w - tasks.truth[i]).square().sum()
            torch.testing.assert_close(tasks.error(found.weights)[i, j], error, rtol=1e-9, atol=1e-12)


def test_learn_step_takes_the_least_of_the_mean_over_tasks():
    tasks = LeastSquares.draw(tasks=6, n=10, d=20, noise=2.0).split(5)
    etas = torch.tensor([1.0, 1e-3, 1e-2, 1e-1], dtype=torch.float64)
    for by in ("train", "validation"):
        objective = tasks.objective(etas, 20, by)
        found = tasks.learn_step(etas, 20, by)
        assert found.eta == float(etas[objective.argmin()])
        torch.testing.assert_close(found.objective, objective[etas.argsort()])


def test_other_noise_has_the_same_draws_and_is_not_decomposed_again():
    made = lambda noise: LeastSquares.draw(  # noqa: E731
        tasks=2, n=8, d=6, noise=noise, generator=torch.Generator().manual_seed(1)
    ).split(4)
    louder, expected = made(1.0).with_noise_times(3.0), made(3.0)
    torch.testing.assert_close(louder.y, expected.y)
    torch.testing.assert_close(louder.y_valid, expected.y_valid)
    assert louder.limit == expected.limit
    torch.testing.assert_close(louder.descend(0.2, 5).weights, expected.descend(0.2, 5).weights)


def test_without_a_limit_divergence_is_an_infinite_loss():
    tasks = LeastSquares.draw(tasks=2, n=4, d=3, noise=1.0, truncate=None)
    assert torch.isinf(tasks.descend(1e6, 200).train_loss).all()


def test_what_is_frozen_stays_so_though_it_would_come_back():
    x, y = torch.ones(1, 1, 1).double(), torch.ones(1, 1).double()  # w goes to 1, past the limit of 0.5
    found = LeastSquares(x, y, limit=0.5).descend(1.6, 8)  # 1.6, frozen; not frozen, 0.5 → 1.3 → 0.82 → …
    assert found.truncated.all()
    torch.testing.assert_close(found.weights.abs(), torch.full((1, 1, 1), 0.5).double())
    loud = LeastSquares(torch.cat([x, 0 * x], 2), y, limit=1.2).descend(1.6, 3)  # 1.6 > 1.2, then it would be 0.88
    torch.testing.assert_close(loud.weights.norm(), torch.tensor(1.2).double())


X, Y = torch.ones(2, 3, 4), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LeastSquares(X, Y[:, :2]), "shapes"),
        (lambda: LeastSquares(X * torch.nan, Y), "NaN"),
        (lambda: LeastSquares(X, Y, X), "alone"),
        (lambda: LeastSquares(X, Y.double()), "float32 and torch.float64"),
        (lambda: LeastSquares(X.long(), Y.long()), "int64"),
        (lambda: LeastSquares(X.numpy(), Y.numpy()), "ndarray"),
        (lambda: LeastSquares(X, Y).split(2.5), "n=2.5"),
        (lambda: LeastSquares(X, Y).learn_step(torch.tensor([1e9, 1e6]), 90, "train"), "diverge"),
        (lambda: LeastSquares(X, Y, X[:, :, :2], Y), "shapes"),
        (lambda: LeastSquares(X[:, :0], Y[:, :0]), "shapes"),
        (lambda: LeastSquares(X, Y, truth=torch.ones(3, 4)), "truth"),
        (lambda: LeastSquares(X, Y, limit=0.0), "limit"),
        (lambda: LeastSquares(X, Y).split(3), "n=3"),
        (lambda: LeastSquares(X, Y).objective(0.1, 5, "validation"), "without validation data"),
        (lambda: LeastSquares(X, Y).objective(0.0, 5, "train"), "eta=0"),
        (lambda: LeastSquares(X, Y).objective(torch.tensor([0.1, torch.nan]), 5, "train"), "eta=nan"),
        (lambda: LeastSquares(X, Y).objective(torch.tensor([]), 5, "train"), "no step size"),
        (lambda: LeastSquares(X, Y).descend(0.1, 0), "steps=0"),
        (lambda: LeastSquares(X, Y).error(torch.ones(2, 1, 4)), "not known"),
        (lambda: LeastSquares.draw(tasks=1, n=0, d=4, noise=1.0), "n=0"),
        (lambda: LeastSquares.draw(tasks=1, n=2, d=4, noise=-1.0), "noise"),
        (lambda: LeastSquares.draw(tasks=1, n=2, d=4, noise=1.0).with_noise_times(0.0), "factor"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(unchecked, call, message):
    with pytest.raises(InputError, match=message) as caught:
        call()
    assert re.fullmatch(WORDED, str(caught.value))


def test_numpys_integers_are_integers(unchecked):
    found = LeastSquares(X, Y).split(np.int64(2)).objective(0.1, np.int64(3))
    torch.testing.assert_close(found, LeastSquares(X, Y).split(2).objective(0.1, 3))


def test_an_unknown_meta_objective_is_answered_with_the_known():
    with pytest.raises(NameLookupError, match="validation"):
        LeastSquares(X, Y).objective(0.1, 5, "valid")
