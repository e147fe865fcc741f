"""A model that changes after its optimizer was built: whether it has, and what of before is what now.

What belongs together is found by identity: a parameter that has another name now is the same one, and a layer's state
goes with its parameters. A parameter under an old name is the successor of the one that had it.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from layerwise.foundations.errors import LayerwiseError, describe
from layerwise.foundations.sharded import Swapped, named_parameters, successors
from layerwise.layers.table import LayerSpec, LayerTable

REQUIRES_GRAD = attrgetter("requires_grad")


class ModelSnapshot:
    """A model's modules and parameters by identity, and which parameters are trained, as they were last seen."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.owners = owners(model)
        """The module of each parameter, when the optimizer's groups last followed the model."""
        self.strangers: list[tuple[str, nn.Parameter]] | None = None
        """Parameters that no group holds; None: to be found."""
        self._remember()

    def _remember(self) -> None:
        modules, instead = [*self.model.modules()], successors(self.model)
        self._children = [held for module in modules for held in (module._modules, module._parameters)]
        own = (p for module in modules for p in module._parameters.values() if p is not None)
        self._own = [instead.get(id(p), p) for p in own]
        self._swapped = Swapped(self.model)
        counts, ids, trained = self._now()
        swapped = self._swapped.now()
        self._seen = counts, [swapped.get(key, key) for key in ids], trained

    def _now(self) -> tuple[list[int], list[int], list[bool]]:
        """How much every module holds, all of it by identity, and what is trained: lists without a part for each of two
        hundred dictionaries, since this is asked twice a step."""
        held = [found.values() for found in self._children]  # of scripted modules these are no dictionaries
        return list(map(len, held)), list(map(id, chain.from_iterable(held))), list(map(REQUIRES_GRAD, self._own))

    def changed(self) -> bool:
        """Since the last call; asked before every forward, and therefore without the names of anything."""
        counts, ids, trained = now = self._now()
        if now == self._seen:
            return False
        instead = self._swapped.now()  # FSDP swaps parameters while the model runs
        if instead and (counts, [instead.get(key, key) for key in ids], trained) == self._seen:
            return False
        self._remember()
        return True

    def ask_again(self) -> None:
        """What has changed was not followed: the next question is answered by yes."""
        self._seen = ([], [], [])

    def require_known(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """A parameter with a gradient that no group holds would silently stay as it is."""
        if self.strangers is None:
            known = {id(p) for group in groups for p in group["params"]}
            self.strangers = [(name, p) for name, p in named_parameters(self.model).items() if id(p) not in known]
        for name, p in self.strangers:
            if p.requires_grad and p.grad is not None:
                raise LayerwiseError(
                    describe(
                        f"parameter {name!r} with a gradient, frozen or absent when the optimizer was built",
                        "parameters that the optimizer was told of",
                        f'call opt.add_param_group({{"params": [model.get_parameter({name!r})]}}), or '
                        f"model.get_parameter({name!r}).requires_grad_(False)",
                    )
                )


def owners(model: nn.Module) -> dict[int, int]:
    """From each parameter to its module, by identity."""
    instead = successors(model)
    of_modules = ((p, module) for module in model.modules() for p in module._parameters.values() if p is not None)
    return {id(instead.get(id(p), p)): id(module) for p, module in of_modules}


def follow_groups(
    groups: Iterable[dict[str, Any]], params: Mapping[str, nn.Parameter]
) -> dict[int, nn.Parameter] | None:
    """Bring names and parameters of groups up to date, in place.

    Returns the successors of parameters that were replaced, by the identity of those; None: no group has changed.
    """
    names = {id(p): name for name, p in params.items()}
    groups = list(groups)
    known = {id(p) for group in groups for p in group["params"]}
    instead, other_names = dict[int, nn.Parameter](), False
    for group in groups:
        for place, (name, p) in enumerate(zip(group["param_names"], group["params"], strict=True)):
            now = params.get(name)
            if id(p) in names:
                other_names = other_names or names[id(p)] != name
                group["param_names"][place] = names[id(p)]
            elif now is not None and id(now) not in known:
                instead[id(p)] = group["params"][place] = now
    return instead if other_names or instead else None


def renamed(layer: str, before: str, now: str, own: Sequence[str], place: int, count: int) -> str:
    """A layer's name, where its first parameter has another one than before.

    It is made of the module's name or is the parameter's; else (the model itself is the layer) it is the one in its
    place among `count` layers of that parameter, which are now called `own`.
    """
    if before == now:
        return layer
    if layer == before:
        return now
    old, new = before.rpartition(".")[0], now.rpartition(".")[0]
    if old and new and (layer == old or layer.startswith(f"{old}.")):
        return new + layer[len(old) :]
    return own[place] if len(own) == count else layer


def renamed_layers(
    before: LayerTable, old: Mapping[str, Tensor], after: LayerTable, new: Mapping[str, Tensor]
) -> dict[str, str]:
    """From names of layers to those that the same layers have now, by the identity of their parameters."""
    names, found = {id(p): name for name, p in new.items()}, dict[str, str]()
    later_layers = _by_first(after)
    for first, layers in _by_first(before).items():
        for place, spec in enumerate(layers):
            now = [names.get(id(old[name])) if name in old else None for name in spec.parameters]
            if now[0] is not None and None not in now:
                own = [later.name for later in later_layers.get(now[0], [])]
                found[spec.name] = renamed(spec.name, first, now[0], own, place, len(layers))
    return found


def _by_first(table: LayerTable) -> dict[str, list[LayerSpec]]:
    """Layers by their first parameter."""
    found: dict[str, list[LayerSpec]] = {}
    for spec in table.layers:
        found.setdefault(spec.parameters[0], []).append(spec)
    return found
