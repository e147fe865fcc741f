"""Checkpoints on a GPU: no stack is unpacked whole, and deferred examples are not lost."""

import copy

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.optim.cuda import executor
from layerwise.optim.cuda.deferred_examples import PENDING
from layerwise.optim.cuda.triton import products as triton_products

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and triton_products.available(torch.device("cuda"))),
        reason="needs triton and a GPU of capability 8.0; run `make test-gpu` on one",
    ),
]
EVERY = 4


def net(width: int, layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh()))).cuda()


def train(opt: torch.optim.Optimizer, model: nn.Sequential, start: int, stop: int) -> None:
    width = model.get_parameter("0.weight").shape[1]
    for step in range(start, stop):
        g = torch.Generator("cuda").manual_seed(step)
        x, y = (torch.randn(64, width, device="cuda", generator=g) for _ in range(2))
        opt.zero_grad()
        (model(x) - y).square().sum(-1).mean().backward()
        opt.step()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", ["KFAC", "Shampoo"])
def test_a_state_is_saved_layer_by_layer(name: str):
    """Beside what is saved there is room for a few matrices of one layer; of all ten it would be 170 MB and more."""
    model = net(1024, 10)
    opt = getattr(lw.optim, name)(model, lr=1e-3, cuda_graphs=False, scale="formula")
    train(opt, model, 0, 2)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    saved = opt.state_dict()
    transient = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    assert saved["state"]
    assert transient < 6 * 4 * 1040**2


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_a_resumed_run_takes_the_same_steps(cuda_graphs: bool, monkeypatch: pytest.MonkeyPatch):
    """EKFAC's examples of four steps, saved when those of some layers are pending: as without a break, to rounding."""
    monkeypatch.setattr(executor, "LAUNCHES", 0.0)  # turns as of large layers
    options = {"lr": 0.01, "factor_every": EVERY, "refresh_every": EVERY, "cuda_graphs": cuda_graphs}
    model = net(64, 6)
    opt = lw.optim.EKFAC(model, **options, scale="formula")
    train(opt, model, 0, EVERY + 1)
    assert any(stack.memory.get(PENDING) for stack in opt._stacks or [])
    other_model, start = copy.deepcopy(model), flat(model)
    other = lw.optim.EKFAC(other_model, **options, scale="formula")
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    for each, its in ((opt, model), (other, other_model)):
        train(each, its, EVERY + 1, 3 * EVERY)
    way = float((flat(model) - start).norm())
    assert way > 0
    assert float((flat(other_model) - flat(model)).norm()) < 1e-2 * way
