"""Replayed steps are the steps themselves: on a CPU they are called, on a GPU recorded, by shape and by key."""

import pytest
import torch
from torch import nn

from layerwise.foundations import replay
from layerwise.foundations.replay import Replayed


def trained(device, recorded):
    """SGD with momentum, the last batch of each epoch smaller, the rate changed on the way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double().to(device)
    x, y = torch.randn(50, 5).double().to(device), torch.arange(50).remainder(3).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(batch):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()

    replayed = Replayed(step)
    if not recorded:
        replayed.fault = "not wanted"
    for epoch in range(12):
        rate = 0.1 if epoch < 6 else 0.02
        for group in optimizer.param_groups:
            group["lr"] = rate
        for batch in torch.randperm(50, generator=torch.Generator().manual_seed(epoch)).to(device).split(20):
            replayed(batch, key=rate)
    return replayed, [p.detach().cpu() for p in model.parameters()]


def test_the_weights_are_those_of_plain_steps(device):
    (_, plain), (replayed, found) = trained(device, False), trained(device, True)
    assert replayed.fault is None
    assert len(replayed._recorded) == (4 if device == "cuda" else 0)  # two shapes, two rates
    for a, b in zip(plain, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


def test_what_cannot_be_recorded_is_called(device):
    total, seen = torch.zeros((), device=device), []

    def looks(x):
        seen.append(float(x))
        total.add_(x)

    step = Replayed(looks)
    for k in range(replay.FIRST + 3):
        step(torch.tensor(float(k), device=device))
    assert float(total) == sum(range(replay.FIRST + 3))
    assert [k for k in seen if k in range(replay.FIRST)] == list(range(replay.FIRST))
    assert (step.fault is not None) == (device == "cuda")


def test_another_error_of_the_function_is_not_hidden():
    def wrong(x):
        raise ValueError("not of this shape")

    with pytest.raises(ValueError, match="not of this shape"):
        Replayed(wrong)(torch.zeros(1))
