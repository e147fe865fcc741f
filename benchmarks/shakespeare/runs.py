"""One run: a member at one rate, trained until it reaches the loss."""

import contextlib
import copy
import gc
import math
import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from measure import reason, synchronize
from torch import nn

import layerwise as lw
from shakespeare.members import MEMBERS, Optimizers
from shakespeare.model import CharacterGPT, Size, Text, cross_entropy

START_UP = 10
"""Steps whose seconds, with those of the construction, are the start-up."""
PLAIN = 3
"""Iterations of another copy of the model before the clock starts: the device's libraries are loaded."""
HOPELESS_AFTER, HOPELESS = 300, 4.0
"""A run whose validation loss is still above the second after so many steps is given up: letters alone give 3.3."""


@dataclass
class Run:
    """What one run gave. Seconds begin with the construction of the optimizer; evaluations do not count."""

    member: str
    rate: float
    seed: int
    steps: int = 0
    seconds: float = 0.0
    startup: float = 0.0
    """Seconds of construction and the first ten steps, with all that is compiled for them; part of `seconds`."""
    host: float = 0.0
    """Median milliseconds of the optimizer's `step()` on the host."""
    reached: bool = False
    losses: list[float] = field(default_factory=list)
    refusals: int | None = None
    fallbacks: int | None = None
    skipped_steps: int | None = None
    note: str = ""

    @property
    def best(self) -> float:
        return min((loss for loss in self.losses if math.isfinite(loss)), default=math.inf)

    @property
    def steady_ms(self) -> float:
        """Milliseconds of a step after the start-up."""
        return 1e3 * (self.seconds - self.startup) / max(self.steps - START_UP, 1)

    def record(self) -> dict:
        losses = [loss if math.isfinite(loss) else None for loss in self.losses]  # JSON has no other numbers
        rounded = {name: round(getattr(self, name), 4) for name in ("seconds", "startup", "host")}
        return asdict(self) | rounded | {"losses": losses}

    @classmethod
    def read(cls, record: dict[str, Any]) -> "Run":
        losses: Any = [math.nan if loss is None else loss for loss in record["losses"]]
        return cls(**record | {"losses": losses})


@dataclass(frozen=True)
class Race:
    """What all runs share."""

    text: Text
    size: Size
    target: float
    limit: float
    """Seconds after which a run is given up."""

    @property
    def device(self) -> str:
        return self.text.device

    def autocast(self) -> contextlib.AbstractContextManager:
        cuda = self.device.startswith("cuda")
        return torch.autocast("cuda", torch.bfloat16) if cuda else contextlib.nullcontext()

    def model(self, seed: int) -> CharacterGPT:
        """The same weights for every member."""
        torch.manual_seed(seed)
        return CharacterGPT(self.size, self.text.vocabulary).to(self.device).train()

    def factor(self, step: int) -> float:
        """Of the rate at a step, from 0: linear warm-up, then a cosine down to a tenth."""
        if step < self.size.warm_up:
            return (step + 1) / self.size.warm_up
        along = (step - self.size.warm_up) / max(self.size.steps - self.size.warm_up, 1)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * along))


class Trainer:
    """A model, its optimizers and the stream of batches."""

    def __init__(self, race: Race, member: str, rate: float, seed: int, model: CharacterGPT) -> None:
        self.race, self.model = race, model
        self.optimizers: Optimizers = MEMBERS[member](model, rate)
        self.rates = [(group, float(group["lr"])) for opt in self.optimizers for group in opt.param_groups]
        self.stream = race.text.generator(seed)
        self.host: list[float] = []

    @property
    def steps(self) -> int:
        return len(self.host)

    def step(self) -> None:
        """One step; waits for nothing."""
        factor = self.race.factor(self.steps)
        for group, rate in self.rates:
            group["lr"] = rate * factor
        for opt in self.optimizers:
            opt.zero_grad()
        x, y = self.race.text.batch(self.stream)
        with self.race.autocast():
            loss = cross_entropy(self.model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, error_if_nonfinite=False, foreach=True)
        start = time.perf_counter()
        for opt in self.optimizers:
            opt.step()
        self.host.append(1e3 * (time.perf_counter() - start))

    @torch.no_grad()
    def validation_loss(self) -> float:
        """A mean over all that is held out, in eval mode."""
        self.model.eval()
        batches = self.race.text.validation_batches()
        with self.race.autocast():
            losses = [y.numel() * cross_entropy(self.model(x), y) for x, y in batches]
        self.model.train()
        return float(torch.stack(losses).sum()) / sum(y.numel() for _, y in batches)


def run(race: Race, member: str, rate: float, seed: int, most: int | None = None) -> Run:
    """Train until the target, for no more than some steps."""
    found = Run(member, rate, seed)
    try:
        _run(race, found, min(most or race.size.steps, race.size.steps))
    except Exception as error:  # a member may fail in any way at all; the table says how
        found.note = f"fails: {reason(error)}"
    return found


def load_libraries(race: Race, model: CharacterGPT) -> None:
    """Forward, backward and clipping of a copy: what a run without our optimizers, or torch's, loads as well.

    torch imports its compiler at the first optimizer of any kind, and that is not counted either.
    """
    plain = copy.deepcopy(model)
    torch.optim.SGD(plain.parameters())
    generator = race.text.generator(0)
    for _ in range(PLAIN):
        x, y = race.text.batch(generator)
        with race.autocast():
            loss = cross_entropy(plain(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0, error_if_nonfinite=False, foreach=True)


def _run(race: Race, found: Run, steps: int) -> None:
    model = race.model(found.seed)
    load_libraries(race, model)
    gc.collect()  # what is left of other runs is not collected on this one's clock
    synchronize(race.device)
    torch.manual_seed(found.seed)  # of dropout
    start = time.perf_counter()
    trainer = Trainer(race, found.member, found.rate, found.seed, model)
    found.seconds = time.perf_counter() - start
    while trainer.steps < steps and not found.reached and not found.note:
        _train(race, trainer, found, steps)
        judge(found, trainer.validation_loss(), race.target, race.limit)
    if not found.reached and not found.note and steps < race.size.steps:
        found.note = "stopped: no sooner than before"
    found.host = statistics.median(trainer.host)
    opt = trainer.optimizers[0]
    if isinstance(opt, lw.optim.Layerwise):
        health = opt.health()
        found.refusals, found.fallbacks = health.refusals, health.fallbacks
        found.skipped_steps = health.skipped_steps


def judge(found: Run, loss: float, target: float, limit: float) -> None:
    """What an evaluation says of a run. The target counts where its seconds are within the limit.

    >>> late = Run("KFAC", 1e-3, 0, steps=200, seconds=11.0)
    >>> judge(late, 1.4, target=1.5, limit=10.0)
    >>> late.reached, late.note
    (False, 'stopped: beyond the limit, with the loss reached')
    """
    found.losses.append(loss)
    within = found.seconds <= limit
    found.reached = within and loss <= target
    if not within:
        found.note = "stopped: beyond the limit" + (", with the loss reached" if loss <= target else "")
    if not math.isfinite(loss) or (found.steps >= HOPELESS_AFTER and loss > HOPELESS):
        found.note = "given up: diverges"


def _train(race: Race, trainer: Trainer, found: Run, steps: int) -> None:
    """Up to the next evaluation, on the clock."""
    synchronize(race.device)
    start = time.perf_counter()
    while True:
        trainer.step()
        if trainer.steps == START_UP:
            synchronize(race.device)
            found.startup = found.seconds + time.perf_counter() - start
        if trainer.steps % race.size.evaluate_every == 0 or trainer.steps == steps:
            break
        if found.seconds + time.perf_counter() - start > race.limit:
            break  # and is looked at once more, off the clock
    synchronize(race.device)
    found.seconds += time.perf_counter() - start
    found.steps = trainer.steps
