"""What a saved state means to an optimizer that loads it: whose it is, for which parameters, and under which names."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.optim.model_changes import renamed
from layerwise.optim.rule import UpdateRule


def engine_of(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is no parameter's: at the top, or in the first group, where distributed checkpoints have it."""
    missing = next((key for key in ("state", "param_groups") if key not in state_dict), None)
    found = None if missing else state_dict.get("engine", state_dict["param_groups"][0].get("engine"))
    if found is None:
        raise InputError(
            describe(
                f"a state without {missing or 'engine'!r}",
                "what state_dict() of an optimizer of lw.optim returns",
                "a torch optimizer's state cannot be loaded here",
            )
        )
    return found


def shared_factors(engine: Mapping[str, Any], rule: UpdateRule, member: str) -> frozenset[str] | None:
    """Factors of another member's state that mean the same here; None where it is the same kind of state."""
    ours, theirs = rule.statistics(), engine.get("statistics", rule.statistics())
    if engine["rule"] == rule.name and theirs == ours:
        return None
    shared = frozenset(side for side, of in ours.items() if theirs.get(side) == of and side in ("P", "Q"))
    if not shared:
        raise InputError(
            describe(
                f"a state of {engine.get('member', engine['rule'])}",
                f"one of {member}, or of a member whose factors mean the same",
                "begin without it, or load it into the optimizer that it came from",
            )
        )
    return shared


def check_shapes(engine: Mapping[str, Any], params: Mapping[str, Tensor]) -> None:
    """A state of parameters that had another shape would be dropped, layer by layer."""
    for name, shape in engine.get("shapes", {}).items():
        if name in params and tuple(params[name].shape) != tuple(shape):
            raise InputError(
                describe(
                    f"a state for parameter {name!r} of shape {tuple(shape)}",
                    f"shape {tuple(params[name].shape)}, as the model has it",
                    "load the state of the same model, or begin without it",
                )
            )


def renamed_state(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    layers: Mapping[Tensor, Mapping[str, Any]],
) -> dict[str, dict[str, Tensor]]:
    """The state of layers under their present names; as in torch, parameters are known by their place.

    A model that was wrapped or compiled since has other names for the same layers.
    """
    saved = state_dict["param_groups"]
    params = list(chain.from_iterable(group["params"] for group in groups))
    keys = list(chain.from_iterable(group["params"] for group in saved))
    names = list(chain.from_iterable(group["param_names"] for group in groups))
    before = list(chain.from_iterable(group.get("param_names", ()) for group in saved))
    before = before if len(before) == len(names) else names
    places = {key: place for place, key in enumerate(keys) if place < len(params)}
    found: dict[str, dict[str, Tensor]] = {}
    for key, of_layers in state_dict["state"].items():
        place = places.get(key)
        for number, (layer, tensors) in enumerate(of_layers.items()):
            if place is not None:
                own = list(layers.get(params[place], ()))
                layer = renamed(layer, before[place], names[place], own, number, len(of_layers))
            found[layer] = {k: t.clone() for k, t in tensors.items()}
    return found
