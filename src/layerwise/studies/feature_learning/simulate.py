"""Linear representation learning for all algorithms, rates and seeds at once.

A batch is a function of its seed and iteration alone, so algorithms, rates and scales see the same draws, and the
result of a seed does not depend on which others run beside it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from layerwise.foundations.errors import InputError, NameLookupError, describe, unknown
from layerwise.foundations.progress import Progress, resolve
from layerwise.studies.feature_learning.algorithms import AMGD, DFW, KFAC, SGD, Adam, Algorithm, MinMin, with_rate
from layerwise.studies.feature_learning.further import (
    EKFAC,
    FOOF,
    LocoProp,
    MahalanobisSpectral,
    Shampoo,
    Sign,
    Spectral,
)
from layerwise.studies.feature_learning.ngd import NGD
from layerwise.studies.feature_learning.problem import Setting
from layerwise.studies.feature_learning.runs import MEASURES, Group, Runs, apart, drawers
from layerwise.studies.feature_learning.together import together

ALGORITHMS: Mapping[str, Algorithm] = {
    "sgd": SGD(),
    "amgd": AMGD(),
    "amgd_bn": AMGD(norm="whiten_pop"),
    "dfw": DFW(),
    "kfac": KFAC(),
    "ngd": NGD(),
    "adam": Adam(),
    "altminmin": MinMin(),
    "foof": FOOF(),
    "locoprop": LocoProp(),
    "ekfac": EKFAC(),
    "shampoo": Shampoo(),
    "sign": Sign(),
    "spectral": Spectral(),
    "mahalanobis_spectral": MahalanobisSpectral(),
}
"""By name, at the paper's rates."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Curves of one algorithm: `[seed, point]`, or `[seed, rate, point]` if several rates were given."""

    seeds: tuple[int, ...]
    lr: float | int | Sequence[float | int]
    iteration: tuple[int, ...]
    """Where it was measured."""
    loss: Float[Tensor, "*r t"]
    """½ mean |y − FGx|² on the batch of the head; the noise leaves dy σ²/2."""
    population_loss: Float[Tensor, "*r t"]
    """½ E|(FG − F⋆G⋆)x|², without noise."""
    dist: Float[Tensor, "*r t"]
    """Subspace distance to G⋆, in [0, 1]; 1 for a run that diverged."""
    transfer: Float[Tensor, "*r t"]
    """E|(F_ls G − F⋆G⋆)x|² on the other task, with a head fitted there; the noise leaves σ² dy k / n."""
    diverged_at: Int[Tensor, "*r"]
    """The first iteration that was not finite, or −1."""
    F: Float[Tensor, "*r dy k"]
    G: Float[Tensor, "*r k dx"]


def simulate(
    algorithm: str | Algorithm,
    *,
    lr: float | int | Sequence[float | int] | None = None,
    steps: int = 1000,
    seeds: int | Iterable[int] = 1,
    every: int | None = None,
    same_batch: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
    progress: bool | Progress | None = False,
    **setting: Any,
) -> Result:
    """Run one algorithm, given by name or as an object, at one rate or several; see `Setting` for the other options.

    >>> r = simulate("kfac", scale="trace", lr=[0.1, 1.0], steps=20, seeds=range(3), dx=10, dy=4, k=2, batch=200)
    >>> r.dist.shape, r.iteration[:3], bool(r.dist[:, 1, -1].max() < r.dist[:, 1, 0].min())
    (torch.Size([3, 2, 21]), (0, 1, 2), True)
    """
    runs = compare(
        {"run": with_rate(by_name(algorithm) if isinstance(algorithm, str) else algorithm, lr)},
        setting=Setting(**setting),
        steps=steps,
        seeds=seeds,
        every=every,
        same_batch=same_batch,
        device=device,
        dtype=dtype,
        progress=progress,
    )
    return runs["run"]


def compare(
    algorithms: Mapping[str, Algorithm] | Sequence[str],
    *,
    setting: Setting = Setting(),  # noqa: B008  frozen
    steps: int = 1000,
    seeds: int | Iterable[int] = 1,
    every: int | None = None,
    same_batch: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
    together: int | None = None,
    progress: bool | Progress | None = False,
) -> dict[str, Result]:
    """Run several algorithms on the same draws and measure them every so many iterations (about 50 times if not given).

    `together` seeds are one tensor program. On a CPU it is one, which keeps the result of a seed bit for bit the same
    whatever runs beside it and costs little, since rates and algorithms fill the tensors; elsewhere all.
    Iterations of several seeds on a GPU are recorded once as CUDA graphs and replayed.

    >>> r = compare(["kfac", "sgd"], setting=Setting(dx=10, dy=4, k=2, batch=200), steps=9)
    >>> r["kfac"].diverged_at.tolist(), bool(r["sgd"].diverged_at[0] > 0)
    ([-1], True)
    """
    named = algorithms if isinstance(algorithms, Mapping) else {name: by_name(name) for name in algorithms}
    seeds = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    points = measured_at(steps, every)
    _check(named, setting, seeds)
    together = together or (1 if torch.device(device).type == "cpu" else len(seeds))
    groups = [seeds[i : i + together] for i in range(0, len(seeds), together)]
    with one_thread():
        done = [
            _run(named, Group(setting, group, device, dtype), points, same_batch, resolve(progress)) for group in groups
        ]
    return {name: _result([runs[name] for runs in done], points) for name in named}


def _run(
    algorithms: Mapping[str, Algorithm], group: Group, points: Sequence[int], same_batch: bool, progress: Progress
) -> dict[str, Runs]:
    """All iterations of a group of seeds."""
    start = group.batch(0)
    runs = {name: Runs(algorithm, group, start) for name, algorithm in algorithms.items()}
    for one in runs.values():
        one.measure(start, 0)
    due, steps = set(points), points[-1]
    names = ("first",) if same_batch else ("first", "second")
    with drawers(len(group.seeds)) as pool:
        step = (apart if group.many is None else together)(list(runs.values()), group, names, steps, pool)
        for t in progress.track(range(1, steps + 1), f"seed {', '.join(map(str, group.seeds))}", steps):
            batch = step(t)
            for one in runs.values() if t in due else ():
                one.measure(batch, t)
    return runs


@contextmanager
def one_thread() -> Iterator[None]:
    """For matrices this small a second thread of torch costs more than it gives (ten times more on a busy machine)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _result(parts: Sequence[Runs], points: Sequence[int]) -> Result:
    """Join groups of seeds; a single rate has no axis."""
    lr = parts[0].algorithm.lr
    single = isinstance(lr, int | float)

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        whole = torch.cat([t if runs.several else t.unsqueeze(0) for t, runs in zip(tensors, parts, strict=True)])
        return whole.squeeze(1).cpu() if single else whole.cpu()

    curves = {
        name: joined([torch.stack([p.values[name] for p in runs.points], dim=-1) for runs in parts])
        for name in MEASURES
    }
    return Result(
        seeds=tuple(seed for runs in parts for seed in runs.group.seeds),
        lr=lr,
        iteration=tuple(points),
        diverged_at=joined([runs.diverged_at for runs in parts]),
        F=joined([runs.weights.F for runs in parts]),
        G=joined([runs.weights.G for runs in parts]),
        **curves,
    )


def measured_at(steps: int, every: int | None = None) -> tuple[int, ...]:
    """The iterations that are measured: the first, the last, and every so many between (about 50 if not given).

    >>> measured_at(10, 4)
    (0, 4, 8, 10)
    """
    if steps < 1 or (every is not None and every < 1):
        raise InputError(describe(f"steps={steps}, every={every}", "numbers ≥ 1", "pass e.g. steps=1000, every=20"))
    return tuple(sorted({*range(0, steps + 1, every or max(1, steps // 50)), steps}))


def by_name(name: str) -> Algorithm:
    """An algorithm at the paper's rate.

    >>> by_name("kfac").lr
    0.01
    """
    if name not in ALGORITHMS:
        raise NameLookupError(unknown("algorithm", name, ALGORITHMS))
    return ALGORITHMS[name]


def _check(algorithms: Mapping[str, Algorithm], setting: Setting, seeds: Sequence[int]) -> None:
    if not seeds or len(set(seeds)) < len(seeds):
        raise InputError(describe(f"seeds={list(seeds)}", "at least one seed, each once", "pass e.g. seeds=range(5)"))
    if setting.batch < setting.dx:
        for name, algorithm in algorithms.items():
            if algorithm.inverts_inputs:
                raise InputError(
                    describe(
                        f"{name} with batch={setting.batch} and dx={setting.dx}",
                        "a batch of at least dx samples, since XᵀX is inverted",
                        "give a larger batch, or KFAC(ridge=…)",
                    )
                )
