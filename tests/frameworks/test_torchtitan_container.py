"""torchtitan's `OptimizersContainer`: an optimizer for each part of a pipeline, one flat state keyed by names.

The contract that the container's docstring and its checkpoints state is also tested where torchtitan is absent, by
`FlatContainer`, which keeps to it and nothing else.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from framework_training import (
    FROM_GRADIENTS,
    MEMBERS,
    SHORT,
    assert_has_moved,
    assert_same_weights,
    batch,
    loss_of,
    member,
    net,
    plain_loop,
    warmup,
)
from torch import nn
from torch.optim import Optimizer

import layerwise as lw

STEPS, STOP = 8, 3
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process saves and loads


class FlatContainer(Optimizer):
    """One state of all optimizers: ``state.<parameter>.<name>[.<name>…]`` and ``param_groups.<parameter>.<option>``.

    As in torchtitan: names come from ``param_names`` of each group, nested dictionaries are flattened by dots, a step
    with gradients of zero at rate zero is taken where there is no state yet, and what is loaded has the names of the
    state that there is.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        super().__init__([p for opt in self.optimizers for group in opt.param_groups for p in group["params"]], {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for opt in self.optimizers:
            opt.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for opt in self.optimizers:
            opt.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        found = dict[str, Any]()
        for opt in self.optimizers:
            make_state_exist(opt)
            saved = opt.state_dict()
            for group in saved["param_groups"]:
                for key, name in zip(group["params"], group["param_names"], strict=True):
                    found.update(flattened(saved["state"].get(key, {}), f"state.{name}"))
                    options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
                    found.update({f"param_groups.{name}.{k}": v for k, v in options.items()})
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for opt in self.optimizers:
            make_state_exist(opt)
            state, groups, place = dict[int, Any](), list[dict[str, Any]](), 0
            for group in opt.param_groups:
                first = group["param_names"][0]
                options = {k: state_dict[f"param_groups.{first}.{k}"] for k in group if not k.startswith("param")}
                groups.append({**options, "params": list(range(place, place + len(group["params"])))})
                for name, p in zip(group["param_names"], group["params"], strict=True):
                    state[place] = {k: found_under(state_dict, f"state.{name}.{k}") for k in opt.state[p]}
                    place += 1
            opt.load_state_dict({"state": state, "param_groups": groups})


def make_state_exist(opt: Optimizer) -> None:
    if opt.state or any(p.grad is not None for group in opt.param_groups for p in group["params"]):
        return
    rates = [group["lr"] for group in opt.param_groups]
    for group in opt.param_groups:
        group["lr"] = 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    opt.step(closure=None)
    for group, rate in zip(opt.param_groups, rates, strict=True):
        group["lr"] = rate
    opt.zero_grad(set_to_none=True)


def flattened(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    found = dict[str, Any]()
    for key, value in state.items():
        found.update(
            flattened(value, f"{prefix}.{key}") if isinstance(value, dict) else {f"{prefix}.{key}": value},
        )
    return found


def found_under(flat: dict[str, Any], key: str) -> Any:
    if key in flat:
        return flat[key]
    found = dict[str, Any]()
    for name in [name for name in flat if name.startswith(f"{key}.")]:
        *path, last = name[len(key) + 1 :].split(".")
        inner = found
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = flat[name]
    return found


def by_flat_container(name: str, parts: Sequence[nn.Module]) -> Optimizer:
    return FlatContainer([member(name)(part) for part in parts])


def by_torchtitan(name: str, parts: Sequence[nn.Module]) -> Optimizer:
    """As in the recipe."""
    titan = pytest.importorskip("torchtitan.components.optimizer", reason="needs torchtitan")

    class Container(titan.OptimizersContainer):
        def __init__(self, config: Any, *, model_parts: list[nn.Module]) -> None:
            self.model_parts = model_parts
            self.optimizers = [member(name)(part) for part in model_parts]
            Optimizer.__init__(self, [p for part in model_parts for p in part.parameters()], {})

    return Container(titan.OptimizersContainer.Config(), model_parts=list(parts))


CONTAINERS = {"flat": by_flat_container, "torchtitan": by_torchtitan}


class Nested(nn.Module):
    """Layers whose names have dots, in a part that has the names of the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": net()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers["0"](x)


def train(model: nn.Module, container: Optimizer, steps: range) -> None:
    for step in steps:
        loss_of(model, batch(step, STEPS)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        container.step()
        for opt in container.optimizers:  # type: ignore[attr-defined]
            opt.schedule.step()
        container.zero_grad()


def begin(name: str, kind: str) -> tuple[nn.Module, Optimizer]:
    model = Nested()
    container = CONTAINERS[kind](name, [model])
    for opt in container.optimizers:  # type: ignore[attr-defined]
        opt.schedule = warmup(opt)
    return model, container


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.slow) for name in MEMBERS]
)
def test_a_flat_checkpoint_within_a_cycle(name: str, kind: str, tmp_path: Path):
    """Through `torch.distributed.checkpoint`, which loads into a state that exists, before the first step."""
    expected = plain_loop(member(name), STEPS)
    assert_has_moved(expected)
    model, container = begin(name, kind)
    assert container.state_dict().keys()  # saving before the first step changes nothing
    train(model, container, range(STOP))
    schedule = container.optimizers[0].schedule.state_dict()  # type: ignore[attr-defined]
    dcp.save({"model": model.state_dict(), "optim": container.state_dict()}, checkpoint_id=tmp_path)
    train(model, container, range(STOP, STEPS))
    assert_same_weights(model, expected)

    other, again = begin(name, kind)
    content: dict[str, Any] = {"model": other.state_dict(), "optim": again.state_dict()}
    dcp.load(content, checkpoint_id=tmp_path)
    other.load_state_dict(content["model"])
    again.load_state_dict(content["optim"])
    again.optimizers[0].schedule.load_state_dict(schedule)  # type: ignore[attr-defined]
    assert again.optimizers[0].steps_taken == STOP  # type: ignore[attr-defined]
    train(other, again, range(STOP, STEPS))
    assert_same_weights(other, expected)


@pytest.mark.parametrize("name", FROM_GRADIENTS)
def test_torchtitans_own_groups(name: str):
    """Groups by pattern, with names of parameters and with options of torch's implementations in them."""
    titan = pytest.importorskip("torchtitan.components.optimizer", reason="needs torchtitan")

    class Container(titan.OptimizersContainer):
        @staticmethod
        def _resolve_optimizer_factory(wanted: str) -> Any:
            return getattr(lw.optim, wanted)

    group = titan.ParamGroupConfig
    config = titan.OptimizersContainer.Config(
        param_groups=[
            group(pattern=r"bias$", optimizer_name=name, optimizer_kwargs={"lr": 0.02, "weight_decay": 0.0}),
            group(pattern=r".*", optimizer_name=name, optimizer_kwargs={"lr": 0.02, "weight_decay": 0.1}),
        ],
        implementation="for-loop",
    )
    model = Nested()
    container = Container(config, model_parts=[model])
    (opt,) = container.optimizers
    opt.schedule = warmup(opt)
    train(model, container, range(STEPS))
    assert_has_moved(model.layers["0"])
    names = [found for of_group in opt.param_groups for found in of_group["param_names"]]
    assert sorted(names) == sorted(found for found, _ in model.named_parameters())
    assert {key.split(".weight")[0] for key in container.state_dict() if key.endswith("0.0.weight.lr")} == {
        "param_groups.layers.0.0"
    }
