"""Steps captured as CUDA graphs: the same as steps that are not, without a word from the device."""

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import layerwise as lw
from layerwise.optim.cuda.executor import AsynchronousExecutor
from layerwise.optim.cuda.graphs import Graphs
from layerwise.optim.engine import Layerwise
from waiting import nothing_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MEMBERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Muon": ("Muon", {}),
    "KFAC": ("KFAC", {"refresh_every": 4, "factor_every": 2, "clip": 1e-3}),
    "KFAC grafted": ("KFAC", {"refresh_every": 4, "factor_every": 4, "graft": "adam", "nesterov": True}),
    "KFAC sampled": ("KFAC", {"refresh_every": 4, "factor_every": 4, "likelihood": "categorical"}),
    "EKFAC running": ("EKFAC", {"refresh_every": 4, "factor_every": 4, "scaling": "running"}),
    "EKFAC": ("EKFAC", {"refresh_every": 4, "factor_every": 4, "scaling": "batch"}),
    "FOOF": ("FOOF", {"refresh_every": 4}),
    "Shampoo": ("Shampoo", {"refresh_every": 4, "factor_every": 2}),
    "SOAP": ("SOAP", {"refresh_every": 4}),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    parts: list[nn.Module] = [nn.Embedding(11, 64)]
    for _ in range(3):
        parts += [nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*parts, nn.Linear(64, 7)).cuda()


def trained(name: str, cuda_graphs: bool, steps: int = 24, broken: int | None = None) -> tuple[nn.Module, Layerwise]:
    member, options = MEMBERS[name]
    model, generator = net(), torch.Generator("cuda").manual_seed(1)
    opt = getattr(lw.optim, member)(
        model, lr=1e-3, weight_decay=0.1, cuda_graphs=cuda_graphs, loss_average="tokens", **options, scale="formula"
    )
    x = torch.randint(11, (16, 8), device="cuda", generator=generator)
    y = torch.randint(7, (16, 8), device="cuda", generator=generator)
    for step in range(steps):
        for group in opt.param_groups:
            group["lr"] = 1e-3 / (1 + 0.1 * step)
        with nothing_waits() if step > steps // 2 else nullcontext():
            opt.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                f = model(x)
            F.cross_entropy(f.float().flatten(0, 1), y.flatten()).backward()
            if step == broken:
                next(model.parameters()).grad.mul_(float("nan"))  # type: ignore[union-attr]
            opt.step()
    return model, opt


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", MEMBERS)
def test_captured_steps_are_the_same(name: str):
    expected, _ = trained(name, cuda_graphs=False)
    found, opt = trained(name, cuda_graphs=True)
    executor = opt._executor
    assert isinstance(executor, AsynchronousExecutor)
    step = executor.captured
    assert step._gathering._captured, step._gathering.failed
    assert step._descending._captured, step._descending.failed
    way = float((flat(expected) - flat(net())).norm())
    # The same operations in the same order; what atomics add up (embeddings' gradients) may differ in the last bits.
    assert float((flat(found) - flat(expected)).norm()) <= 1e-2 * way
    assert opt.health().skipped_steps == 0


def test_a_gradient_that_is_not_finite_changes_nothing():
    found, opt = trained("SOAP", cuda_graphs=True, broken=20)
    assert bool(torch.isfinite(flat(found)).all())
    assert opt.health().skipped_steps == 1


def test_graphs_that_nobody_needs_any_more_do_not_end_a_capture():
    """An optimizer in a cycle dies when Python looks for cycles: not while another one's step is captured."""
    device, x = torch.device("cuda"), torch.zeros(3, device="cuda")
    dead = Graphs()

    def zeros() -> None:
        x.fill_(0)

    for _ in range(3):
        dead.run("key", zeros, device)
    assert dead._captured
    cycle: list[object] = [dead]
    cycle.append(cycle)

    def call() -> None:
        for _ in range(10):
            x.add_(float(len([object() for _ in range(100)])))

    found, often = Graphs(), gc.get_threshold()
    found.run("key", call, device)
    gc.set_threshold(1)
    del dead, cycle
    try:
        kinds = [found.run("key", call, device) for _ in range(2)]
    finally:
        gc.set_threshold(*often)
    assert not found.failed
    assert kinds == [True, True]
    assert x.tolist() == [3000.0] * 3
