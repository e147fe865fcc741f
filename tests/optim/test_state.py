"""`opt.state`, its saved form, distributed checkpoints, hooks of loading, and whose state may be loaded."""

import copy
import io
from typing import Any

import pytest
import torch
from optim_tools import MEMBERS, batches, cross_entropy, flat, member, mlp, train_step
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import layerwise as lw
from layerwise.foundations.errors import InputError
from thinning import mostly_slow

pytestmark = pytest.mark.usefixtures("untyped")
DATA = batches(12, 5)
EVERY = pytest.mark.parametrize("name", MEMBERS)
KINDS = ("Adam", "KFAC", "EKFAC running", "NGD", "SOAP", "Muon")
EVERY_KIND = pytest.mark.parametrize("name", mostly_slow(MEMBERS, KINDS))


def run(model: nn.Module, opt: torch.optim.Optimizer, start: int, stop: int) -> Tensor:
    for batch in DATA[start:stop]:
        train_step(model, opt, batch, cross_entropy)
    return flat(model)


def tensors(state: Any) -> dict[tuple[Any, ...], Tensor]:
    if isinstance(state, Tensor):
        return {(): state}
    pairs = state.items() if isinstance(state, dict) else ()
    return {(key, *rest): t for key, value in pairs for rest, t in tensors(value).items()}


# --- what tools read ----------------------------------------------------------------------------------------


@EVERY
def test_the_state_is_there_to_be_read(name: str):
    """By parameter, before and after steps, the same numbers as are saved."""
    model = mlp()
    opt = member(name, model)
    assert set(opt.state) == set(model.parameters())
    assert not tensors(dict(opt.state))
    run(model, opt, 0, 3)
    places = {p: place for place, p in enumerate(p for g in opt.param_groups for p in g["params"])}
    found = {(places[key[0]], *key[1:]): t for key, t in tensors(dict(opt.state)).items()}
    saved = tensors(opt.state_dict()["state"])
    assert found.keys() <= saved.keys()
    assert all(torch.equal(t, saved[key]) for key, t in found.items())
    stateless = name in ("Sign", "NGD", "LocoProp") and not found
    assert stateless or sum(t.numel() for t in found.values()) > 0


def test_on_a_cpu_the_state_is_what_steps_use():
    model, other = mlp(), mlp()
    one, two = (lw.optim.Adam(m, lr=0.01) for m in (model, other))
    run(model, one, 0, 2)
    run(other, two, 0, 2)
    for opt in (one, two):
        for t in tensors(dict(opt.state)).values():
            t.mul_(0.5)
    assert torch.equal(run(model, one, 2, 4), run(other, two, 2, 4))
    third = mlp()
    assert not torch.equal(flat(model), run(third, lw.optim.Adam(third, lr=0.01), 0, 4))


# --- distributed checkpoints --------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_distributed_state_dicts_resume_bit_for_bit(name: str, flatten: bool, begun: bool):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, other = mlp(), mlp(seed=1)
    opt, resumed = member(name, model), member(name, other, lr=0.123)
    run(model, opt, 0, 5)
    if begun:
        run(other, resumed, 0, 2)
    other.load_state_dict(model.state_dict())
    state = get_optimizer_state_dict(model, opt, options=options)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    set_optimizer_state_dict(other, resumed, torch.load(file, weights_only=True), options=options)
    assert torch.equal(flat(model), flat(other))
    assert torch.equal(run(model, opt, 5, 10), run(other, resumed, 5, 10))


@EVERY
def test_asking_for_a_state_takes_no_step(name: str):
    """Torch makes states that it does not find by a step with gradients of zero."""
    model, other = mlp(), mlp()
    opt, plain = member(name, model), member(name, other)
    get_optimizer_state_dict(model, opt)
    assert opt.steps_taken == 0
    assert torch.equal(flat(model), flat(other))
    run(model, opt, 0, 2)
    get_optimizer_state_dict(model, opt)
    assert opt.steps_taken == 2
    run(other, plain, 0, 2)
    assert torch.equal(run(model, opt, 2, 5), run(other, plain, 2, 5))


# --- hooks --------------------------------------------------------------------------------------------------


@EVERY_KIND
def test_hooks_are_called_around_the_load(name: str):
    """The first sees the whole state and may exchange it; the last sees an optimizer that has it."""
    model, other = mlp(), mlp(seed=1)
    opt, resumed = member(name, model), member(name, other)
    run(model, opt, 0, 4)
    state, seen = opt.state_dict(), {}

    def before(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        seen["before"] = optimizer.steps_taken, "engine" in given, len(tensors(given["state"]))
        return {**given, "param_groups": [{**given["param_groups"][0], "lr": 0.07}, *given["param_groups"][1:]]}

    def after(optimizer: torch.optim.Optimizer) -> None:
        seen["after"] = (
            optimizer.steps_taken,
            optimizer.param_groups[0]["lr"],
            len(tensors(optimizer.state_dict()["state"])),
        )

    resumed.register_load_state_dict_pre_hook(before)
    resumed.register_load_state_dict_post_hook(after)
    resumed.load_state_dict(state)
    count = len(tensors(state["state"]))
    assert seen == {"before": (0, True, count), "after": (4, 0.07, count)}


# --- whose state --------------------------------------------------------------------------------------------

FACTORS = {
    "KFAC": {"P": "outgrads", "Q": "inputs"},
    "KFAC exact split": {"P": "outgrads", "Q": "inputs"},
    "KFAC sampled": {"P": "outgrads", "Q": "inputs"},
    "EKFAC": {"P": "outgrads", "Q": "inputs"},
    "EKFAC running": {"P": "outgrads", "Q": "inputs"},
    "MahalanobisSpectral": {"P": "outgrads", "Q": "inputs"},
    "FOOF": {"Q": "inputs"},
    "LocoProp": {"Q": "inputs"},
    "Shampoo": {"P": "gradient", "Q": "gradient"},
    "SOAP": {"P": "gradient", "Q": "gradient"},
    "Layerwise": {"P": "gradient", "Q": "inputs"},
}
KIND = {name: name.split()[0] for name in MEMBERS}
ALIKE = {"KFAC exact split": "EKFAC"}
"""K-FAC that divides by its damped eigenvalues is a case of EKFAC, with the same state."""


def of_layers(opt: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    return {layer: t for of_param in opt.state_dict()["state"].values() for layer, t in of_param.items()}


@pytest.mark.parametrize("first", MEMBERS)
def test_another_members_state_means_something_or_is_refused(first: str):
    """Factors that mean the same are taken, and nothing else of a layer's own rule; without any it is refused."""
    model = mlp()
    opt = member(first, model)
    run(model, opt, 0, 4)
    state = opt.state_dict()
    for second in MEMBERS:
        if KIND[first] == KIND[second] or ALIKE.get(first, KIND[first]) == ALIKE.get(second, KIND[second]):
            continue
        other = copy.deepcopy(model)
        taking = member(second, other)
        ours, theirs = FACTORS.get(second, {}), FACTORS.get(first, {})
        shared = {side for side in ours if theirs.get(side) == ours[side]}
        if not shared:
            with pytest.raises(InputError, match=rf"a state of {KIND[first]}\. Expected one of {KIND[second]}, or"):
                taking.load_state_dict(state)
            assert taking.steps_taken == 0
            continue
        taking.load_state_dict(copy.deepcopy(state))
        taking._stacks = taking._build()
        found, saved = of_layers(taking), of_layers(opt)
        main = {spec.name for stack in taking._stacks if not stack.fallback for spec in stack.specs}
        for layer in main & saved.keys():
            for side in ours:
                wanted = saved[layer][side] if side in shared else torch.zeros(())
                assert torch.equal(found[layer][side].sum(), wanted.sum()), (first, second, layer, side)
            assert "momentum" not in found[layer]
        assert torch.isfinite(run(other, taking, 4, 7)).all()


def test_roots_of_another_power_are_not_taken():
    """K-FAC's inverses are no square roots: the next step makes those."""
    model = mlp()
    opt = lw.optim.KFAC(model, refresh_every=50)
    run(model, opt, 0, 4)
    other = copy.deepcopy(model)
    taking = lw.optim.Layerwise(other, power=0.5, lr=0.01, damping=0.1, refresh_every=50)
    taking.load_state_dict(opt.state_dict())
    run(other, taking, 4, 5)
    layer = of_layers(taking)["4"]
    damping = torch.linalg.inv(layer["P_root"][0] @ layer["P_root"][0]) - layer["P"][0]
    assert (damping - damping[0, 0] * torch.eye(3, dtype=torch.float64)).abs().max() < 1e-9


@EVERY_KIND
def test_a_state_of_another_shape_is_refused(name: str):
    model, wider = mlp(), mlp(5, 6, 5, 3)
    opt, other = member(name, model), member(name, wider)
    run(model, opt, 0, 2)
    with pytest.raises(InputError, match=r"parameter '0.weight' of shape \(5, 5\)\. Expected shape \(6, 5\)"):
        other.load_state_dict(opt.state_dict())
    assert other.steps_taken == 0


@EVERY_KIND
def test_a_state_of_a_model_that_was_wrapped_since(name: str):
    """Layers have other names; parameters are known by their place, as in torch."""
    model = mlp()
    opt = member(name, model)
    run(model, opt, 0, 4)
    other = nn.Sequential(mlp(seed=1))
    other[0].load_state_dict(model.state_dict())
    resumed = member(name, other)
    resumed.load_state_dict(opt.state_dict())
    assert torch.equal(run(model, opt, 4, 9), run(other, resumed, 4, 9))
