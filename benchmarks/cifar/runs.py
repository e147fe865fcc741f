"""One run: some epochs of a member at one setting, with the accuracy after each."""

import contextlib
import statistics
import time
from dataclasses import asdict, dataclass, field

import torch
import torch.nn.functional as F
from measure import reason, synchronize
from torch import Tensor, nn

from cifar.images import Images
from cifar.members import MEMBERS
from cifar.network import Network

SMOOTHING = 0.2
RISING = 0.2
"""Part of the run in which the rate rises to its value, before it falls to zero."""


@dataclass
class Run:
    """What one run gave. Seconds begin with the construction of the optimizer; evaluations do not count."""

    member: str
    rate: float
    decay: float
    seed: int
    accuracies: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """After each epoch."""
    host: float = 0.0
    """Median milliseconds of `step()` on the host."""
    note: str = ""

    @property
    def last(self) -> float:
        return self.accuracies[-1] if self.accuracies else 0.0

    def epochs_to(self, accuracy: float) -> int | None:
        """The first epoch after which the accuracy is reached."""
        return next((n for n, found in enumerate(self.accuracies, 1) if found >= accuracy), None)

    def record(self) -> dict:
        rounded = {"seconds": [round(s, 3) for s in self.seconds], "host": round(self.host, 3)}
        return asdict(self) | rounded


@dataclass(frozen=True)
class Race:
    """What all runs share."""

    images: Images
    epochs: int
    batch: int
    widths: tuple[int, ...]

    @property
    def device(self) -> str:
        return self.images.device

    def autocast(self) -> contextlib.AbstractContextManager:
        cuda = self.device.startswith("cuda")
        return torch.autocast("cuda", torch.bfloat16) if cuda else contextlib.nullcontext()

    def model(self, seed: int) -> nn.Module:
        """The same weights for every member."""
        torch.manual_seed(seed)
        model = Network(self.images.first, self.widths).to(self.device)
        return model.to(memory_format=torch.channels_last).train()  # pyright: ignore[reportCallIssue]

    def factor(self, step: int) -> float:
        """Of the rate at a step, from 0: a line up, a line down."""
        steps = self.epochs * (self.images.count // self.batch)
        along = (step + 1) / (steps + 1)
        return min(along / RISING, (1 - along) / (1 - RISING))


def run(race: Race, member: str, rate: float, decay: float, seed: int) -> Run:
    found = Run(member, rate, decay, seed)
    try:
        _run(race, found)
    except Exception as error:  # a member may fail in any way at all; the table says how
        found.note = f"fails: {reason(error)}"
    return found


def _run(race: Race, found: Run) -> None:
    model = race.model(found.seed)
    stream = torch.Generator(race.device).manual_seed(found.seed)
    host: list[float] = []
    synchronize(race.device)
    start, spent = time.perf_counter(), 0.0
    opt = MEMBERS[found.member].make(model, found.rate, found.decay)
    rates = [(group, float(group["lr"])) for group in opt.param_groups]
    for _ in range(race.epochs):
        for x, y in race.images.epoch(race.batch, stream):
            for group, rate in rates:
                group["lr"] = rate * race.factor(len(host))
            opt.zero_grad()
            with race.autocast():
                loss = F.cross_entropy(model(x), y, label_smoothing=SMOOTHING)
            loss.backward()
            before = time.perf_counter()
            opt.step()
            host.append(1e3 * (time.perf_counter() - before))
        synchronize(race.device)
        spent += time.perf_counter() - start
        found.seconds.append(spent)
        found.accuracies.append(accuracy(race, model))
        start = time.perf_counter()
    found.host = statistics.median(host)


@torch.no_grad()
def accuracy(race: Race, model: nn.Module) -> float:
    """On the test images, each seen with its mirror image."""
    model.eval()

    def logits(x: Tensor) -> Tensor:
        with race.autocast():
            return model(x) + model(x.flip(3))

    right = [
        (logits(x).argmax(1) == y).sum()
        for x, y in zip(race.images.test.split(2000), race.images.y_test.split(2000), strict=True)
    ]
    model.train()
    return round(float(torch.stack(right).sum()) / len(race.images.y_test), 5)
