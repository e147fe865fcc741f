"""Many posteriors as one tensor program: seeds, methods and caps of one architecture, for comparisons."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from layerwise.bounds.pac_bayes import checkpoint as checkpoints
from layerwise.bounds.pac_bayes.bases import Bases, Rotation
from layerwise.bounds.pac_bayes.posterior import Objective, Posterior
from layerwise.bounds.pac_bayes.result import PacBayes
from layerwise.bounds.pac_bayes.run import Run, check_finite
from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.progress import Progress, Silent
from layerwise.foundations.random import stream
from layerwise.foundations.replay import Replayed
from layerwise.foundations.tf32 import tf32

SHARED = ("delta", "precision", "epochs", "batch_size", "lr", "decay", "milestones", "optimizer", "loss_scale")
"""Options that all members have in common."""


def optimize_together(
    runs: Sequence[Run],
    every: int = 10,
    progress: Progress | None = None,
    rounded: bool = False,
    keep: Path | None = None,
    save_every: int = 10,
) -> list[PacBayes]:
    """As if each run were optimized alone, up to rounding and to the numbers drawn; a bound for each, in order.

    Runs with the same seed see the same batches and the same noise ξ (each in its own basis), so that methods are
    compared on equal draws.

    Args:
        runs: of networks of one architecture, with data of one size; their method, cap, interval, initial variances
            and seed may differ.
        every: epochs between two entries of the histories.
        progress: shows the epochs.
        rounded: whether the products of a step may be in TF32 on a GPU. Bases, the drawn networks that the bound is
            taken of, and its KL are in full precision all the same: it stays a bound.
        keep: a file to go on from and to write to; one of other runs, or of other options than these, is refused.
        save_every: epochs between two writings of it. It has some five numbers for each parameter of each run.
    """
    _check(runs)
    epochs, name, stage = runs[0].options.epochs, "", None
    if keep is not None:
        checkpoints.check_place(keep, save_every, ("keep", "save_every"))
        about = {"stack": [run.fingerprint() for run in runs], "every": every, "rounded": rounded}
        name = checkpoints.fingerprint({}, about)
        stage = checkpoints.load(keep, name, runs[0].first.device)
    with tf32(False):  # whatever the caller has set: a bound is of the networks that are drawn
        stack = _Stack(runs, rounded, stage)
        left = range(0 if stage is None else stage.epoch, epochs)
        for epoch in (progress or Silent()).track(left, f"PAC-Bayes, {len(runs)} posteriors", len(left)):
            last = epoch + 1 == epochs
            stack.epoch(epoch, last or (epoch + 1) % every == 0)
            if keep is not None and (last or (epoch + 1) % save_every == 0):
                checkpoints.save(keep, name, stack.stage(epoch + 1))
        return [run.finished(posterior) for run, posterior in zip(runs, stack.members(), strict=True)]


class _Stack:
    """Tensors with one row a run."""

    def __init__(self, runs: Sequence[Run], rounded: bool = False, stage: checkpoints.Stage | None = None) -> None:
        self.runs, self.options, self.rounded = runs, runs[0].options, rounded
        if stage is None:
            begun = [run.begun() for run in runs]
            names = ("mean", "log_std", "half_log")
            theta = torch.cat([getattr(posterior, name).flatten() for name in names for posterior in begun])
            self.bases = [posterior.bases for posterior in begun]
            self.basis_means, self.last = torch.stack([run.first for run in runs]), [0] * len(runs)
        else:
            theta = stage.tensors["theta"]
            self.basis_means, self.last = stage.tensors["basis"], stage.tensors["last"].tolist()
            found = zip(runs, self.last, self.basis_means, strict=True)
            self.bases = [run.bases_of(last, mean) for run, last, mean in found]
            for number, run in enumerate(runs):
                rows = [row for row in stage.history if row["run"] == number]
                run.history = [{name: value for name, value in row.items() if name != "run"} for row in rows]
        stacked = _stacked(self.bases)
        first = runs[0].objective
        logs = [math.log(run.options.cap) for run in runs]
        log_caps = torch.tensor(logs, device=first.prior_mean.device, dtype=first.prior_mean.dtype)
        objective = Objective(
            torch.stack([run.objective.prior_mean for run in runs]),
            first.grid,
            first.examples,
            first.delta,
            first.loss_scale,
            log_caps,
        )
        self.posterior = Posterior(objective, theta, stacked)
        self.theta = nn.Parameter(self.posterior.theta)
        self.theta.grad = self.posterior.grad
        self.optimizer = self.options.optimizer_of(self.theta)
        if stage is not None:
            checkpoints.restore_optimizer(self.optimizer, self.theta, stage)
        for group in self.optimizer.param_groups:
            if "capturable" in group:  # its count of steps is then on the device, too
                group["capturable"] = self.theta.is_cuda
        seeds = [run.options.seed for run in runs]
        self.seeds = sorted(set(seeds))
        self.source = torch.tensor([self.seeds.index(seed) for seed in seeds], device=self.theta.device)
        self.feeds = [runs[seeds.index(seed)].examples for seed in self.seeds]
        self.noise = torch.empty_like(self.posterior.mean[: len(self.seeds)])
        self.wrong = torch.zeros(len(runs), dtype=torch.long, device=self.theta.device)
        self.step = Replayed(self._step)

    def epoch(self, epoch: int, record: bool) -> None:
        """All batches of one."""
        for number, run in enumerate(self.runs):
            if run.options.due(epoch, self.last[number]):
                self.last[number] = epoch
                self.basis_means[number] = self.posterior.mean[number]
                self.bases[number] = run.bases(self.basis_means[number])
                _write(self.posterior.bases, number, self.bases[number])
        rate = self.options.rate(epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        generators = [stream(seed, "noise", epoch, device=self.theta.device) for seed in self.seeds]
        self.wrong.zero_()
        with tf32(self.rounded):
            for batches in zip(*(feed.shuffled(epoch) for feed in self.feeds), strict=True):
                for noise, generator in zip(self.noise, generators, strict=True):
                    noise.normal_(generator=generator)
                self.step(*(part for batch in batches for part in batch), key=rate)
        check_finite(self.posterior, epoch, self.options)
        if record:
            found = self.posterior.on_grid(self.wrong / self.runs[0].examples.count)
            columns = {name: column.tolist() for name, column in found.items()}
            for number, run in enumerate(self.runs):
                row = {name: float(column[number]) for name, column in columns.items()}
                run.history.append({"epoch": epoch + 1, **row})

    def stage(self, epoch: int) -> checkpoints.Stage:
        """What it takes to go on after so many epochs; bases are computed anew where their means were."""
        state = checkpoints.optimizer_state(self.optimizer, self.theta)
        tensors = {"theta": self.theta.data, "basis": self.basis_means, "last": torch.tensor(self.last), **state}
        history = [{"run": number, **row} for number, run in enumerate(self.runs) for row in run.history]
        return checkpoints.Stage(epoch, tensors, history)

    def _step(self, *parts: Tensor) -> None:
        """One, for the batches x, y, x, y, … of all seeds, and the noise that was drawn."""
        x, y, noise = (self._by_run(part) for part in (torch.stack(parts[::2]), torch.stack(parts[1::2]), self.noise))
        self.wrong += self.posterior.backward(self.runs[0].network, x, y, noise=noise)
        self.optimizer.step()
        self.posterior.project()

    def _by_run(self, by_seed: Tensor) -> Tensor:
        """Each run's own; where there is one seed nothing is copied."""
        return by_seed.expand(len(self.runs), *by_seed.shape[1:]) if len(self.seeds) == 1 else by_seed[self.source]

    def members(self) -> list[Posterior]:
        """Each by itself."""
        q = self.posterior
        rows = torch.cat([q.mean, q.log_std, q.half_log.unsqueeze(-1)], dim=-1).detach()
        pairs = zip(self.runs, rows, self.bases, strict=True)
        return [Posterior(run.objective, row.clone(), bases) for run, row, bases in pairs]


def _check(runs: Sequence[Run]) -> None:
    first = runs[0]
    for run in runs[1:]:
        other = [name for name in SHARED if getattr(run.options, name) != getattr(first.options, name)]
        same = run.objective.parameters == first.objective.parameters and run.examples.count == first.examples.count
        if other or not same:
            given = f"runs that differ in {', '.join(other) or 'the size of their networks or data'}"
            raise InputError(describe(given, "runs alike in these", "optimize them one after another"))
    if any(run.options.biases == "leave" for run in runs):
        raise InputError(describe('bias="leave" in a stack', '"rotate" or "joint"', "optimize such a run alone"))


def _resized(own: Tensor | None, like: Tensor) -> Tensor:
    """A side of a rotation in the size of another, with the identity in what it has not: the bias keeps its own."""
    side = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device).repeat(like.shape[-3], 1, 1)
    if own is not None:
        side[:, : own.shape[-1], : own.shape[-1]] = own
    return side


def _stacked(members: Sequence[Bases]) -> Bases:
    """One rotation a layer for all members, with the standard basis where a member has none."""
    first = max(members, key=lambda bases: len(bases.rotations))
    rotations = {}
    for name, rotation in first.rotations.items():
        found = [bases.rotations.get(name) for bases in members]
        widest = max((r for r in found if r is not None), key=lambda r: 0 if r.right is None else r.right.shape[-1])
        left = torch.stack([_resized(None if r is None else r.left, widest.left) for r in found])
        right = widest.right
        if right is not None:
            right = torch.stack([_resized(None if r is None else r.right, right) for r in found])
        rotations[name] = Rotation(rotation.form, left, right, widest.bias)
    return replace(first, rotations=rotations, curvature=None)


def _write(stacked: Bases, number: int, member: Bases) -> None:
    """A member's new bases in place of those that it had."""
    for name, rotation in stacked.rotations.items():
        own = member.rotations.get(name)
        rotation.left[number] = _resized(None if own is None else own.left, rotation.left)
        if rotation.right is not None:
            rotation.right[number] = _resized(None if own is None else own.right, rotation.right)
