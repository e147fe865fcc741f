"""Options of some layers or parameters: obeyed by those alone, checked, and kept under schedules."""

import math
from typing import Any

import pytest
import torch
from optim_tools import MEMBERS, batches, cross_entropy, flat, member, mlp, train_step
from torch import nn

import layerwise as lw
from layerwise.foundations.errors import InputError
from thinning import mostly_slow

pytestmark = pytest.mark.usefixtures("untyped")
DATA = batches(8, 5)
KINDS = ("Adam", "KFAC", "EKFAC running", "NGD", "SOAP", "Muon")
EVERY_KIND = pytest.mark.parametrize("name", mostly_slow(MEMBERS, KINDS))
NO_DECAY = {"*.bias": {"weight_decay": 0.0}}


def run(model: nn.Module, opt: torch.optim.Optimizer, start: int, stop: int) -> torch.Tensor:
    for batch in DATA[start:stop]:
        train_step(model, opt, batch, cross_entropy)
    return flat(model)


def biased(seed: int = 0) -> nn.Module:
    model = mlp(seed=seed)
    with torch.no_grad():
        for layer in (model[0], model[2], model[4]):
            layer.bias.fill_(1.0)
    return model


@EVERY_KIND
def test_biases_without_decay_leave_it_to_the_weights(name: str):
    """One step: the weights are those of decay everywhere, the biases those of decay nowhere."""
    found = {}
    for case, options in {
        "all": {"weight_decay": 0.5},
        "none": {"weight_decay": 0.0},
        "weights": {"weight_decay": 0.5, "overrides": NO_DECAY},
    }.items():
        model = biased()
        opt = member(name, model, lr=0.1, **options)
        run(model, opt, 0, 1)
        found[case] = dict(model.named_parameters())
    for key, p in found["weights"].items():
        same, other = ("none", "all") if key.endswith("bias") else ("all", "none")
        assert torch.equal(p, found[same][key]), key
        assert not torch.allclose(p, found[other][key], atol=1e-3), key


@EVERY_KIND
def test_a_bias_may_have_its_own_rate(name: str):
    found = {}
    for case, options in {"fast": {"lr": 0.1}, "mixed": {"lr": 0.1, "overrides": {"*.bias": {"lr": 0.0}}}}.items():
        model = biased()
        opt = member(name, model, weight_decay=0.0, **options)
        run(model, opt, 0, 2 if name == "SOAP" else 1)
        found[case] = dict(model.named_parameters())
    for key, p in found["mixed"].items():
        if key.endswith("bias"):
            assert torch.equal(p, torch.ones_like(p))
        elif name != "SOAP":  # which has taken two steps: the second is that of other biases
            assert torch.equal(p, found["fast"][key])


def test_parts_of_a_layer_resume_bit_for_bit():
    model, other = biased(), biased(seed=1)
    options = {"lr": 0.05, "weight_decay": 0.5, "overrides": NO_DECAY}
    opt, resumed = lw.optim.KFAC(model, **options), lw.optim.KFAC(other, **options)
    run(model, opt, 0, 4)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(opt.state_dict())
    assert torch.equal(run(model, opt, 4, 7), run(other, resumed, 4, 7))
    assert [len(g["params"]) for g in opt.param_groups] == [3, 3]


@pytest.mark.parametrize("options", [{"momentum": 0.5}, {"update": "fallback"}, {"damping": 1.0}])
def test_what_a_column_cannot_have_alone(options: dict[str, Any]):
    with pytest.raises(InputError, match=r"part of layer '0'.*separate_bias=True"):
        lw.optim.KFAC(mlp(), separate_bias=False, overrides={"*.bias": options})
    lw.optim.KFAC(mlp(), overrides={"*.bias": options})


def test_norm_layers_may_have_the_fallback_in_part():
    """Their vectors get it anyway."""
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)).double()
    opt = lw.optim.Muon(model, overrides={"*.bias": {"update": "fallback", "weight_decay": 0.0}})
    assert torch.isfinite(run(model, opt, 0, 2)).all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": math.nan}, "lr=nan"),
        ({"lr": -1.0}, "lr=-1"),
        ({"lr": "fast"}, "lr='fast'"),
        ({"lr": None}, "lr=None"),
        ({"momentum": 1.0}, "momentum=1"),
        ({"momentum": math.nan}, "momentum=nan"),
        ({"weight_decay": -1}, "weight_decay=-1"),
        ({"weight_decay": math.inf}, "weight_decay=inf"),
        ({"damping": math.nan}, "damping=nan"),
        ({"damping": -1.0}, "damping=-1"),
        ({"factor_decay": 1.5}, "factor_decay=1.5"),
        ({"nesterov": "yes"}, "nesterov='yes'"),
        ({"update": "sgd"}, "update='sgd'"),
        ({"betas": (0.9, 0.99)}, "'betas'"),
        (3, "a dictionary"),
    ],
)
def test_values_are_checked(options: Any, said: str):
    with pytest.raises(InputError, match=said):
        lw.optim.KFAC(mlp(), overrides={"4": options})


@pytest.mark.parametrize(("given", "said"), [(math.nan, "fallback_lr=nan"), (-1.0, "fallback_lr=-1")])
def test_a_fallback_rate_is_checked(given: float, said: str):
    with pytest.raises(InputError, match=said):
        lw.optim.KFAC(mlp(), fallback_lr=given)


# --- schedules ----------------------------------------------------------------------------------------------


def test_a_damping_of_its_own_keeps_its_proportion_under_a_schedule():
    """``overrides`` under ``damping=function``: twice the damping is that of a schedule twice as large."""
    model, other = mlp(), mlp()
    one = lw.optim.KFAC(model, lr=0.05, damping=lambda t: 1.0 / t, overrides={"*": {"damping": 2.0}}, clip=None)
    two = lw.optim.KFAC(other, lr=0.05, damping=lambda t: 2.0 / t, clip=None)
    assert torch.equal(run(model, one, 0, 5), run(other, two, 0, 5))


@pytest.mark.parametrize("kind", [float, lambda lr: torch.tensor(lr, dtype=torch.float64)])
def test_the_fallback_rate_follows_the_schedule(kind: Any):
    """A tensor is scheduled in place: the rate that it is compared with must not move along."""
    model, other = mlp(), mlp()
    one = lw.optim.Muon(model, lr=kind(0.04), fallback_lr=0.01, weight_decay=0.0)
    two = lw.optim.Muon(other, lr=0.04, weight_decay=0.0, overrides={"*.bias": {"lr": 0.01}})
    schedules = [torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5) for opt in (one, two)]
    for t in range(5):
        run(model, one, t, t + 1)
        run(other, two, t, t + 1)
        for schedule in schedules:
            schedule.step()
    assert torch.allclose(flat(model), flat(other), rtol=0, atol=1e-14)


def test_the_fallback_rate_of_a_resumed_run():
    """The proportion is part of the state, whatever rate the new optimizer was built with."""
    model, other = mlp(), mlp(seed=1)
    opt = lw.optim.Muon(model, lr=0.04, fallback_lr=0.01)
    run(model, opt, 0, 3)
    other.load_state_dict(model.state_dict())
    resumed = lw.optim.Muon(other, lr=0.123, fallback_lr=0.5)
    resumed.load_state_dict(opt.state_dict())
    assert torch.equal(run(model, opt, 3, 6), run(other, resumed, 3, 6))


def test_an_override_of_a_rate_is_that_rate():
    """Also for a layer that the fallback updates."""
    model, other = mlp(), mlp()
    options = {"4": {"lr": 0.02, "update": "fallback"}}
    opt = lw.optim.KFAC(model, lr=0.5, fallback_lr=0.1, clip=None, overrides=options, scale="formula")
    adam = torch.optim.Adam(other[4].parameters(), lr=0.02)
    train_step(model, opt, DATA[0], cross_entropy)
    cross_entropy(other(DATA[0][0]), DATA[0][1]).backward()
    adam.step()
    assert torch.allclose(model[4].weight, other[4].weight, atol=1e-12)
