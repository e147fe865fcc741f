"""C-scores: how often networks that did not see an example get it right."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.random import stream

TOGETHER = 20_000_000
"""Parameters of all networks of one stack."""


class CScores(NamedTuple):
    """One score an example, between 0 (never right) and 1; unpacks as ``scores, left_out``."""

    scores: Float[Tensor, "N"]
    left_out: Int64[Tensor, "N"]
    """Trainings that did not see the example."""


def estimate_cscores(
    model_fn: Callable[[], nn.Module],
    data: tuple[Tensor, Tensor],
    fractions: Sequence[float] = (0.1, 0.3, 0.5, 0.7, 0.9),
    repeats: int = 10,
    *,
    steps: int = 60,
    lr: float = 1e-2,
    batch: int | None = None,
    seed: int = 0,
    stacked: bool | None = None,
) -> CScores:
    """Consistency scores ``C(x, y)``: networks are trained on random subsets, and asked for what was left out.

        C(x, y) = mean over subset sizes of mean over subsets D without x of 1[f(x; D) = y]

    The networks of one size are trained by Adam as one tensor program, weights stacked, where the model allows it, and
    one after the other where it does not (batch norm, dropout).

    >>> import torch
    >>> x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    >>> y = (x[:, 0] > 0).long()
    >>> y[0] = 1 - y[0]
    >>> scores, _ = estimate_cscores(lambda: torch.nn.Linear(2, 2), (x, y), fractions=(0.5,), repeats=10, lr=0.1)
    >>> bool(scores[0] < 0.2), bool(scores[1:].mean() > 0.8)
    (True, True)

    Args:
        model_fn: makes a network with fresh weights and one output a class; torch's random state is put back.
        data: inputs and integer labels, all on one device.
        fractions: sizes of the subsets.
        repeats: subsets of each size.
        steps: of Adam.
        lr: its rate.
        batch: examples of a step; None for the whole subset.
        seed: of subsets, weights and batches.
        stacked: whether networks are trained as one program; None decides by the model.

    Reference: Jiang, Zhang, Talwar and Mozer 2021.
    """
    x, y = data
    if isinstance(model_fn, nn.Module):
        raise InputError(describe("a model as model_fn", "a function that makes one", "pass lambda: make_model()"))
    _check(x, y, fractions, repeats, steps, batch)
    groups = [_Runs(x, y, round(size * len(x)), repeats, seed, f"{size:g}", stacked) for size in fractions]
    left_out = [runs.left_out() for runs in groups]
    counts = torch.stack([each.sum(0) for each in left_out])
    if not bool((counts.sum(0) > 0).all()):
        given = f"{int((counts.sum(0) == 0).sum())} examples that are in every subset, so that they have no score"
        raise InputError(
            describe(given, "a subset without it, for each example", "take more repeats or smaller fractions")
        )
    correct = [torch.cat(list(runs.trained(model_fn, steps, lr, batch))) for runs in groups]
    right = torch.stack([(a & b).sum(0) for a, b in zip(correct, left_out, strict=True)])
    shares, sizes = right.double() / counts.clamp_min(1), counts > 0
    return CScores((shares * sizes).sum(0) / sizes.sum(0), counts.sum(0))


class _Runs(NamedTuple):
    """Trainings on subsets of one size."""

    x: Tensor
    y: Tensor
    size: int
    repeats: int
    seed: int
    name: str
    stacked: bool | None

    def trained(
        self, model_fn: Callable[[], nn.Module], steps: int, lr: float, batch: int | None
    ) -> Iterator[Bool[Tensor, "some N"]]:
        """Which examples each network gets right, some networks at a time."""
        first = self.model(model_fn, 0)
        alone = not (_stackable(first) if self.stacked is None else self.stacked)
        together = 1 if alone else max(1, TOGETHER // max(sum(p.numel() for p in first.parameters()), 1))
        for begin in range(0, self.repeats, together):
            numbers = range(begin, min(begin + together, self.repeats))
            models = [first if number == 0 else self.model(model_fn, number) for number in numbers]
            chosen = torch.stack([self.subset(number) for number in numbers])
            picked = torch.stack([self.picked(number, steps, batch) for number in numbers], 1)
            fit = _fit_alone if alone else _fit_stack
            yield fit(models, self.x, self.y, chosen, picked, lr) == self.y

    def left_out(self) -> Bool[Tensor, "repeats N"]:
        """Which examples each network does not see."""
        chosen = torch.stack([self.subset(number) for number in range(self.repeats)])
        seen = torch.zeros(self.repeats, len(self.x), dtype=torch.bool, device=self.x.device)
        return ~seen.scatter(1, chosen, True)

    def model(self, model_fn: Callable[[], nn.Module], number: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(stream(self.seed, "weights", self.name, number).initial_seed())
            return model_fn().to(self.x.device)

    def subset(self, number: int) -> Tensor:
        generator = stream(self.seed, "subset", self.name, number)
        return torch.randperm(len(self.x), generator=generator)[: self.size].to(self.x.device)

    def picked(self, number: int, steps: int, batch: int | None) -> Tensor:
        """Places in the subset, step by step; of the whole of it, the same ones always."""
        if batch is None or batch >= self.size:
            return torch.arange(self.size).expand(1, -1).to(self.x.device).expand(steps, -1)
        generator = stream(self.seed, "batches", self.name, number)
        return torch.randint(self.size, (steps, batch), generator=generator).to(self.x.device)


def _fit_stack(models: Sequence[nn.Module], x: Tensor, y: Tensor, chosen: Tensor, picked: Tensor, lr: float) -> Tensor:
    """All networks as one: Adam is elementwise, so that one over stacked weights is one for each."""
    parameters, buffers = stack_module_state(list(models))
    skeleton = copy.deepcopy(models[0]).to("meta")

    def outputs(p: dict, b: dict, inputs: Tensor) -> Tensor:
        return functional_call(skeleton, (p, b), (inputs,))

    optimizer = torch.optim.Adam(parameters.values(), lr=lr)
    for places in picked:
        index = chosen.gather(1, places)
        optimizer.zero_grad()
        f = vmap(outputs)(parameters, buffers, x[index])
        functional.cross_entropy(f.flatten(0, 1), y[index].flatten(), reduction="sum").div(index.shape[1]).backward()
        optimizer.step()
    with torch.no_grad():
        return vmap(outputs, in_dims=(0, 0, None))(parameters, buffers, x).argmax(-1)


def _fit_alone(models: Sequence[nn.Module], x: Tensor, y: Tensor, chosen: Tensor, picked: Tensor, lr: float) -> Tensor:
    """One network."""
    (model,) = models
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(chosen[0].sum()))  # dropout
        for places in picked[:, 0]:
            index = chosen[0][places]
            optimizer.zero_grad()
            functional.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        return torch.cat([model(part).argmax(-1) for part in x.split(1000)]).unsqueeze(0)


def _stackable(model: nn.Module) -> bool:
    """Without buffers that training changes, and without noise."""
    return not any(True for _ in model.buffers()) and not any(isinstance(m, _DropoutNd) for m in model.modules())


def _check(x: Tensor, y: Tensor, fractions: Sequence[float], repeats: int, steps: int, batch: int | None) -> None:
    if len(x) != len(y) or y.is_floating_point() or y.ndim != 1:
        given = f"inputs {tuple(x.shape)} and labels {tuple(y.shape)}, {y.dtype}"
        raise InputError(describe(given, "one integer label an input", "give labels as class numbers"))
    if not fractions or not all(0 < round(f * len(x)) < len(x) for f in fractions):
        given = f"fractions={tuple(fractions)} of {len(x)} examples"
        raise InputError(describe(given, "parts that keep an example, and leave one out", "pass e.g. (0.25,)"))
    if min(repeats, steps, batch or 1) < 1:
        raise InputError(describe(f"repeats={repeats}, steps={steps}, batch={batch}", "1 at least", "change them"))
