"""What the tests of this folder compare with: the same steps in a loop of one's own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import layerwise as lw

MEMBERS: dict[str, dict[str, Any]] = {
    "KFAC": {"refresh_every": 4, "factor_every": 2},
    "EKFAC": {"refresh_every": 4},
    "FOOF": {"refresh_every": 4},
    "LocoProp": {},
    "NGD": {"lr": 0.1},
    "Shampoo": {"refresh_every": 4},
    "SOAP": {"refresh_every": 4},
    "Muon": {},
    "SGD": {"momentum": 0.9},
}
"""With cycles of refreshes that no test's checkpoint is at the end of."""
SHORT = ("KFAC", "SOAP")
"""One that looks at activations and one that looks at gradients alone."""
EXACT = {"likelihood": "categorical", "estimator": "exact"}
"""Labels that are drawn differ from rank to rank and with the number of forwards."""
WITH_LABELS = ("KFAC", "EKFAC", "NGD")
FROM_GRADIENTS = ("Shampoo", "SOAP", "Muon", "SGD")
"""Members that take parameters or groups of them, as torch's optimizers do."""

BATCH, CLIP = 8, 0.5
"""The norm that gradients are clipped to: below that of every batch, so that clipping is seen."""

Make = Callable[..., torch.optim.Optimizer]


def member(name: str) -> Make:
    """A constructor with the settings above."""
    return lambda given, **options: getattr(lw.optim, name)(given, **{"lr": 0.02, **MEMBERS[name], **options})


def undrawn(name: str) -> Make:
    """The same without drawn labels."""
    return lambda given, **options: member(name)(given, **(EXACT if name in WITH_LABELS else {}), **options)


def net() -> nn.Sequential:
    """Odd sizes, two layers of one shape."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))


def data(steps: int) -> tuple[Tensor, Tensor]:
    """Of `steps` batches."""
    draw = torch.Generator().manual_seed(1)
    return torch.randn(steps * BATCH, 5, generator=draw), torch.randint(3, (steps * BATCH,), generator=draw)


def batch(step: int, steps: int) -> tuple[Tensor, Tensor]:
    x, y = data(steps)
    own = slice(step * BATCH, (step + 1) * BATCH)
    return x[own], y[own]


def loss_of(model: Callable[[Tensor], Tensor], of_batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(of_batch[0]), of_batch[1])


def warmup(opt: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LinearLR(opt, 0.25, 1.0, total_iters=6)


def plain_loop(
    make: Make, steps: int, accumulate: int = 1, clip: float | None = CLIP, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """A loop as the manual of torch has it."""
    model = net().to(dtype)
    opt = make(model)
    schedule = warmup(opt)
    for step in range(steps):
        x, y = batch(step, steps)
        (loss_of(model, (x.to(dtype), y)) / accumulate).backward()
        if (step + 1) % accumulate == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            schedule.step()
            opt.zero_grad()
    return model


def assert_same_weights(model: nn.Module, expected: nn.Module) -> None:
    """Bit for bit, names left out: a framework may have wrapped the model."""
    pairs = list(zip(model.parameters(), expected.parameters(), strict=True))
    assert all(torch.equal(p, q) for p, q in pairs), max(float((p - q).abs().max()) for p, q in pairs)


def assert_has_moved(model: nn.Module) -> None:
    """Every weight, so that equal runs are not two that did nothing."""
    pairs = zip(model.parameters(), net().parameters(), strict=True)
    assert all(not torch.equal(p, q.to(p.dtype)) for p, q in pairs)
