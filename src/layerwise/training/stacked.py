"""Many trainings of one small network as one tensor program: runs that differ in their seed and their rate.

Steps of small networks wait for the host, not for arithmetic. K networks of one architecture are K times the work in as
many operations, if each layer is one product of stacks; the optimizer sees the matrices of a stack, as it sees the
experts of a mixture. The rate is applied afterwards, run by run, to what the optimizer would do at a rate of 1: so
updates must be proportional to it, as they are in torch's SGD, Adam and AdamW and in `KFAC`, `EKFAC`, `FOOF`,
`Shampoo`, `SOAP` and `Muon` with ``scale="formula"``, without clip and graft. All others are refused, such as updates
of AdamW's size, which the weights bound.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from layerwise.foundations import likelihoods
from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.likelihoods import Bernoulli, Gaussian
from layerwise.foundations.modes import evaluating
from layerwise.optim.engine import Layerwise
from layerwise.optim.members.ekfac import EKFAC
from layerwise.optim.members.foof import FOOF
from layerwise.optim.members.kfac import KFAC
from layerwise.optim.members.muon import Muon
from layerwise.optim.members.sgd import SGD
from layerwise.optim.members.shampoo import Shampoo
from layerwise.optim.members.soap import SOAP
from layerwise.training.loop import BUDGET, NOT_FINITE, order_seed, seeded
from layerwise.training.metrics import moved
from layerwise.training.problem import Problem
from layerwise.training.trials import NUMERICAL, Run, Trainer, Trial

PROPORTIONAL = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
ELEMENTWISE = (nn.Sigmoid, nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Softplus, nn.LeakyReLU, nn.ELU, nn.Identity)


class StackedLinear(nn.Module):
    """K linear layers, ``[N, K, I] → [N, K, O]``; the bias is the last row of the weights, as K-FAC treats it."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        rows = [layer.weight.detach().T for layer in layers]
        self.bias = layers[0].bias is not None
        if self.bias:
            rows = [torch.cat([W, layer.bias.detach()[None]]) for W, layer in zip(rows, layers, strict=True)]
        self.weight = nn.Parameter(torch.stack(rows))

    def forward(self, x: Float[Tensor, "N K I"]) -> Float[Tensor, "N K O"]:
        """K products at once."""
        h = nn.functional.pad(x, (0, 1), value=1.0) if self.bias else x
        return torch.bmm(h.transpose(0, 1), self.weight).transpose(0, 1)


class StackedLinearAndBias(nn.Module):
    """The same for optimizers that treat biases by themselves; matrices lie as those of `nn.Linear` do."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.stack([layer.weight.detach() for layer in layers]))
        biases = [layer.bias.detach()[None] for layer in layers if layer.bias is not None]
        # The axis of length one says that a run's biases are a vector, not a row of a matrix of all runs.
        self.bias = nn.Parameter(torch.stack(biases)) if biases else None

    def forward(self, x: Float[Tensor, "N K I"]) -> Float[Tensor, "N K O"]:
        """K products at once."""
        f = torch.bmm(x.transpose(0, 1), self.weight.mT)
        return (f if self.bias is None else f + self.bias).transpose(0, 1)


class StackedNorm(nn.Module):
    """K batch norms as one."""

    def __init__(self, norms: Sequence[nn.BatchNorm1d]) -> None:
        super().__init__()
        first = norms[0]
        features = first.num_features * len(norms)
        self.norm = nn.BatchNorm1d(features, first.eps, first.momentum, first.affine, first.track_running_stats)
        joined = {name: torch.cat([norm.state_dict()[name] for norm in norms])
                  for name, value in first.state_dict().items() if value.ndim}  # fmt: skip
        self.norm.to(first.running_var)
        self.norm.load_state_dict(first.state_dict() | joined)

    def forward(self, x: Float[Tensor, "N K I"]) -> Float[Tensor, "N K I"]:
        """Over the examples of each."""
        return self.norm(x.flatten(1)).reshape(x.shape)


def stacked(models: Sequence[nn.Module], separate_bias: bool = False) -> nn.Sequential:
    """K fully connected networks as one, ``[N, K, I] → [N, K, O]``; they keep their weights.

    With `separate_bias` biases are parameters of their own, else the last row of their layer's matrix.

    >>> one, other = (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(2))
    >>> x = torch.randn(5, 3)
    >>> both = stacked([one, other])(x[:, None].expand(5, 2, 3))
    >>> torch.allclose(both, torch.stack([one(x), other(x)], 1), atol=1e-6)
    True
    """
    for model in models:
        _refuse_special(model)
        if not isinstance(model, nn.Sequential) or not all(
            type(part) in (nn.Linear, nn.BatchNorm1d, *ELEMENTWISE) for part in model
        ):
            others = sorted({type(part).__name__ for part in model.children()} - {"Linear", "BatchNorm1d"})
            raise InputError(
                describe(
                    f"a {type(model).__name__} of {', '.join(others) or 'no layers'} to be stacked",
                    "nn.Sequential of linear layers, elementwise activations and batch norms",
                    "search without `stacked`",
                )
            )
    if len({tuple((type(part), part.extra_repr()) for part in model.children()) for model in models}) > 1:
        given = "networks that differ in more than their weights, to be stacked"
        raise InputError(describe(given, "one architecture for all seeds", "search without `stacked`"))
    parts: list[nn.Module] = []
    for layers in zip(*models, strict=True):
        if isinstance(layers[0], nn.Linear):
            parts.append(StackedLinearAndBias(layers) if separate_bias else StackedLinear(layers))
        elif isinstance(layers[0], nn.BatchNorm1d):
            parts.append(StackedNorm(layers))
        else:
            parts.append(layers[0])
    return nn.Sequential(*parts)


def _refuse_special(model: nn.Module) -> None:
    """Frozen and shared layers and hooks would be lost."""
    parts = list(model._modules.values())  # `children` names a layer once
    what = ""
    if len({id(part) for part in parts}) < len(parts):
        what = "a layer that is used twice"
    elif not all(p.requires_grad for p in model.parameters()):
        what = "frozen parameters"
    elif any(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks for part in model.modules()):
        what = "hooks"
    if what:
        raise InputError(describe(f"a network with {what}, to be stacked", "none", "search without `stacked`"))


def losses(problem: Problem, f: Float[Tensor, "N K O"], y: Tensor) -> Float[Tensor, "K"]:
    """The mean loss of each run; targets ``[N, K, …]``."""
    likelihood = likelihoods.resolve(problem.likelihood)
    if type(likelihood) in (Bernoulli, Gaussian):  # whose positions are told from values by the last axis
        return likelihood.loss(likelihood.standardize(f, y, None, lambda t: t)).sum(0) / len(f)
    return torch.stack([problem.loss(f[:, k], y[:, k]) for k in range(f.shape[1])])


def refuse_other_rates(optimizer: Optimizer) -> None:
    """An error where updates are not proportional to the rate."""
    alike = len(optimizer.param_groups) == 1
    group = optimizer.param_groups[0]
    same = float(group["lr"]) == 1.0 and float(group.get("fallback_ratio", 1.0)) == 1.0
    if isinstance(optimizer, Layerwise):
        known = isinstance(optimizer, SGD | KFAC | EKFAC | FOOF | Shampoo | SOAP | Muon) and optimizer.proportional
    else:
        known = type(optimizer) in PROPORTIONAL
    if known and same and alike:
        return
    raise InputError(
        describe(
            f"{str(optimizer).splitlines()[0]} in {len(optimizer.param_groups)} parameter groups, to be stacked",
            "updates in proportion to one rate: torch's SGD, Adam, AdamW, or KFAC, EKFAC, FOOF, Shampoo, SOAP, Muon, "
            'SGD with scale="formula", clip=None and no graft, in one parameter group',
            "search without `stacked`",
        )
    )


@dataclass(frozen=True, kw_only=True)
class StackedTrainer:
    """Trains runs at once whose options are alike but for the rate."""

    one: Trainer
    """What a run alone would be trained by."""
    rate: str = "lr"

    def __call__(self, runs: Sequence[Run]) -> list[Trial]:
        """One trial a run, as if they had been trained one by one (up to rounding; "seconds" are those of all)."""
        shared = [{name: value for name, value in options.items() if name != self.rate} for options, _ in runs]
        if any(options != shared[0] for options in shared) or any(self.rate not in options for options, _ in runs):
            raise InputError(
                describe("runs with other options than the rate", f"options alike but for {self.rate!r}", "group them")
            )
        try:
            return _Together(self, runs, shared[0]).trained()
        except NUMERICAL:  # of one of them, we do not know which
            return [self.one(run) for run in runs]


@dataclass
class _Together:
    """Runs under way."""

    how: StackedTrainer
    runs: Sequence[Run]
    shared: dict[str, float | int]
    step: int = 0
    seconds: float = 0.0
    series: dict[str, list] = field(default_factory=lambda: defaultdict(list))
    """By name, a list of one value a run (or one for all) at each measurement."""

    def __post_init__(self) -> None:
        one = self.how.one
        self.problem, self.device = one.problem, torch.device(one.device)
        self.seeds = list(dict.fromkeys(seed for _, seed in self.runs))
        self.seed_of = torch.tensor([self.seeds.index(seed) for _, seed in self.runs], device=self.device)
        models = []
        for _, seed in self.runs:
            with seeded(seed, self.device):
                models.append(self.problem.model(seed).to(self.device))
        self.model, self.models = stacked(models), models
        rates = [float(options[self.how.rate]) for options, _ in self.runs]
        self.rates = torch.tensor(rates, dtype=torch.float64, device=self.device)
        self.alive = torch.ones(len(self.runs), dtype=torch.bool, device=self.device)

    def trained(self) -> list[Trial]:
        """Step until the budget is spent."""
        one = self.how.one
        budget = self.problem.budget if one.budget is None else one.budget
        if budget.seconds is not None:
            raise InputError(describe("a budget in seconds", "steps or epochs", "search without `stacked`"))
        with seeded(self.seeds[0], self.device):
            optimizer = one.make(self.model, **{self.how.rate: 1.0}, **self.shared)
            refuse_other_rates(optimizer)
            if isinstance(optimizer, Layerwise) and optimizer.separate_bias:
                self.model = stacked(self.models, separate_bias=True)
                optimizer = one.make(self.model, **{self.how.rate: 1.0}, **self.shared)
            del self.models
            self.measure()
            epoch = 0
            while not budget.spent(steps=self.step, epochs=epoch, seconds=0.0) and bool(self.alive.any()):
                before = self.step
                passes = [self.problem.batches("train", order_seed(seed, epoch)) for seed in self.seeds]
                for batches in zip(*passes, strict=True):
                    start = time.perf_counter()
                    self.update(optimizer, *self.gathered(batches))
                    self.seconds += time.perf_counter() - start
                    self.step += 1
                    if budget.spent(steps=self.step, epochs=epoch, seconds=0.0) or not bool(self.alive.any()):
                        break
                    if self.step % one.every == 0:
                        self.measure()
                if self.step == before:
                    given = f"problem {self.problem.name!r}, whose split 'train' gave no batch in pass {epoch}"
                    raise InputError(describe(given, "at least one batch a pass", "return a fresh iterable each time"))
                epoch += 1
            if self.series["step"][-1] != self.step:
                self.measure()
        return [self.trial(k) for k in range(len(self.runs))]

    def gathered(self, batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Each run's batch is that of its seed: ``[N, K, …]``."""
        xs, ys = (torch.stack([moved(batch[part], self.device) for batch in batches], 1) for part in (0, 1))
        return xs[:, self.seed_of], ys[:, self.seed_of]

    def update(self, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        """One step of all; a run whose loss or gradient is not finite ends there.

        It is given the weights of a run that goes on: anything else might not be finite, or have no statistics.
        """
        self.model.train()
        buffers = {name: value.clone() for name, value in self.model.named_buffers()}
        while True:
            optimizer.zero_grad()
            found = losses(self.problem, self.model(x), y)
            finite = torch.isfinite(found.detach())
            if bool(finite[self.alive].all()):
                found.sum().backward()
                finite = self.finite_gradients()
                if bool(finite[self.alive].all()):
                    break
            self.alive &= finite
            if not bool(self.alive.any()):
                return
            for p in self.model.parameters():
                own = p.data.view(len(self.runs), -1)
                own[~self.alive] = own[self.alive][0]
            for name, value in self.model.named_buffers():
                value.copy_(buffers[name])  # as if this forward had not been
        before = [p.detach().clone() for p in self.model.parameters()]
        optimizer.step()
        with torch.no_grad():
            for p, old in zip(self.model.parameters(), before, strict=True):
                new = torch.addcmul(old, self.each(self.rates, p), p - old)
                p.copy_(torch.where(self.each(self.alive, p), new, old))

    def finite_gradients(self) -> Tensor:
        """Whether each run has finite gradients."""
        K = len(self.runs)
        found = torch.ones(K, dtype=torch.bool, device=self.device)
        for p in self.model.parameters():
            if p.grad is not None:
                found &= torch.isfinite(p.grad.reshape(K, -1)).all(1)
        return found

    def each(self, numbers: Tensor, p: Tensor) -> Tensor:
        """One number a run, to be multiplied with a parameter: stacked, or of norms side by side."""
        numbers = numbers.to(p.dtype) if numbers.is_floating_point() else numbers
        if p.ndim == 1:
            return numbers.repeat_interleave(len(p) // len(numbers))
        return numbers.reshape(-1, 1, 1)

    @torch.no_grad()
    def measure(self) -> None:
        """Loss and score of every run, in eval mode."""
        split, _, metric = self.how.one.score.partition("/")
        self.series["step"].append(self.step)
        self.series["seconds"].append(self.seconds)
        for name in self.how.one.splits():
            wanted = {"loss", metric} if name == split else {"loss"}
            for key, value in self.evaluated(name, wanted).items():
                self.series[f"{name}/{key}"].append(value)

    def evaluated(self, split: str, wanted: set[str]) -> dict[str, list[float]]:
        """Means over the examples of a split, one a run."""
        totals: dict[str, Tensor] = {}
        count = 0
        with evaluating(self.model):
            for batch in self.problem.batches(split, self.seeds[0]):
                if batch[0].ndim != 2:
                    given = f"inputs of shape {tuple(batch[0].shape)}, to be stacked"
                    raise InputError(describe(given, "[N, features]", "flatten them, or search without `stacked`"))
                x, y = (moved(part, self.device).unsqueeze(1) for part in batch)
                K = len(self.runs)
                x, y = x.expand(len(x), K, *x.shape[2:]), y.expand(len(y), K, *y.shape[2:])
                f = self.model(x)
                for name in wanted:
                    if name == "loss":
                        value = losses(self.problem, f, y)
                    else:
                        metric = self.problem.metrics[name]
                        value = torch.stack([torch.as_tensor(metric(f[:, k], y[:, k])) for k in range(K)])
                    totals[name] = totals.get(name, 0) + value.double() * len(x)
                count += len(x)
        if not count:
            given = f"split {split!r} of {self.problem.name!r} without batches"
            raise InputError(describe(given, "at least one batch a pass", "check `batches`"))
        return {name: (total / count).tolist() for name, total in totals.items()}

    def trial(self, k: int) -> Trial:
        """The verdict on one run; after its loss was not finite nothing of it is known."""
        alive = bool(self.alive[k])
        names = ("train/loss", self.how.one.score)
        found = {name: self.series[name] for name in ("step", "seconds")}
        found |= {name: [values[k] if alive else math.nan for values in self.series[name]] for name in names}
        return Trial.judged(self.runs[k], BUDGET if alive else NOT_FINITE, self.how.one.score, found)
