"""Members that look at gradients alone take parameters as torch's optimizers do; the others ask for the model."""

import copy
import pickle
from typing import Any

import pytest
import torch
from optim_tools import batches, convnet, cross_entropy, flat, gaussian, labels, mlp, train_step
from torch import nn

import layerwise as lw
from layerwise.foundations.errors import InputError

pytestmark = pytest.mark.usefixtures("untyped")
DATA = batches(8, 5)
GRADIENT_ONLY: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "Adam": {"lr": 0.01},
    "Sign": {"lr": 0.01},
    "Shampoo": {"lr": 0.01, "refresh_every": 2},
    "SOAP": {"lr": 0.01, "refresh_every": 2},
    "Muon": {"lr": 0.01, "orthogonalize": "polar"},
    "MahalanobisSpectral": {"lr": 0.01, "left": "gradient", "right": "gradient", "refresh_every": 2},
    "Layerwise": {"lr": 0.01, "left": "gradient", "right": "gradient", "power": 0.5, "separate_bias": True},
}
NEED_A_MODEL = ("KFAC", "EKFAC", "FOOF", "LocoProp", "NGD", "MahalanobisSpectral", "Layerwise")
EVERY = pytest.mark.parametrize("name", GRADIENT_ONLY)


def run(model: nn.Module, opt: torch.optim.Optimizer, start: int = 0, stop: int = 5) -> torch.Tensor:
    for batch in DATA[start:stop]:
        train_step(model, opt, batch, cross_entropy)
    return flat(model)


def make(name: str, given: Any, **options: Any) -> torch.optim.Optimizer:
    if name == "MahalanobisSpectral":
        options = {"separate_bias": True, **options}
    return getattr(lw.optim, name)(given, **{**GRADIENT_ONLY[name], **options})


@EVERY
@pytest.mark.parametrize("how", ["parameters", "named", "list"])
def test_parameters_train_as_the_model_does(name: str, how: str):
    model, other = mlp(), mlp()
    given = {"parameters": other.parameters(), "named": other.named_parameters(), "list": [*other.parameters()]}[how]
    by_model, by_parameters = run(model, make(name, model)), run(other, make(name, given))
    # torch's fused Adam rounds the end of a tensor otherwise than the rest, and a bias may be a column or a tensor
    rtol = 1e-13 if name == "Adam" else 0.0
    torch.testing.assert_close(by_parameters, by_model, rtol=rtol, atol=rtol)


@EVERY
def test_names_beside_the_parameters_of_a_group_are_kept(name: str):
    """As torch's optimizers have them in their groups, and frameworks that key checkpoints by name give them."""
    model = mlp()
    names, params = zip(*model.named_parameters(), strict=True)
    opt = make(name, [{"params": list(params[:2]), "param_names": list(names[:2]), "weight_decay": 0.1}])
    opt.add_param_group({"params": list(params[2:]), "param_names": list(names[2:])})
    assert [group["param_names"] for group in opt.param_groups] == [[*names[:2]], [*names[2:]]]
    run(model, opt)
    assert {key for group in opt.state_dict()["param_groups"] for key in group["param_names"]} == set(names)
    with pytest.raises(InputError, match="a name for each"):
        make(name, [{"params": list(params), "param_names": ["one"]}])


@pytest.mark.parametrize("name", ["Shampoo", "SOAP", "Muon"])
def test_convolutions_are_the_same_matrices(name: str):
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 3)).double()
    other = copy.deepcopy(model)
    one, two = make(name, model), make(name, other.parameters())
    for t in range(4):
        batch = gaussian(6, 2, 4, 4, seed=t), labels(6, seed=t)
        train_step(model, one, batch, cross_entropy)
        train_step(other, two, batch, cross_entropy)
    assert torch.equal(flat(model), flat(other))


@pytest.mark.parametrize(("name", "reference"), [("SGD", torch.optim.SGD), ("Adam", torch.optim.AdamW)])
def test_groups_are_those_of_torch(name: str, reference: type[torch.optim.Optimizer]):
    """Rates and decays of a group are its own, and generators may be given inside."""
    model, other = mlp(), mlp()

    def groups(m: nn.Module) -> list[dict[str, Any]]:
        matrices = (p for p in m.parameters() if p.ndim == 2)
        vectors = [p for p in m.parameters() if p.ndim < 2]
        return [{"params": matrices, "weight_decay": 0.5, "name": "matrices"}, {"params": vectors, "lr": 0.02}]

    ours = getattr(lw.optim, name)(groups(model), lr=0.01)
    theirs = reference(groups(other), lr=0.01, weight_decay=0.0)
    if name == "SGD":  # whose decay is part of the gradient: ours is decoupled
        theirs.param_groups[0]["weight_decay"] = ours.param_groups[0]["weight_decay"] = 0.0
    assert [len(g["params"]) for g in ours.param_groups] == [3, 3]
    assert ours.param_groups[0]["name"] == "matrices"
    assert torch.allclose(run(model, ours), run(other, theirs), rtol=0, atol=1e-12)


@EVERY
def test_schedules_states_copies_and_new_groups(name: str):
    model, other = mlp(), mlp()
    first, second = [*model.parameters()][:4], [*model.parameters()][4:]
    opt = make(name, [{"params": first, "lr": 0.01}])
    run(model, opt, 0, 2)
    opt.add_param_group({"params": second, "lr": 0.02})
    before = [p.detach().clone() for p in second]
    run(model, opt, 2, 4)
    assert all(not torch.equal(p, q) for p, q in zip(second, before, strict=True))
    other.load_state_dict(model.state_dict())
    theirs = [*other.parameters()]
    resumed = make(name, [{"params": theirs[:4]}, {"params": theirs[4:]}])
    resumed.load_state_dict(opt.state_dict())
    third, copied = pickle.loads(pickle.dumps((model, opt)))
    for m, o in ((model, opt), (other, resumed), (third, copied)):
        schedule = torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5)
        for t in range(4, 7):
            run(m, o, t, t + 1)
            schedule.step()
    assert torch.equal(flat(model), flat(other))
    assert torch.equal(flat(model), flat(third))


@EVERY
def test_a_parameter_that_is_frozen_when_given_and_unfrozen_later(name: str):
    model = mlp()
    model[0].requires_grad_(False)
    opt = make(name, model.parameters())
    before = model[0].weight.detach().clone()
    run(model, opt, 0, 3)
    assert torch.equal(model[0].weight, before)
    model[0].requires_grad_(True)
    run(model, opt, 3, 5)
    assert not torch.equal(model[0].weight, before)


def test_a_group_may_have_the_fallback():
    model, other = mlp(), mlp()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    opt = lw.optim.Muon(
        [{"params": matrices[:-1]}, {"params": [matrices[-1], *rest], "update": "fallback", "weight_decay": 0.0}],
        lr=0.01,
        scale="formula",
    )
    adam = torch.optim.Adam([other[4].weight], lr=0.01)
    train_step(model, opt, DATA[0], cross_entropy)
    cross_entropy(other(DATA[0][0]), DATA[0][1]).backward()
    adam.step()
    assert torch.allclose(model[4].weight, other[4].weight, atol=1e-12)
    assert "overrides" in repr(opt)


def test_patterns_of_overrides_match_given_names():
    model = mlp()
    opt = lw.optim.Muon(model.named_parameters(), overrides={"4.*": {"lr": 0.5}})
    assert [g["param_names"] for g in opt.param_groups][1] == ["4.weight", "4.bias"]


@pytest.mark.parametrize("name", NEED_A_MODEL)
@pytest.mark.parametrize("how", ["parameters", "groups"])
def test_the_others_ask_for_the_model(name: str, how: str):
    model = mlp()
    given = model.parameters() if how == "parameters" else [{"params": model.parameters()}]
    with pytest.raises(TypeError, match=rf"Got parameters\. .*Pass the model: lw\.optim\.{name}\(model"):
        getattr(lw.optim, name)(given)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ([], InputError, "no parameters"),
        (iter(()), InputError, "no parameters"),
        (torch.zeros(2, 2), TypeError, "an iterable of parameters"),
        (3, TypeError, "Got a int"),
        ([1, 2], TypeError, "a int among parameters"),
        ([{"params": [torch.zeros(2, 2)], "lr": -1.0}], InputError, "lr=-1"),
        ([{"params": [torch.zeros(2, 2)], "update": "sgd"}], InputError, "update='sgd'"),
        ([("a", torch.zeros(2)), ("a", torch.ones(2))], InputError, "two parameters called 'a'"),
    ],
)
def test_what_cannot_be_trained(given: Any, error: type[Exception], said: str):
    with pytest.raises(error, match=said):
        lw.optim.Muon(given)


def test_groups_and_overrides_exclude_each_other():
    with pytest.raises(InputError, match="Put options in the groups"):
        lw.optim.Muon([{"params": mlp().parameters(), "lr": 0.1}], overrides={"*": {"lr": 0.1}})


def test_the_report_names_matrices_and_vectors():
    shown = repr(lw.optim.Muon(convnet().parameters()))
    assert "1 × 4 × 18" in shown
    assert "a vector, not a matrix" in shown
