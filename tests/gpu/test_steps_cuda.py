"""Shampoo and SOAP with gradients of full rank: a GPU goes where a CPU goes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run `make test-gpu` on one"),
]
MEMBERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Shampoo": lambda m, **k: lw.optim.Shampoo(m, lr=3e-3, graft="adam", weight_decay=0.01, **k, scale="formula"),
    "SOAP": lambda m, **k: lw.optim.SOAP(m, lr=3e-3, **k, scale="formula"),
}


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def square_layers(device: str) -> nn.Module:
    """Two of one shape; sizes that are padded on a GPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.ModuleList(nn.Linear(n, n, bias=False) for n in (72, 72, 40)).to(device)


def separated_gradients(model: nn.Module, step: int) -> list[Tensor]:
    """Singular values from 1 to 1/10, apart from one another, and 1 % of noise at each step."""
    found = []
    for place, p in enumerate(model.parameters()):
        same, new = (torch.Generator().manual_seed(seed) for seed in (place, 100 * step + 100 + place))
        U, V = (torch.linalg.qr(torch.randn(p.shape, generator=same, dtype=torch.float64)).Q for _ in range(2))
        values = torch.logspace(0, -1, len(p), dtype=torch.float64)
        found.append(((U * values) @ V.mT + 0.01 * torch.randn(p.shape, generator=new, dtype=torch.float64)).float())
    return found


@pytest.mark.parametrize("solvers", [("eigh", "eigh"), ("products", "auto")], ids=["eigh", "products"])
@pytest.mark.parametrize("name", ["Shampoo", "SOAP"])
def test_with_given_gradients_a_gpu_takes_the_steps_of_a_cpu(name: str, solvers: tuple[str, str]):
    """Five steps in float32, refreshed at each, on the GPU with "auto", which takes products there.

    Elsewhere factors of a few gradients have null spaces, of which any basis will do: SOAP's steps depend on it, and so
    do Shampoo's by products. Here, on a CPU, gradients changed by 1e-6 change the way gone by 4e-3 (SOAP) or 3e-4. By
    products the bases are rounded to float16, each run's in its own way: a signal of 1 then leaks 2⁻¹² or so into
    directions that hold 1e-2 of noise and weigh as much, and gradients changed by 1e-7 change SOAP's way by 4e-2.
    """
    ends = []
    for device, solver in zip(("cpu", "cuda"), solvers, strict=True):
        model = square_layers(device)
        opt = MEMBERS[name](model, refresh_every=1, solver=solver)
        for step in range(5):
            for p, grad in zip(model.parameters(), separated_gradients(model, step), strict=True):
                p.grad = grad.to(device)
            opt.step()
        ends.append(flat(model).cpu())
    way = float((ends[0] - flat(square_layers("cpu"))).norm())
    rounded = 6e-2 if "products" in solvers else 2e-2
    assert float((ends[1] - ends[0]).norm()) < (rounded if name == "SOAP" else 5e-3) * way
