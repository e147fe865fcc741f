"""Networks of any kind, one after the other: `lw.linearized` in a plain loop, logged as `together` logs its stacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from layerwise.foundations.progress import Progress
from layerwise.foundations.random import stream
from layerwise.regimes.linearity import relu_signs, sign_similarity
from layerwise.regimes.linearized import Linearized, linearized
from layerwise.regimes.rescaled import rescaled
from layerwise.studies.fisher_geometry import convolutional
from layerwise.studies.training_regimes.task import Finished, Log, Run, Task, geometric

AT_ONCE = 1000
"""Examples of a forward pass without a graph."""


@dataclass(frozen=True, kw_only=True)
class Alone:
    """One network and its training by SGD."""

    network: str
    """One of `convolutional.network`, without batch norm."""
    width: int
    momentum: float | int
    batch: int
    keep_initial: bool
    probe: int
    growth: float | int

    def model(self, seed: int, classes: int) -> nn.Module:
        """Drawn anew."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(stream(seed, "weights").initial_seed())
            model = convolutional.network(self.network, width=self.width)
            if classes != convolutional.CLASSES and isinstance(model, convolutional.ResNet):
                model.head = nn.Linear(model.head.in_features, classes)
            return model

    def run(
        self,
        task: Task,
        runs: Sequence[Run],
        epochs: int,
        done: Callable[[Run, Log], bool],
        progress: Progress,
    ) -> list[Finished]:
        """Run after run; convolutions in float32 where α amplifies f − f₀, for TF32 would round most of it away."""
        before = torch.backends.cudnn.allow_tf32
        finished = []
        try:
            for run in runs:
                torch.backends.cudnn.allow_tf32 = run.alpha <= 1
                finished.append(self.one(task, run, epochs, done, progress))
        finally:
            torch.backends.cudnn.allow_tf32 = before
        return finished

    def one(self, task: Task, run: Run, epochs: int, done: Callable[[Run, Log], bool], progress: Progress) -> Finished:
        """As long as `done` does not say of its log that it has come far enough."""
        place = task.seeds.index(run.seed)
        x, y = task.x[place], task.y[place]
        inputs = {"train": x, **{name: other[place] for name, other in task.others.items()}}
        net = linearized(self.model(run.seed, task.classes).to(x.device), run.alpha, self.keep_initial)
        start, probe = net.initial_model(), x[: self.probe]
        optimizer = rescaled(torch.optim.SGD(net.parameters(), lr=run.lr, momentum=self.momentum), run.alpha)
        f0 = {name: everywhere(net.at_start, given) for name, given in inputs.items()}
        signs0, seed = relu_signs(start, probe), torch.tensor([place], device=x.device)
        generator, a_epoch = stream(run.seed, "order"), len(x) // self.batch
        total = epochs * a_epoch
        logged, log, order = geometric(total, self.growth), Log(), torch.empty(0, dtype=torch.int64)
        for step in progress.track(range(total + 1), f"α = {run.alpha:g}", total):
            if step in logged:
                outputs = {name: scaled(net, given, f0[name]).unsqueeze(0) for name, given in inputs.items()}
                _log(log, step, {"signs": sign_similarity(net, probe, signs0), **task.measure(outputs, seed)})
                if done(run, log):
                    break
            if step == total:
                break
            if step % a_epoch == 0:
                order = torch.randperm(len(x), generator=generator)
            chosen = order[step % a_epoch * self.batch :][: self.batch].to(x.device)
            optimizer.zero_grad()
            f = net(x[chosen], at_start=f0["train"][chosen])
            nn.functional.cross_entropy(f, y[chosen]).backward()
            optimizer.step()
        return Finished(run, log, net.model, start, probe)


@torch.no_grad()
def everywhere(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Outputs of many examples, some at a time."""
    return torch.cat([function(part) for part in x.split(AT_ONCE)])


@torch.no_grad()
def scaled(net: Linearized, x: Tensor, f0: Tensor) -> Tensor:
    """Outputs of a linearized network whose start is known."""
    parts = zip(x.split(AT_ONCE), f0.split(AT_ONCE), strict=True)
    return torch.cat([net(part, at_start=start) for part, start in parts])


def _log(log: Log, step: int, measured: Mapping[str, Tensor | float]) -> None:
    for name, value in {"step": step, **measured}.items():
        log.setdefault(name, []).append(float(value))
