"""Several tasks that share a representation (Appendix B.3, eqs. 20–22), preconditioned in two stages.

Each task has inputs, a head and noise of its own, and may have fewer labels than the representation has rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.random import stream
from layerwise.studies.feature_learning.batch import Batch, draw_batch, solve_right
from layerwise.studies.feature_learning.covariance import check_covariance, covariance, haar, power
from layerwise.studies.feature_learning.measures import subspace_distance
from layerwise.studies.feature_learning.population import tilted
from layerwise.studies.feature_learning.problem import Task
from layerwise.studies.feature_learning.simulate import one_thread
from layerwise.studies.feature_learning.two_layer import grad_G, least_squares_head, orthonormal_rows


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """Sizes and laws: T tasks y = F_t G⋆ x + ε with x ~ N(0, Σ_t), heads and covariances independent.

    >>> Tasks(tasks=4, dy=2, k=4).batch
    256
    """

    tasks: int = 8
    dx: int = 40
    dy: int = 2
    k: int = 4
    batch: int = 256
    """n, samples of each task in a batch."""
    anisotropy: str = "high"
    scale: str = "trace"
    repair: str | None = None
    noise: float | int = 0.1
    """Standard deviation."""

    def __post_init__(self) -> None:
        given = f"tasks={self.tasks}, dx={self.dx}, dy={self.dy}, k={self.k}, batch={self.batch}"
        if min(self.tasks, self.dy, self.k) < 1 or 2 * self.k > self.dx or self.tasks * self.dy < self.k:
            need = "k ≥ 1 rows, 2k ≤ dx, and tasks · dy ≥ k labels, without which their heads do not span the rows"
            raise InputError(describe(given, need, "give more tasks, or a smaller k"))
        if self.batch < self.dx:
            raise InputError(describe(given, "batches of at least dx, since XᵀX is inverted", "raise batch"))
        check_covariance(self.anisotropy, self.scale, self.repair)


def draw_tasks(setting: Tasks, generator: torch.Generator) -> tuple[Float[Tensor, "k dx"], list[Task]]:
    """G⋆ Haar, and the tasks.

    >>> G, tasks = draw_tasks(Tasks(tasks=3), stream(0, "problem"))
    >>> len(tasks), tasks[0].map.shape
    (3, torch.Size([2, 40]))
    """
    G = haar(setting.k, setting.dx, generator)
    found = []
    for _ in range(setting.tasks):
        F = torch.randn(setting.dy, setting.k, generator=generator, dtype=torch.float64)
        Sigma = covariance(
            setting.dx, generator, anisotropy=setting.anisotropy, scale=setting.scale, repair=setting.repair
        )
        found.append(
            Task(Sigma=Sigma, root=power(Sigma, 0.5), map=F @ G, deviation=float(setting.noise), uniform=False)
        )
    return G, found


def tasks_of(setting: Tasks, seed: int) -> tuple[Float[Tensor, "k dx"], list[Task]]:
    """G⋆ and the tasks of a seed, which `learn` learns.

    >>> G, tasks = tasks_of(Tasks(tasks=3), seed=0)
    >>> G.shape
    torch.Size([4, 40])
    """
    return draw_tasks(setting, stream(seed, "problem"))


def step(
    G: Float[Tensor, "k dx"],
    F: Sequence[Float[Tensor, "dy k"]],
    first: Sequence[Batch],
    second: Sequence[Batch],
    *,
    lr: float | int,
    head_lr: float | int = 1.0,
    pooled: bool = False,
) -> tuple[Float[Tensor, "k dx"], list[Float[Tensor, "dy k"]]]:
    """Eqs. (20)–(22): heads on the first batches, then the representation on the second; not yet orthonormal.

    F_t⁺ = F_t − η_F ∇_F Q_F⁻¹, by Lemma 3.1 a mean with least squares; D_t = ∇_G L_t(F_t⁺, G) Sx_t⁻¹;
    G⁺ = G − η P̄⁻¹ mean_t D_t with P̄ = mean_t F_t⁺ᵀF_t⁺. Each task's covariance is inverted before the mean is taken,
    the heads' only after it, since F_tᵀF_t is singular for dy < k. `pooled` inverts mean_t Sx_t after the mean instead,
    as one preconditioner for all tasks would.

    Without noise G⁺P⊥ = (1 − η) G P⊥, where P⊥ projects from the rows of G⋆:

    >>> star, tasks = draw_tasks(Tasks(tasks=3, noise=0), stream(0, "problem"))
    >>> G = haar(4, 40, stream(0, "init"))
    >>> batches = [[draw_batch(task, 256, stream(0, i)) for task in tasks] for i in range(2)]
    >>> new, _ = step(G, [torch.zeros(2, 4).double()] * 3, *batches, lr=0.25)
    >>> outside = torch.eye(40).double() - star.T @ star
    >>> torch.allclose(new @ outside, 0.75 * G @ outside, atol=1e-8)
    True
    """
    heads = [torch.lerp(old, least_squares_head(G, batch), float(head_lr)) for old, batch in zip(F, first, strict=True)]
    P = torch.stack([head.mT @ head for head in heads]).mean(0)
    if pooled:
        g = torch.stack([grad_G(head, G, batch) for head, batch in zip(heads, second, strict=True)]).mean(0)
        D = solve_right(torch.stack([batch.Sx for batch in second]).mean(0), g)
    else:
        D = torch.stack([head.mT @ (head @ G - batch.ols) for head, batch in zip(heads, second, strict=True)]).mean(0)
    return G - lr * solve_right(P, D.mT).mT, heads


def learn(
    setting: Tasks,
    *,
    lr: float | int = 0.2,
    steps: int = 60,
    seed: int = 0,
    start: float | int | None = None,
    pooled: bool = False,
) -> Float[Tensor, "points"]:
    """Distance to G⋆ before and after each step, with fresh batches for heads and representation and Ortho at the end.

    It begins at a random representation, or at distance `start` from G⋆.

    >>> d = learn(Tasks(noise=0), lr=0.5, steps=3, start=1e-4)
    >>> [round(float(ratio), 3) for ratio in d[1:] / d[:-1]]
    [0.5, 0.5, 0.5]
    """
    target, tasks = tasks_of(setting, seed)
    if start is None:
        G = haar(setting.k, setting.dx, stream(seed, "init"))
    else:
        G = tilted(target, torch.full((setting.k,), float(start), dtype=torch.float64), stream(seed, "init"))
    F = [torch.zeros(setting.dy, setting.k, dtype=torch.float64)] * setting.tasks
    found = [subspace_distance(G, target)]
    with one_thread():
        for t in range(1, steps + 1):
            first, second = (
                [draw_batch(task, setting.batch, stream(seed, "train", t, name, i)) for i, task in enumerate(tasks)]
                for name in ("first", "second")
            )
            G, F = step(G, F, first, second, lr=lr, pooled=pooled)
            G = orthonormal_rows(G)
            found.append(subspace_distance(G, target))
    return torch.stack(found)
