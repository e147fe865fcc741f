"""Many tasks with one representation: eqs. (20)–(22), and population batches with starts of one's choice."""

import math
from typing import Any

import pytest
import torch

from layerwise.foundations.errors import InputError
from layerwise.foundations.random import stream
from layerwise.studies import feature_learning as fl
from layerwise.studies.feature_learning.batch import draw_batch
from layerwise.studies.feature_learning.covariance import haar
from layerwise.studies.feature_learning.multi_task import Tasks, draw_tasks, learn, step
from layerwise.studies.feature_learning.population import distances, population_batch, tilted
from layerwise.studies.feature_learning.problem import Task, draw_problem
from layerwise.studies.feature_learning.two_layer import grad_F, grad_G

SMALL: dict[str, Any] = {"dx": 10, "dy": 2, "k": 3, "batch": 80}


def drawn(noise=0.1, tasks=4):
    setting = Tasks(tasks=tasks, noise=noise, anisotropy="low", repair="scaled", **SMALL)
    star, found = draw_tasks(setting, stream(0, "problem"))
    first, second = ([draw_batch(task, 80, stream(0, name, i)) for i, task in enumerate(found)] for name in ("a", "b"))
    return setting, star, first, second


@pytest.mark.parametrize("head_lr", [1.0, 0.3])
def test_a_step_is_the_equations(head_lr):
    """Written out with explicit inverses, from the gradients, as eqs. (20)–(22) are printed."""
    _, _, first, second = drawn()
    G = haar(3, 10, stream(0, "init"))
    F = [torch.randn(2, 3, generator=stream(0, "head", i), dtype=torch.float64) for i in range(4)]
    new, heads = step(G, F, first, second, lr=0.4, head_lr=head_lr)
    P, D = torch.zeros(3, 3).double(), torch.zeros(3, 10).double()
    for old, head, a, b in zip(F, heads, first, second, strict=True):
        expected = old - head_lr * grad_F(old, G, a) @ torch.linalg.inv(G @ a.Sx @ G.mT)
        assert torch.allclose(head, expected, atol=1e-10)
        D += grad_G(expected, G, b) @ torch.linalg.inv(b.Sx) / 4
        P += expected.mT @ expected / 4
    assert torch.allclose(new, G - 0.4 * torch.linalg.inv(P) @ D, atol=1e-9)


@pytest.mark.parametrize("lr", [0.1, 0.5, 1.0])
def test_without_noise_what_is_outside_shrinks_by_one_minus_the_rate(lr):
    _, star, first, second = drawn(noise=0.0)
    G = haar(3, 10, stream(0, "init"))
    new, _ = step(G, [torch.zeros(2, 3).double()] * 4, first, second, lr=lr)
    outside = torch.eye(10).double() - star.mT @ star
    assert torch.allclose(new @ outside, (1 - lr) * G @ outside, atol=1e-10)


def test_one_preconditioner_for_all_tasks_does_not():
    _, star, first, second = drawn(noise=0.0)
    G = haar(3, 10, stream(0, "init"))
    new, _ = step(G, [torch.zeros(2, 3).double()] * 4, first, second, lr=0.5, pooled=True)
    outside = torch.eye(10).double() - star.mT @ star
    assert float((new @ outside - 0.5 * G @ outside).norm()) > 0.01


def test_one_task_is_kfac():
    """With one task of enough labels the representation moves as KFAC's does after the head's step."""
    setting = Tasks(tasks=1, dx=10, dy=4, k=3, batch=80)
    _, (task,) = draw_tasks(setting, stream(0, "problem"))
    a, b = (draw_batch(task, 80, stream(0, name)) for name in "ab")
    G = haar(3, 10, stream(0, "init"))
    new, (head,) = step(G, [torch.zeros(4, 3).double()], [a], [b], lr=0.3)
    assert torch.allclose(new, G - 0.3 * fl.KFAC().direction(head, G, b), atol=1e-10)


@pytest.mark.usefixtures("untyped")
def test_more_tasks_leave_less_noise():
    few, many = (
        float(learn(Tasks(tasks=tasks, anisotropy="low", repair="scaled", **SMALL), steps=20, start=1e-2)[10:].mean())
        for tasks in (4, 32)
    )
    assert many < few / 1.8


def test_a_seed_is_reproducible_and_begins_where_asked():
    setting = Tasks(tasks=3, **SMALL)
    assert torch.equal(learn(setting, steps=2, seed=5), learn(setting, steps=2, seed=5))
    assert float(learn(setting, steps=1, start=0.05)[0]) == pytest.approx(0.05, rel=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"tasks": 1, "dy": 2, "k": 4}, "tasks · dy"), ({"k": 30}, "2k"), ({"batch": 10}, "at least dx")],
)
def test_sizes_that_cannot_work(options, message):
    with pytest.raises(InputError, match=message):
        Tasks(**options)


# --- Population batches and chosen starts -------------------------------------------------------------------


def test_a_large_batch_approaches_the_population():
    task = draw_problem(fl.Setting(dx=5, dy=3, k=2, anisotropy="low", repair="scaled"), stream(0, "problem")).train
    exact, sampled = population_batch(task), draw_batch(task, 400_000, stream(0, "train"))
    for name in ("Sx", "Syx", "Syy"):
        assert torch.allclose(getattr(exact, name), getattr(sampled, name), rtol=0.02, atol=0.05), name
    with pytest.raises(InputError, match="population"):
        exact.samples()


def test_rows_are_turned_by_their_angles():
    G = haar(3, 8, stream(0, "G"))
    by = torch.tensor([0.0, 0.2, 0.6]).double()
    there = tilted(G, by, stream(0, "way"))
    assert torch.allclose(there @ there.mT, torch.eye(3).double(), atol=1e-12)
    sines = torch.linalg.svdvals(there - there @ G.mT @ G)
    assert torch.allclose(sines, by.flip(0), atol=1e-12)
    with pytest.raises(InputError, match="2k"):
        tilted(haar(3, 5, stream(0, "G")), by, stream(0, "way"))


def test_the_population_recursion_of_the_lower_bound():
    """Against the scalar recursion c₂⁺ = c₂ (1 − w c₁²) / √(1 + w² c₁² c₂²), w = ηl."""
    least, eta, c2 = 0.1, 1.5, 0.4
    I = torch.eye(6).double()
    F = torch.diag(torch.tensor([1 - least, least], dtype=torch.float64).sqrt())
    task = Task(Sigma=I, root=I, map=F @ I[:2], deviation=0.0, uniform=False)
    batch = population_batch(task)
    start = tilted(I[:2], torch.tensor([0.0, c2], dtype=torch.float64), stream(0, "way"), aligned=True)
    found = distances(fl.AMGD(lr=[eta]), start, I[:2], lambda: batch, steps=10)[0]
    expected, w = [c2], eta * least
    for _ in range(10):
        c1 = math.sqrt(1 - c2**2)
        c2 = c2 * (1 - w * c1**2) / math.sqrt(1 + (w * c1 * c2) ** 2)
        expected.append(c2)
    assert found.tolist() == pytest.approx(expected, rel=1e-10)


def test_a_rate_that_overflows_counts_as_distance_one_and_leaves_the_others_alone():
    I = torch.eye(6).double() * 1e5
    G = haar(2, 6, stream(0, "G"))
    task = Task(Sigma=I, root=I.sqrt(), map=haar(2, 3, stream(0, "F")).mT @ G, deviation=0.0, uniform=False)
    batch = population_batch(task)
    start = tilted(G, torch.tensor([0.1, 0.1]).double(), stream(0, "way"))
    both = distances(fl.SGD(lr=[1e-6, 1.0]), start, G, lambda: batch, steps=20)
    alone = distances(fl.SGD(lr=[1e-6]), start, G, lambda: batch, steps=20)
    assert float(both[1, -1]) == 1.0
    assert torch.allclose(both[0], alone[0], rtol=1e-9)
    assert float(alone[0, -1]) < 0.1
