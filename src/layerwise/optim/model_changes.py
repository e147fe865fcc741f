"""A model that changes after its optimizer was built: a layer replaced, wrapped by the compiler or by an adapter.

What belongs together is found by identity: a parameter that has another name now is the same one, and a layer's state
goes with its parameters. A parameter under an old name is the successor of the one that had it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from layerwise.layers.table import LayerSpec, LayerTable


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    """Every module once, without the names that cost most of `nn.Module.modules`."""
    seen, pending = set[int](), [model]
    while pending:
        module = pending.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            pending.extend(child for child in module._modules.values() if child is not None)


class Watched:
    """A model's modules and parameters by identity, and which parameters are trained: whether any has changed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._look()

    def _look(self) -> None:
        modules = list(_modules(self._model))
        self._children = [held for module in modules for held in (module._modules, module._parameters)]
        self._params = [p for module in modules for p in module._parameters.values() if p is not None]
        self._before = self._now()

    def _now(self) -> tuple[list[tuple[int, ...]], list[bool]]:
        return [tuple(map(id, held.values())) for held in self._children], [p.requires_grad for p in self._params]

    def changed(self) -> bool:
        """Since the last call; asked before every forward, and therefore without the names of anything."""
        same = self._now() == self._before
        if not same:
            self._look()
        return not same


def owners(model: nn.Module) -> dict[int, int]:
    """From each parameter to its module, by identity."""
    return {id(p): id(module) for module in _modules(model) for p in module._parameters.values() if p is not None}


def follow(groups: Iterable[dict[str, Any]], params: Mapping[str, nn.Parameter]) -> dict[int, nn.Parameter] | None:
    """Bring names and parameters of groups up to date, in place.

    Returns the successors of parameters that were replaced, by the identity of those; None: no group has changed.
    """
    names = {id(p): name for name, p in params.items()}
    groups = list(groups)
    known = {id(p) for group in groups for p in group["params"]}
    successors, renamed = dict[int, nn.Parameter](), False
    for group in groups:
        for place, (name, p) in enumerate(zip(group["param_names"], group["params"], strict=True)):
            now = params.get(name)
            if id(p) in names:
                renamed = renamed or names[id(p)] != name
                group["param_names"][place] = names[id(p)]
            elif now is not None and id(now) not in known:
                successors[id(p)] = group["params"][place] = now
    return successors if renamed or successors else None


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
