"""What ``print(opt)`` says of momentum, and ``opt.health()`` of clips and floors."""

import pytest
import torch
from optim_tools import batches, cross_entropy, gaussian, mlp, train_step
from torch import nn

import layerwise as lw

pytestmark = pytest.mark.usefixtures("untyped")
DATA = batches(6, 5)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda m: lw.optim.Muon(m, momentum=0.8), "momentum=0.8, nesterov=True"),
        (lambda m: lw.optim.Muon(m, momentum=0.8, nesterov=False), "momentum=0.8, weight_decay"),
        (lambda m: lw.optim.Adam(m, betas=(0.7, 0.99)), "betas=(0.7, 0.99), weight_decay"),
        (lambda m: lw.optim.SOAP(m, betas=(0.7, 0.99)), "betas=(0.7, 0.99), weight_decay"),
        (lambda m: lw.optim.SOAP(m, momentum=0.5), "momentum=0.5"),
        (lambda m: lw.optim.KFAC(m, momentum=0.6), "momentum=0.6"),
    ],
)
def test_the_momentum_that_is_shown_is_the_one_that_acts(make, said: str):
    assert said in repr(make(mlp())).splitlines()[0]


@pytest.mark.parametrize(
    ("member", "option"), [(lw.optim.KFAC, "momentum"), (lw.optim.Muon, "momentum"), (lw.optim.SOAP, "betas")]
)
def test_every_group_shows_its_own(member, option: str):
    other = 0.25 if option == "momentum" else (0.25, 0.9)
    opt = member(mlp(), overrides={"4": {option: other, "lr": 0.5}})
    lines = [line for line in repr(opt).splitlines() if line.startswith("  group")]
    assert f"{option}={opt.param_groups[0][option]}" in lines[0]
    assert f"{option}={other}" in lines[1]
    assert "lr=0.5" in lines[1]
    assert "4.weight, 4.bias" in lines[1]
    opt.param_groups[0][option] = other  # as a scheduler does
    assert f"{option}={other}" in repr(opt).splitlines()[1]


@pytest.mark.parametrize("clip", [1e-6, 1e6, ("norm", 1e-6), ("norm", 1e6), None])
def test_clipped_steps_are_counted(clip):
    model = mlp()
    opt = lw.optim.KFAC(model, lr=0.01, clip=clip)
    for batch in DATA:
        train_step(model, opt, batch, cross_entropy)
    bound = clip[1] if isinstance(clip, tuple) else clip
    assert opt.health().clipped_steps == (len(DATA) if bound == 1e-6 else 0)


def test_floors_are_counted():
    """A layer with a constant unit in its input has directions without any signal; one with rich gradients has none."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Linear(6, 4, bias=False).double()
    for rank, floored in ((4, False), (1, True)):
        opt = lw.optim.SOAP(model, lr=1e-3)
        for t in range(4):
            opt.zero_grad()
            left, right = gaussian(4, rank, seed=1), gaussian(rank, 6, seed=2)  # the same space at every step
            model.weight.grad = left @ gaussian(rank, rank, seed=t + 5) @ right if rank == 1 else gaussian(4, 6, seed=t)
            opt.step()
        assert (opt.health().floored_layers > 0) == floored
