"""What PyTorch expects of every optimizer: state, copies, groups, schedulers, closures, hooks."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from optim_tools import MEMBERS, batches, cross_entropy, flat, member, mlp, train_step
from torch import nn

import layerwise as lw
from layerwise.foundations.errors import InputError
from thinning import mostly_slow, thinned

pytestmark = pytest.mark.usefixtures("untyped")
DATA = batches(14, 5)
EVERY = pytest.mark.parametrize("name", MEMBERS)
KINDS = ("Adam", "KFAC sampled", "EKFAC running", "LocoProp", "NGD", "SOAP", "Muon")
"""One for each kind of state and of update: enough for what the engine does for all of them alike."""
EVERY_KIND = pytest.mark.parametrize("name", mostly_slow(MEMBERS, KINDS))


def run(model: nn.Module, opt: torch.optim.Optimizer, start: int, stop: int) -> torch.Tensor:
    for batch in DATA[start:stop]:
        train_step(model, opt, batch, cross_entropy)
    return flat(model)


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# --- state ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kept"), thinned(MEMBERS, ["in memory", "in a file"]))
def test_training_resumes_bit_for_bit(name: str, kept: str):
    model = mlp()
    opt = member(name, model)
    run(model, opt, 0, 5)
    other = mlp(seed=1)
    other.load_state_dict(model.state_dict())
    resumed = member(name, other, lr=0.123)
    state = opt.state_dict()
    resumed.load_state_dict(through_a_file(state) if kept == "in a file" else copy.deepcopy(state))
    assert torch.equal(run(model, opt, 5, 12), run(other, resumed, 5, 12))


@EVERY
def test_loading_into_an_optimizer_that_has_run(name: str):
    model, other = mlp(), mlp(seed=1)
    opt, resumed = member(name, model), member(name, other)
    run(other, resumed, 0, 3)
    run(model, opt, 0, 5)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(opt.state_dict())
    assert torch.equal(run(model, opt, 5, 12), run(other, resumed, 5, 12))


@EVERY_KIND
def test_saving_changes_nothing(name: str):
    model, other = mlp(), mlp()
    opt, saved = member(name, model), member(name, other)
    for t in range(6):
        run(model, opt, t, t + 1)
        run(other, saved, t, t + 1)
        saved.state_dict()
    assert torch.equal(flat(model), flat(other))


@EVERY
def test_a_state_loaded_and_saved_again_is_the_same(name: str):
    model = mlp()
    opt = member(name, model)
    run(model, opt, 0, 4)
    state = opt.state_dict()
    fresh = member(name, mlp())
    fresh.load_state_dict(state)
    again = fresh.state_dict()
    assert again["engine"] == state["engine"]
    assert again["state"].keys() == state["state"].keys()
    for key, of_param in state["state"].items():
        for layer, tensors in of_param.items():
            assert tensors.keys() == again["state"][key][layer].keys()
            assert all(torch.equal(t, again["state"][key][layer][k]) for k, t in tensors.items())


@EVERY
def test_a_state_of_another_precision_is_converted(name: str):
    model = mlp()
    opt = member(name, model, **({"lr": 1e-4} if name == "MahalanobisSpectral" else {}))
    run(model, opt, 0, 5)
    single = copy.deepcopy(model).float()
    other = member(name, single)
    other.load_state_dict(opt.state_dict())
    for x, y in DATA[5:8]:
        train_step(model, opt, (x, y), cross_entropy)
        train_step(single, other, (x.float(), y), cross_entropy)
    for of_param in other.state_dict()["state"].values():
        for tensors in of_param.values():
            assert all(t.dtype == torch.float32 for t in tensors.values() if t.is_floating_point())
    # one refresh of an eigenbasis in single precision may turn it: a coarse bound for all
    assert (flat(model) - flat(single)).abs().max() < 0.05
    assert torch.isfinite(flat(single)).all()


def factors_of(opt: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    found = {layer: t for of_param in opt.state_dict()["state"].values() for layer, t in of_param.items()}
    return {layer: {k: t[k] for k in ("P", "Q") if k in t} for layer, t in found.items()}


@pytest.mark.parametrize(
    ("first", "second"),
    [("KFAC", "EKFAC"), ("EKFAC", "KFAC"), ("EKFAC running", "KFAC exact split"), ("KFAC", "MahalanobisSpectral")],
)
def test_curvature_members_take_each_others_statistics(first: str, second: str):
    """The factors after one more step are those of the first member going on."""
    model = mlp()
    opt = member(first, model)
    run(model, opt, 0, 6)
    other = copy.deepcopy(model)
    taking = member(second, other)
    taking.load_state_dict(opt.state_dict())
    run(model, opt, 6, 7)
    run(other, taking, 6, 7)
    expected, found = factors_of(opt), factors_of(taking)
    assert found.keys() == expected.keys()
    for layer in expected:
        for side in ("P", "Q"):
            assert torch.allclose(found[layer][side], expected[layer][side], rtol=1e-12)
    assert torch.isfinite(run(other, taking, 7, 10)).all()


@pytest.mark.parametrize(("first", "second"), [("Shampoo", "SOAP"), ("SOAP", "Shampoo")])
def test_shampoo_and_soap_take_each_others_statistics(first: str, second: str):
    """The factor after one more step is a sum of what was taken over and the new ``∇L ∇Lᵀ``, most of it the former."""
    model = mlp()
    opt = member(first, model)
    run(model, opt, 0, 8)
    taken = factors_of(opt)
    other = copy.deepcopy(model)
    taking = member(second, other)
    taking.load_state_dict(opt.state_dict())
    run(other, taking, 8, 9)
    G = other[4].weight.grad
    found, old, new = factors_of(taking)["4"]["P"].flatten(), taken["4"]["P"].flatten(), (G @ G.mT).flatten()
    weights = torch.linalg.lstsq(torch.stack([old, new], 1), found.unsqueeze(1)).solution.flatten()
    assert (weights[0] * old + weights[1] * new - found).norm() < 1e-9 * found.norm()
    assert weights[0] > 0.5
    assert torch.isfinite(run(other, taking, 9, 12)).all()


def test_a_state_of_torch_is_refused():
    model = mlp()
    torchs = torch.optim.Adam(model.parameters())
    run(model, torchs, 0, 1)
    with pytest.raises(InputError, match=r"a state without .engine.*cannot be loaded"):
        member("KFAC", model).load_state_dict(torchs.state_dict())


def test_a_state_for_other_groups_is_refused():
    opt = lw.optim.KFAC(mlp(), overrides={"4": {"lr": 1.0}}, scale="formula")
    with pytest.raises(ValueError, match="different number of parameter groups"):
        lw.optim.KFAC(mlp(), scale="formula").load_state_dict(opt.state_dict())


# --- copies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "how"), thinned(MEMBERS, [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))]))
def test_a_copy_of_model_and_optimizer_goes_on_alike(name: str, how):
    model = mlp()
    opt = member(name, model)
    run(model, opt, 0, 5)
    other, copied = how((model, opt))
    assert {id(p) for g in copied.param_groups for p in g["params"]} == {id(p) for p in other.parameters()}
    assert torch.equal(run(other, copied, 5, 11), run(model, opt, 5, 11))


@EVERY_KIND
def test_a_copied_model_does_not_feed_the_optimizer(name: str):
    model, alone = mlp(), mlp()
    opt, undisturbed = member(name, model), member(name, alone)
    for t in range(5):
        twin = copy.deepcopy(model)
        cross_entropy(twin(DATA[-1][0]), DATA[-1][1]).backward()
        run(model, opt, t, t + 1)
        run(alone, undisturbed, t, t + 1)
    assert torch.equal(flat(model), flat(alone))


# --- groups -----------------------------------------------------------------------------------------------


@EVERY
def test_overrides_make_parameter_groups(name: str):
    model = mlp()
    before = {k: p.detach().clone() for k, p in model.named_parameters()}
    opt = member(name, model, overrides={"4": {"lr": 0.0}, "0*": {"lr": 0.02, "weight_decay": 0.5}})
    assert [sorted(g["param_names"]) for g in opt.param_groups] == [
        ["2.bias", "2.weight"],
        ["4.bias", "4.weight"],
        ["0.bias", "0.weight"],
    ]
    run(model, opt, 0, 3)
    for key, p in model.named_parameters():
        assert torch.equal(p, before[key]) == key.startswith("4")


def test_an_override_may_choose_the_fallback():
    model, other = mlp(), mlp()
    opt = lw.optim.KFAC(model, lr=0.02, momentum=0.0, overrides={"4": {"update": "fallback"}}, scale="formula")
    adam = torch.optim.Adam(other[4].parameters(), lr=0.02)
    train_step(model, opt, DATA[0], cross_entropy)
    cross_entropy(other(DATA[0][0]), DATA[0][1]).backward()
    adam.step()
    assert torch.allclose(model[4].weight, other[4].weight, atol=1e-12)
    assert "overrides" in repr(opt)


@EVERY_KIND
def test_groups_can_be_changed_between_steps(name: str):
    model = mlp()
    opt = member(name, model)
    run(model, opt, 0, 2)
    for group in opt.param_groups:
        group["lr"] = 0.0
    before = flat(model)
    assert torch.equal(run(model, opt, 2, 4), before)


@pytest.mark.parametrize(("name", "named"), thinned(MEMBERS, [True, False]))
def test_a_layer_that_is_unfrozen_later(name: str, named: bool):
    """It trains from then on, and the statistics of the others stay."""
    model = mlp()
    model[0].requires_grad_(False)
    opt = member(name, model)
    run(model, opt, 0, 3)
    before = [p.detach().clone() for p in model[0].parameters()]
    model[0].requires_grad_(True)
    params = [(f"0.{k}", p) for k, p in model[0].named_parameters()] if named else list(model[0].parameters())
    opt.add_param_group({"params": params, "lr": 0.01})
    run(model, opt, 3, 6)
    assert all(not torch.equal(p, q) for p, q in zip(model[0].parameters(), before, strict=True))
    assert torch.isfinite(flat(model)).all()
    assert "0.weight" in repr(opt)


@EVERY
def test_adding_a_group_keeps_the_state_of_the_others(name: str):
    """A frozen layer that is added with a learning rate of 0 changes nothing for the rest."""
    pair = []
    for unfreeze in (False, True):
        model = mlp()
        model[0].requires_grad_(False)
        opt = member(name, model, refresh_every=1)
        run(model, opt, 0, 3)
        if unfreeze:
            model[0].requires_grad_(True)
            params = [(f"0.{k}", p) for k, p in model[0].named_parameters()]
            opt.add_param_group({"params": params, "lr": 0.0, "weight_decay": 0.0})
        run(model, opt, 3, 4)
        pair.append(model)
    for k in (2, 4):
        difference = (pair[0][k].weight - pair[1][k].weight).abs().max()
        assert difference < 1e-9 or name == "NGD"  # whose matrix couples all layers


@EVERY_KIND
def test_a_tensor_as_learning_rate(name: str):
    model, other = mlp(), mlp()
    one, two = member(name, model, lr=torch.tensor(0.01, dtype=torch.float64)), member(name, other, lr=0.01)
    assert torch.equal(run(model, one, 0, 4), run(other, two, 0, 4))


# --- the loop ---------------------------------------------------------------------------------------------


@EVERY_KIND
def test_schedulers_set_the_learning_rate(name: str):
    model, by_hand = mlp(), mlp()
    opt, plain = member(name, model, lr=0.04), member(name, by_hand, lr=0.04)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, gamma=0.5)
    for t in range(6):
        for group in plain.param_groups:
            group["lr"] = 0.04 * 0.5 ** (t // 2)
        run(model, opt, t, t + 1)
        run(by_hand, plain, t, t + 1)
        scheduler.step()
    assert torch.equal(flat(model), flat(by_hand))


@EVERY_KIND
def test_a_one_cycle_schedule(name: str):
    model = mlp()
    opt = member(name, model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.05, total_steps=8)
    rates = []
    for t in range(8):
        run(model, opt, t, t + 1)
        rates.append(opt.param_groups[0]["lr"])
        if t < 7:
            scheduler.step()
    assert len(set(rates)) > 4
    assert torch.isfinite(flat(model)).all()


@EVERY_KIND
def test_a_closure(name: str):
    model, other = mlp(), mlp()
    one, two = member(name, model), member(name, other)
    for x, y in DATA[:5]:

        def closure(x=x, y=y):
            one.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        loss = one.step(closure)
        assert loss.requires_grad
        train_step(other, two, (x, y), cross_entropy)
    assert torch.equal(flat(model), flat(other))


@pytest.mark.parametrize(("name", "to_none"), thinned(MEMBERS, [True, False]))
def test_zero_grad(name: str, to_none: bool):
    model, other = mlp(), mlp()
    one, two = member(name, model), member(name, other)
    for step, batch in enumerate(DATA[:4]):
        one.zero_grad(set_to_none=to_none)
        for p in model.parameters():
            assert (p.grad is None) == (to_none or step == 0)
            assert p.grad is None or not p.grad.any()
        cross_entropy(model(batch[0]), batch[1]).backward()
        one.step()
        train_step(other, two, batch, cross_entropy)
    assert torch.equal(flat(model), flat(other))


@EVERY_KIND
def test_hooks_before_and_after_a_step(name: str):
    model, calls = mlp(), []
    opt = member(name, model)
    opt.register_step_pre_hook(lambda *_: calls.append("before"))
    opt.register_step_post_hook(lambda *_: calls.append("after"))
    opt.register_state_dict_post_hook(lambda opt, state: calls.append("saved"))
    opt.register_load_state_dict_pre_hook(lambda opt, state: calls.append("loading"))
    opt.register_load_state_dict_post_hook(lambda opt: calls.append("loaded"))
    run(model, opt, 0, 2)
    opt.load_state_dict(opt.state_dict())
    assert calls == ["before", "after", "before", "after", "saved", "loading", "loaded"]


# The others train with their defaults in `test_defaults_train.py`.
@pytest.mark.parametrize(
    "name", mostly_slow(MEMBERS, ["KFAC exact split", "KFAC sampled", "EKFAC running", "Layerwise"])
)
def test_it_trains(name: str):
    """The loss on one batch halves within 60 steps (with labels of the data EKFAC does not stay there)."""
    model = mlp()
    options = {
        "KFAC": {"lr": 0.003},
        "KFAC exact split": {"lr": 0.003},
        "KFAC sampled": {"lr": 0.003, "estimator": "exact"},
        "EKFAC": {"lr": 0.003},
        "EKFAC running": {"lr": 0.003},
        "SOAP": {"lr": 0.03},
        "Muon": {"lr": 0.03},
    }
    opt = member(name, model, **options.get(name, {}))
    losses = [train_step(model, opt, DATA[0], cross_entropy) for _ in range(60)]
    assert min(losses) < 0.5 * losses[0]


def test_only_the_models_own_optimizer_is_fed():
    """Two optimizers on one model, as in an ablation: each sees the same statistics."""
    model, alone = mlp(), mlp()
    lw.optim.FOOF(model, scale="formula")
    opt, other = member("KFAC", model), member("KFAC", alone)
    assert torch.equal(run(model, opt, 0, 4), run(alone, other, 0, 4))


def test_an_optimizer_that_is_gone_leaves_the_model_as_it_was():
    model = mlp()
    opt = member("KFAC", model)
    run(model, opt, 0, 1)
    del opt
    handles = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    assert handles == 0
    assert torch.isfinite(model(DATA[0][0])).all()
