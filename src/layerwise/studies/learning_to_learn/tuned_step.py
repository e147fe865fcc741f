"""One step size of SGD for a kind of image task, chosen by training loss or by validation loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.progress import Progress, Silent
from layerwise.studies.learning_to_learn.image_tasks import (
    CLASSES,
    Drawn,
    Tasks,
    accuracies,
    batch_order,
    losses,
    networks,
    taken,
)


class Outcome(NamedTuple):
    """A chosen step size on new tasks: means over them."""

    eta: float
    train: float
    """Accuracy on the labels that were trained on, random ones included."""
    test: float
    """Accuracy on test images, whose labels are right."""


@dataclass(frozen=True, kw_only=True)
class TunedStep:
    """How networks are trained."""

    tasks: Tasks
    hidden: tuple[int, ...] = (100, 20)
    batch: int = 32
    steps: int = 800
    device: str = "cpu"

    def trained(
        self, drawn: Drawn, seeds: Sequence[int], etas: Float[Tensor, "R"], progress: Progress | None = None
    ) -> dict[str, Tensor]:
        """A network for each task and seed, by SGD with its own step size; all at once."""
        params = networks(seeds, (self.tasks.pixels, *self.hidden, CLASSES), "tuned", self.device)
        order = batch_order(seeds, drawn.x.shape[1], self.steps, self.batch, "tuned").to(self.device)
        eta = etas.to(drawn.x)[:, None, None]
        for k in (progress or Silent()).track(range(self.steps), "steps", self.steps):
            params = {name: p.detach().requires_grad_() for name, p in params.items()}
            index = order[:, k]
            loss = losses(params, taken(drawn.x, index), drawn.y.gather(1, index)).sum()
            gradients = torch.autograd.grad(loss, list(params.values()))
            params = {name: p - eta * g for (name, p), g in zip(params.items(), gradients, strict=True)}
        return {name: p.detach() for name, p in params.items()}

    def objectives(
        self, etas: Float[Tensor, "E"], seeds: Sequence[int], progress: Progress | None = None
    ) -> dict[str, Float[Tensor, "E"]]:
        """The mean loss after training, on what was trained on and on a held-out half; a run that diverged has ∞."""
        found = {}
        for by, kept in (("train", self.tasks.examples), ("validation", self.tasks.examples // 2)):
            runs = [(seed, eta) for eta in etas.tolist() for seed in seeds]
            drawn = self.tasks.draw([seed for seed, _ in runs], "meta", self.device)
            part = Drawn(x=drawn.x[:, :kept], y=drawn.y[:, :kept], test_x=drawn.test_x, test_y=drawn.test_y)
            params = self.trained(part, [seed for seed, _ in runs], torch.tensor([e for _, e in runs]), progress)
            judged = (part.x, part.y) if by == "train" else (drawn.x[:, kept:], drawn.y[:, kept:])
            loss = losses(params, *judged).double()
            loss = torch.where(torch.isfinite(loss), loss, torch.inf)
            found[by] = loss.unflatten(0, (len(etas), len(seeds))).mean(1).cpu()
        return found

    def on_new_tasks(self, eta: float, seeds: Sequence[int], trained_on: int) -> Outcome:
        """A step size on tasks that it was not chosen for."""
        drawn = self.tasks.draw(seeds, "test", self.device)
        part = Drawn(x=drawn.x[:, :trained_on], y=drawn.y[:, :trained_on], test_x=drawn.test_x, test_y=drawn.test_y)
        params = self.trained(part, seeds, torch.full((len(seeds),), eta))
        test = accuracies(params, drawn.test_x.expand(len(seeds), -1, -1), drawn.test_y)
        return Outcome(eta, accuracies(params, part.x, part.y).mean().item(), test.mean().item())
