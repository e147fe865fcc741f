"""Deferred statistics on a GPU: by default where labels are drawn, with the same steps as at once."""

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.optim.cuda import executor
from layerwise.optim.cuda.deferred_statistics import PENDING
from layerwise.optim.cuda.triton import products as triton_products

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and triton_products.available(torch.device("cuda"))),
        reason="needs triton and a GPU of capability 8.0; run `make test-gpu` on one",
    ),
]
WIDTH, LAYERS, EVERY = 128, 6, 4


def run(member: str, cuda_graphs: bool, **options) -> tuple[list[Tensor], int]:
    """Weights after two batches and a half, and how many parts of the last one are pending."""
    torch.manual_seed(0)
    hidden = [part for _ in range(LAYERS) for part in (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(nn.Linear(32, WIDTH), *hidden, nn.Linear(WIDTH, 16)).cuda()
    options = {"factor_every": EVERY, "refresh_every": EVERY, "likelihood": "categorical"} | options
    opt = getattr(lw.optim, member)(model, lr=0.02, cuda_graphs=cuda_graphs, **options, scale="formula")
    for step in range(3 * EVERY + 2):
        g = torch.Generator("cuda").manual_seed(step)
        x, y = torch.randn(64, 32, device="cuda", generator=g), torch.arange(64, device="cuda") % 16
        opt.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            f = model(x)
        nn.functional.cross_entropy(f.float(), y).backward()
        opt.step()
    pending = sum(len(stack.memory.get(PENDING, [])) for stack in opt._stacks)
    assert opt.health().skipped_statistics == 0
    return [p.detach().clone() for p in model.parameters()], pending


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("member", ["KFAC", "EKFAC"])
def test_the_same_steps_as_at_once(member: str, cuda_graphs: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(executor, "LAUNCHES", 0.0)  # turns as of large layers
    found, pending = run(member, cuda_graphs)
    expected, none = run(member, cuda_graphs, statistics_over=1)
    assert pending > 0
    assert none == 0
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_not_by_itself_where_labels_are_the_batch_s():
    assert run("KFAC", False, estimator="empirical")[1] == 0
