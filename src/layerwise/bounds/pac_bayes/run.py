"""One optimization of a posterior, epoch by epoch, and the bound at its end."""

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.bounds.kl import kl_inverse
from layerwise.bounds.pac_bayes import checkpoint as checkpoints
from layerwise.bounds.pac_bayes.bases import Bases, kronecker_bases, pieces, standard_bases
from layerwise.bounds.pac_bayes.examples import Examples, Labels, check_labels, outputs
from layerwise.bounds.pac_bayes.monte_carlo import error_limit, stochastic_error
from layerwise.bounds.pac_bayes.options import Options
from layerwise.bounds.pac_bayes.posterior import Objective, Posterior, start
from layerwise.bounds.pac_bayes.prior import PriorGrid
from layerwise.bounds.pac_bayes.result import PacBayes
from layerwise.bounds.pac_bayes.weights import flat_weights, inner, rest
from layerwise.foundations.errors import InputError, NumericalError, describe
from layerwise.foundations.progress import Progress, Silent
from layerwise.foundations.random import stream
from layerwise.foundations.types import Tree, leaves
from layerwise.foundations.vectors import ParamVector, trainable


class Run:
    """A network, its data and its options; whatever is drawn depends on the seed and the epoch alone."""

    def __init__(
        self,
        model: nn.Module,
        init: nn.Module | Mapping[str, Tensor] | ParamVector,
        data: Any,
        options: Options,
        progress: Progress | None = None,
    ) -> None:
        given = inner(model)
        self.network = copy.deepcopy(given).eval()
        self.options, self.progress = options, progress or Silent()
        self.first, prior_mean = flat_weights(given, init)
        self.examples = Examples(data, options.batch_size, options.seed, self.first.device)
        if options.per_draw is not None and not self.examples.whole:
            given = f"per_draw={options.per_draw} and batches"
            raise InputError(describe(given, "data as one pair (x, y), to draw from", "leave per_draw out"))
        self.mean_error = _mean_error(self.network, self.examples)
        grid = PriorGrid(options.cap, options.precision)
        self.objective = Objective(prior_mean, grid, self.examples.count, options.delta, options.loss_scale)
        self.history: list[dict[str, float | int]] = []
        self.path: Path | None = None
        self._every, self._checked = 1, False

    def keep(self, path: Path, every: int) -> None:
        """Go on from this file, and write to it."""
        checkpoints.check_place(path, every, ("checkpoint", "checkpoint_every"))
        self.path, self._every, self._name = path, every, self.fingerprint()

    def fingerprint(self) -> str:
        """Of what decides the posterior: weights, data and options; by it a checkpoint is known."""
        data = self.examples.fingerprint()
        if not self.examples.whole and data != self.examples.fingerprint():
            given = "a checkpoint and a loader whose examples differ from pass to pass"
            raise InputError(describe(given, "the same examples each time", "use no augmentation, and drop_last=False"))
        frozen = {f"rest/{name}": tensor for name, tensor in rest(self.network).items()}
        tensors = {"mean": self.first, "init": self.objective.prior_mean, **frozen}
        decisive = {name: value for name, value in asdict(self.options).items() if name not in ("draws", "per_draw")}
        layers = re.sub(r" at 0x[0-9a-f]+", "", repr(self.network))  # another process has other addresses
        return checkpoints.fingerprint(tensors, {**decisive, "layers": layers, "data": data})

    def set_weights(self, mean: Tensor) -> None:
        """Put these into the network."""
        found = pieces(mean.detach(), {name: tuple(p.shape) for name, p in trainable(self.network).items()})
        with torch.no_grad():
            for name, parameter in trainable(self.network).items():
                parameter.copy_(found[name])

    def bases(self, mean: Tensor, curvature: bool = False) -> Bases:
        """At a mean."""
        self.set_weights(mean)
        data = list(self.examples.in_order()) if self.examples.whole else _Again(self.examples)
        if self.options.method == "base":
            return standard_bases(self.network, data, curvature)
        check = "never" if self._checked else "first"
        self._checked = True
        bias: Any = self.options.biases
        return kronecker_bases(self.network, data, self.options.method, bias, curvature, check)

    def bases_of(self, last: int, mean: Tensor) -> Bases:
        """The bases that were computed before epoch `last`, at this mean, computed again.

        Eigenvectors are unique up to signs only, so the first ones are computed with curvature where they were before.
        """
        return self.bases(mean, last == 0 and self.options.variances == "curvature")

    def begun(self) -> Posterior:
        """Before the first step."""
        return start(self.objective, self.first, self.bases_of(0, self.first), self.options.variances)

    def optimized(self) -> Posterior:
        """After all epochs that are left."""
        o = self.options
        stage = None if self.path is None else checkpoints.load(self.path, self._name, self.first.device)
        if stage is None:
            posterior, begun, at, last = self.begun(), 0, self.first, 0
        else:
            at, begun, last = stage.tensors["basis"], stage.epoch, int(stage.tensors["last"])
            posterior = Posterior(self.objective, stage.tensors["theta"], self.bases_of(last, at))
            self.history = stage.history
        theta = nn.Parameter(posterior.theta)
        theta.grad = posterior.grad
        optimizer = o.optimizer_of(theta)
        if stage is not None:
            checkpoints.restore_optimizer(optimizer, theta, stage)
        say = getattr(self.progress, "note", None)
        for epoch in self.progress.track(range(begun, o.epochs), f"PAC-Bayes, {o.method}", o.epochs - begun):
            if o.due(epoch, last):
                at, last = posterior.mean.detach().clone(), epoch
                posterior.bases = self.bases(at)
            self._epoch(epoch, posterior, optimizer)
            if say is not None:
                say(f"bound {self.history[-1]['bound']:.4f}")
            if self.path is not None and ((epoch + 1) % self._every == 0 or epoch + 1 == o.epochs):
                state = checkpoints.optimizer_state(optimizer, theta)
                kept = {"theta": theta.data, "basis": at, "last": torch.tensor(last), **state}
                checkpoints.save(self.path, self._name, checkpoints.Stage(epoch + 1, kept, self.history))
        return posterior

    def _epoch(self, epoch: int, posterior: Posterior, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self.options.rate(epoch)
        device = posterior.theta.device
        generator = stream(self.options.seed, "noise", epoch, device=device)
        wrong = torch.zeros((), dtype=torch.long, device=device)
        for x, y in self.examples.shuffled(epoch):
            wrong += posterior.backward(self.network, x, y, generator)
            optimizer.step()
            posterior.project()
        check_finite(posterior, epoch, self.options)
        found = posterior.on_grid(wrong / self.examples.count)
        self.history.append({"epoch": epoch + 1, **{name: float(value) for name, value in found.items()}})

    def finished(self, posterior: Posterior) -> PacBayes:
        """Draw networks, and take the bound of their error."""
        o = self.options
        noise = stream(o.seed, "drawn networks", device=posterior.theta.device)
        error = stochastic_error(self.network, posterior, self.examples, o.draws, noise, o.per_draw, self.progress)
        limit = error_limit(error, o.draws, o.delta_draws)
        found = posterior.bound(limit)
        self.set_weights(posterior.mean)
        return PacBayes(
            method=o.method,
            bound=found["bound"],
            bound_without_correction=float(kl_inverse(error, found["rate"])),
            kl=found["kl"],
            error=error,
            error_limit=limit,
            rate=found["rate"],
            half_log_lambda=found["half_log_lambda"],
            j=int(found["j"]),
            layer_kl=posterior.layer_kl(found["half_log_lambda"]),
            mean_error=self.mean_error,
            examples=self.examples.count,
            parameters=self.objective.parameters,
            draws=o.draws,
            delta=o.delta,
            delta_draws=o.delta_draws,
            history=self.history,
            posterior=posterior,
            model=self.network,
        )


def check_finite(posterior: Posterior, epoch: int, options: Options) -> None:
    """A posterior that has diverged says so at once."""
    if not bool(torch.isfinite(posterior.theta).all()):
        raise NumericalError(f"The posterior is not finite after epoch {epoch + 1}. Lower lr={options.lr}.")


class _Again:
    """Batches of examples that can be gone through again and again."""

    def __init__(self, examples: Examples) -> None:
        self.examples = examples

    def __iter__(self) -> Iterator[tuple[Tree, Labels]]:
        return self.examples.in_order()


@torch.no_grad()
def _mean_error(network: nn.Module, examples: Examples) -> float:
    """Of the given network; labels are checked on the way."""
    params, wrong = {name: p.detach() for name, p in trainable(network).items()}, 0
    for x, y in examples.in_order():
        f = _first_outputs(network, params, x)
        check_labels(f, y)
        if not bool(torch.isfinite(f).all()):
            given = "a model whose outputs on the training data are not finite"
            raise InputError(describe(given, "finite outputs", "look for NaN and infinities in the inputs"))
        wrong += int((f.argmax(1) != y).sum())
    return wrong / examples.count


def _first_outputs(network: nn.Module, params: dict[str, Tensor], x: Tree) -> Tensor:
    """With a word on inputs of another dtype, which a model may or may not take."""
    try:
        return outputs(network, params, x)
    except RuntimeError as error:
        own = next(iter(params.values())).dtype
        other = [leaf.dtype for leaf in leaves(x) if leaf.is_floating_point() and leaf.dtype != own]
        if not other:
            raise
        given = f"inputs of {other[0]} for a model of {own}"
        raise InputError(describe(given, "the same dtype", f"convert one, e.g. x.to({own})")) from error
