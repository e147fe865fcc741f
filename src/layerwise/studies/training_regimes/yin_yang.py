"""Card R1: a network on the yin-yang points, lazy and not, all seeds and both α as one tensor program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.progress import Progress, Silent
from layerwise.regimes.yin_yang import easy, in_discs, to_discs, yin_yang, yin_yang_grid
from layerwise.studies.training_regimes.stack import Stack, drawn

RINGS = 20
"""Of equal widths around the discs' centres, up to `REACH`."""
REACH = 0.7


@dataclass(frozen=True, kw_only=True)
class YinYangRuns:
    """Points, network and training."""

    points: int = 100
    hidden: tuple[int, ...] = (60, 60, 60)
    alphas: tuple[float | int, ...] = (1, 100)
    """The first one learns features, the second is lazy."""
    lr: float | int = 0.1
    thresholds: tuple[float, ...] = (0.5, 0.35)
    """Training losses, largest first, at which test losses are compared."""
    steps: int = 40_000
    """At most."""
    side: int = 40
    """Of the grid of test points."""
    variant: str = "diagonal"
    keep_initial: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        if list(self.thresholds) != sorted(set(self.thresholds), reverse=True) or not self.thresholds:
            raise InputError(describe(f"thresholds={self.thresholds}", "falling losses", "pass e.g. (0.5, 0.35)"))
        if len(self.alphas) != 2 or not self.hidden:
            given = f"alphas={self.alphas}, hidden={self.hidden}"
            raise InputError(describe(given, "two values of α, and a hidden layer", "pass e.g. alphas=(1, 100)"))
        yin_yang(1, 0, self.variant)

    def compared(self, seeds: Sequence[int], progress: Progress | None = None) -> list[Compared]:
        """All seeds at once."""
        return Comparison(self, tuple(seeds)).run(progress or Silent())


@dataclass(frozen=True)
class Compared:
    """One seed; lists have one entry a threshold, in order, and end where a run did not come."""

    seed: int
    steps: dict[float | int, list[int]]
    """By α, until the threshold."""
    difference: list[Float[Tensor, "grid"]]
    """Test loss of the first α minus that of the second, point by point."""
    signs: dict[float | int, float]
    """Sign similarity with the start on the training points, at the last threshold."""

    def mean(self, where: Tensor) -> list[float]:
        """Mean difference over a part of the grid, at each threshold."""
        return [float(d[where].mean()) for d in self.difference]


@dataclass
class Comparison:
    """All seeds, with both α: run ``a · S + s`` has the a-th α and the s-th seed."""

    of: YinYangRuns
    seeds: tuple[int, ...]
    losses: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    """Of the grid, by α and seed, one entry a threshold."""
    reached: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    signs: dict[tuple[int, int], float] = field(default_factory=dict)

    def run(self, progress: Progress) -> list[Compared]:
        """Until every run has reached the last threshold, or the steps are over; runs that have are left out."""
        config, S = self.of, len(self.seeds)
        sizes = (2, *config.hidden, 1)
        start = drawn(sizes, self.seeds).to(config.device).repeat(2, 1)
        data = [yin_yang(config.points, seed, config.variant) for seed in self.seeds]
        x = torch.stack([d.x for d in data]).to(start).repeat(2, 1, 1)
        y = torch.stack([d.y for d in data]).to(start).repeat(2, 1)
        alpha = torch.tensor(config.alphas).to(start).repeat_interleave(S)
        runs = Runs(Stack(sizes, start), Stack(sizes, start), x, y, alpha, config)
        keys = [(a, s) for a in (0, 1) for s in range(S)]
        for key in keys:
            self.losses[key], self.reached[key], self.signs[key] = [], [], float("nan")
        goals = torch.tensor(config.thresholds).to(start)
        waiting = torch.zeros(len(keys), dtype=torch.int64, device=start.device)  # which threshold comes next
        for step in progress.track(range(config.steps + 1), "steps", config.steps):
            loss = runs.step()  # of the weights before the step
            while bool((arrived := loss <= goals[waiting]).any()):
                self._note(runs.before(arrived), [keys[k] for k in arrived.nonzero().flatten().tolist()], step)
                done = arrived & (waiting == len(goals) - 1)
                waiting = waiting + (arrived & ~done)
                if bool(done.any()):
                    kept = (~done).nonzero().flatten()
                    runs, waiting, loss = runs.kept(kept), waiting[kept], loss[kept]
                    keys = [keys[k] for k in kept.tolist()]
                if not keys:
                    return self._seeds()
        return self._seeds()

    def _note(self, runs: Runs, keys: Sequence[tuple[int, int]], step: int) -> None:
        grid = yin_yang_grid(self.of.side, self.of.variant)
        losses, signs = runs.losses(grid.x, grid.y), runs.signs()
        for key, loss, sign in zip(keys, losses.double().cpu(), signs.tolist(), strict=True):
            self.losses[key].append(loss)
            self.reached[key].append(step)
            self.signs[key] = sign

    def _seeds(self) -> list[Compared]:
        found = []
        for s, seed in enumerate(self.seeds):
            first, second = self.losses[0, s], self.losses[1, s]
            both = [a - b for a, b in zip(first, second, strict=False)]
            steps = {alpha: self.reached[a, s] for a, alpha in enumerate(self.of.alphas)}
            signs = {alpha: self.signs[a, s] for a, alpha in enumerate(self.of.alphas)}
            found.append(Compared(seed, steps, both, signs))
        return found


@dataclass
class Runs:
    """Networks that are being trained on all their points, by gradient descent."""

    stack: Stack
    start: Stack
    x: Tensor
    y: Tensor
    alpha: Tensor
    of: YinYangRuns

    def __post_init__(self) -> None:
        self.f0 = self.start.forward(self.x)[-1]
        self.rate = self.of.lr / self.alpha**2
        self.gradient: list[Tensor] = []
        self.scaled_y = self.y.unsqueeze(2)
        self.initial = self.f0 if self.of.keep_initial else torch.zeros_like(self.f0)

    def step(self) -> Float[Tensor, "R"]:
        """One step; the mean loss of each run before it."""
        seen = self.stack.forward(self.x)
        f = torch.addcmul(self.initial, self.alpha[:, None, None], seen[-1] - self.f0)
        margin = self.scaled_y * f
        # d/df of log(1 + exp(−y f)), the mean over points, and the α of the outputs
        d = -self.scaled_y * torch.sigmoid(-margin) * (self.alpha / self.x.shape[1])[:, None, None]
        self.gradient = self.stack.gradient(seen, d)
        self.stack.descend(self.rate, self.gradient)
        return functional.softplus(-margin).mean((1, 2))

    def before(self, chosen: Tensor) -> Runs:
        """Some runs as they were before the last step."""
        index = chosen.nonzero().flatten()
        runs = self._with(self.stack.of(index), index)
        runs.stack.descend(-runs.rate, [g[index] for g in self.gradient])
        return runs

    def kept(self, index: Tensor) -> Runs:
        """Some runs, to go on with."""
        runs = self._with(self.stack.of(index), index)
        runs.gradient = [g[index] for g in self.gradient]  # another of their thresholds may be passed in this step
        return runs

    def _with(self, stack: Stack, index: Tensor) -> Runs:
        return Runs(stack, self.start.of(index), self.x[index], self.y[index], self.alpha[index], self.of)

    def losses(self, x: Float[Tensor, "N 2"], y: Float[Tensor, "N"]) -> Float[Tensor, "R N"]:
        """Of other points, one by one."""
        x = x.to(self.x).expand(len(self.alpha), -1, -1)
        f, f0 = self.stack.forward(x)[-1], self.start.forward(x)[-1]
        moved = self.alpha[:, None, None] * (f - f0)
        f = f0 + moved if self.of.keep_initial else moved
        return functional.softplus(-y.to(f) * f.squeeze(2))

    def signs(self) -> Float[Tensor, "R"]:
        """Sign similarity with the start, on the training points."""
        now, before = (s.signs(s.forward(self.x)) for s in (self.stack, self.start))
        same = torch.stack([(a == b).sum((1, 2)) for a, b in zip(now, before, strict=True)]).sum(0)
        return same.double() / sum(a[0].numel() for a in now)


def regions(side: int, variant: str) -> dict[str, Tensor]:
    """Masks of the grid: easy parts, and discs."""
    x = yin_yang_grid(side, variant).x
    return {"easy": easy(x, variant), "disc": in_discs(x, variant)}


def rings(difference: Float[Tensor, "grid"], side: int, variant: str) -> tuple[list[float], list[float]]:
    """Middles of rings around the discs' centres, and the mean difference in each."""
    distance = to_discs(yin_yang_grid(side, variant).x, variant)
    number = (distance / REACH * RINGS).long()
    inside = number < RINGS
    count = torch.bincount(number[inside], minlength=RINGS)
    total = torch.bincount(number[inside], weights=difference[inside], minlength=RINGS)
    middles = [(k + 0.5) * REACH / RINGS for k in range(RINGS)]
    return middles, (total / count.clamp_min(1)).tolist()
