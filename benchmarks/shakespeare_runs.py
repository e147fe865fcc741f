"""One run: a member at one rate, trained until it reaches the loss."""

import contextlib
import copy
import gc
import math
import time
from dataclasses import asdict, dataclass, field

import torch
from measure import reason, synchronize
from shakespeare_members import MEMBERS, Optimizers
from shakespeare_model import CharacterGPT, Size, Text, cross_entropy
from torch import nn

import layerwise as lw

WARM_UP = 22
"""Steps that are taken and taken back before the clock starts, so that kernels are loaded, and compiled under
--compile: a first refresh, those while statistics are young, and two turns of every layer after that."""
HOPELESS_AFTER, HOPELESS = 300, 4.0
"""A run whose validation loss is still above the second after so many steps is given up: letters alone give 3.3."""


@dataclass
class Run:
    """What one run gave; seconds are those of training alone."""

    member: str
    rate: float
    steps: int = 0
    seconds: float = 0.0
    startup: float = 0.0
    """The first step, which may hold decompositions; part of `seconds`."""
    reached: bool = False
    losses: list[float] = field(default_factory=list)
    fallbacks: int | None = None
    skipped_steps: int | None = None
    note: str = ""

    @property
    def best(self) -> float:
        return min((loss for loss in self.losses if math.isfinite(loss)), default=math.inf)

    def record(self) -> dict:
        ms = 1e3 * self.seconds / max(self.steps, 1)
        steady = 1e3 * (self.seconds - self.startup) / max(self.steps - 1, 1)
        best = self.best if self.losses and math.isfinite(self.best) else None
        losses = [loss if math.isfinite(loss) else None for loss in self.losses]  # JSON has no other numbers
        rounded = {"seconds": round(self.seconds, 3), "startup": round(self.startup, 3), "losses": losses}
        return asdict(self) | rounded | {"best": best, "ms": round(ms, 3), "steady_ms": round(steady, 3)}


@dataclass(frozen=True)
class Race:
    """What all runs share."""

    text: Text
    size: Size
    target: float
    budget: float
    compile: bool
    seed: int

    @property
    def device(self) -> str:
        return self.text.device

    def autocast(self) -> contextlib.AbstractContextManager:
        cuda = self.device.startswith("cuda")
        return torch.autocast("cuda", torch.bfloat16) if cuda else contextlib.nullcontext()

    def model(self) -> CharacterGPT:
        """The same weights in every run."""
        torch.manual_seed(self.seed)
        return CharacterGPT(self.size, self.text.vocabulary).to(self.device).train()

    def factor(self, step: int) -> float:
        """Of the rate at a step, from 0: linear warm-up, then a cosine down to a tenth."""
        if step < self.size.warm_up:
            return (step + 1) / self.size.warm_up
        along = (step - self.size.warm_up) / max(self.size.steps - self.size.warm_up, 1)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * along))


class Trainer:
    """A model, its optimizers and the stream of batches."""

    def __init__(self, race: Race, member: str, rate: float) -> None:
        self.race, self.plain = race, race.model()
        self.optimizers: Optimizers = MEMBERS[member].make(self.plain, rate)
        self.rates = [[float(group["lr"]) for group in opt.param_groups] for opt in self.optimizers]
        # compiled after the optimizer was built: its hooks must be there at the first compiled call
        self.model: nn.Module = torch.compile(self.plain) if race.compile else self.plain  # type: ignore[assignment]
        self.stream = race.text.generator(race.seed)
        self.steps = 0

    def step(self) -> None:
        """One step; waits for nothing."""
        factor = self.race.factor(self.steps)
        for opt, rates in zip(self.optimizers, self.rates, strict=True):
            for group, rate in zip(opt.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            opt.zero_grad()
        x, y = self.race.text.batch(self.race.text.train, self.stream)
        with self.race.autocast():
            loss = cross_entropy(self.model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.plain.parameters(), 1.0, error_if_nonfinite=False, foreach=True)
        for opt in self.optimizers:
            opt.step()
        self.steps += 1

    def warm_up(self, steps: int) -> None:
        """Take some steps and take them back: weights, optimizer state, batches and random numbers."""
        weights = copy.deepcopy(self.plain.state_dict())
        states = [copy.deepcopy(opt.state_dict()) for opt in self.optimizers]
        for _ in range(steps):
            self.step()
        self.plain.load_state_dict(weights)
        for opt, state in zip(self.optimizers, states, strict=True):
            opt.zero_grad()
            opt.load_state_dict(state)
        self.stream = self.race.text.generator(self.race.seed)
        self.steps = 0

    @torch.no_grad()
    def validation_loss(self) -> float:
        """In eval mode, by the model that is not compiled."""
        self.plain.eval()
        with self.race.autocast():
            losses = [cross_entropy(self.plain(x), y) for x, y in self.race.text.validation_batches()]
        self.plain.train()
        return float(torch.stack(losses).mean())

    def health(self) -> tuple[int, int] | None:
        """Decompositions that fell back and steps that were left out, of our own members."""
        opt = self.optimizers[0]
        if not isinstance(opt, lw.optim.Layerwise):
            return None
        found = opt.health()
        return found.fallbacks, found.skipped_steps


def run(race: Race, member: str, rate: float, steps: int) -> Run:
    """Train until the target, but no more than some steps, and no longer than the budget."""
    found = Run(member, rate)
    try:
        _run(race, found, min(steps, race.size.steps))
    except Exception as error:  # a member may fail in any way at all; the table says how
        found.note = f"fails: {reason(error)}"
    return found


def _ready(race: Race, found: Run) -> Trainer:
    """A trainer whose kernels are loaded. Without --compile another one did that, and this one has done nothing."""
    trainer = Trainer(race, found.member, found.rate)
    trainer.warm_up(min(WARM_UP, race.size.warm_up))
    if not race.compile:
        del trainer
        trainer = Trainer(race, found.member, found.rate)
    gc.collect()  # what is left of other runs is not collected on this one's clock
    return trainer


def _run(race: Race, found: Run, steps: int) -> None:
    trainer = _ready(race, found)
    before = trainer.health() or (0, 0)
    torch.manual_seed(race.seed)  # of dropout
    while trainer.steps < steps and not found.reached and not found.note:
        _train(race, trainer, found, steps)
        judge(found, trainer.validation_loss(), race.target, race.budget)
    if not found.reached and not found.note and steps < race.size.steps:
        found.note = "stopped: no sooner than before"
    after = trainer.health()
    if after is not None:
        found.fallbacks, found.skipped_steps = after[0] - before[0], after[1] - before[1]


def judge(found: Run, loss: float, target: float, budget: float) -> None:
    """What an evaluation says of a run. The target counts where its seconds are within the budget.

    >>> late = Run("KFAC", 1e-3, steps=200, seconds=11.0)
    >>> judge(late, 1.4, target=1.5, budget=10.0)
    >>> late.reached, late.note
    (False, 'stopped: beyond the budget, with the loss reached')
    """
    found.losses.append(loss)
    within = found.seconds <= budget
    found.reached = within and loss <= target
    if not within:
        found.note = "stopped: beyond the budget" + (", with the loss reached" if loss <= target else "")
    if not math.isfinite(loss) or (found.steps >= HOPELESS_AFTER and loss > HOPELESS):
        found.note = "given up: diverges"


def _train(race: Race, trainer: Trainer, found: Run, steps: int) -> None:
    """Up to the next evaluation, on the clock."""
    synchronize(race.device)
    start = time.perf_counter()
    while True:
        trainer.step()
        if trainer.steps == 1:
            synchronize(race.device)
            found.startup = time.perf_counter() - start
        if trainer.steps % race.size.evaluate_every == 0 or trainer.steps == steps:
            break
        if found.seconds + time.perf_counter() - start > race.budget:
            break  # and is looked at once more, off the clock
    synchronize(race.device)
    found.seconds += time.perf_counter() - start
    found.steps = trainer.steps
