"""Optimizers of parameters alone, as torch's are: an iterable of tensors, of ``(name, tensor)`` or of parameter groups.

A member whose rule looks at nothing but the gradient needs no model. Its matrices are then the parameters of two or
more axes, ``shape[0]`` rows by all the rest, as convolutions have it.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from layerwise.foundations.errors import InputError, UnsupportedError, describe
from layerwise.foundations.vectors import unwrap
from layerwise.layers.form import Form, Part
from layerwise.layers.table import LayerSpec, LayerTable, fallback_spec
from layerwise.optim.rule import UpdateRule


class BareParameters(nn.Module):
    """Stands for a model where there is none: parameters under the names that they were given."""

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        super().__init__()
        self.groups = [{**group, "params": self.named(group["params"])} for group in map(in_pairs, groups)]
        """The parameter groups as they were given, with names."""

    def named(self, given: Any) -> list[tuple[str, nn.Parameter]]:
        """Take parameters in; one without a name is called by its number."""
        found, known = [], {id(p): name for name, p in self._parameters.items()}
        for entry in _list(given):
            name, p = entry if isinstance(entry, tuple) else (known.get(id(entry), str(len(self._parameters))), entry)
            if not isinstance(p, Tensor):
                expected = "tensors, pairs (name, tensor) or parameter groups"
                raise UnsupportedError(describe(f"a {type(p).__name__} among parameters", expected, "pass those"))
            if self._parameters.get(name, p) is not p:
                raise InputError(describe(f"two parameters called {name!r}", "a name for each", "rename one of them"))
            self._parameters[name] = p  # type: ignore[assignment]  # not `register_parameter`: names may have dots
            found.append((name, p))
        return found

    def table(self) -> LayerTable:
        """Each parameter is a layer: a matrix from two axes on, else a vector."""
        params = {name: p for name, p in self.named_parameters() if p.requires_grad}
        specs = tuple(_spec(name, tuple(p.shape)) for name, p in params.items())
        return LayerTable(specs, {name: tuple(p.shape) for name, p in params.items()})


def _spec(name: str, shape: tuple[int, ...]) -> LayerSpec:
    if len(shape) < 2:
        return fallback_spec(name, shape, "a vector, not a matrix")
    return LayerSpec(name, Form(1, shape[0], math.prod(shape[1:]), Part(name, shape), None), "Parameter")


def model_of(given: nn.Module | ParamsT, rule: UpdateRule, member: str) -> nn.Module:
    """The model itself, or what stands for it where parameters were given and the rule needs nothing else."""
    if isinstance(given, nn.Module):
        return unwrap(given)
    requires = rule.requirements()
    if requires.inputs or requires.outgrads:
        seen = "inputs of layers and gradients of their outputs" if requires.outgrads else "inputs of layers"
        raise UnsupportedError(
            describe(
                "parameters" if isinstance(given, Iterable) else f"a {type(given).__name__}",
                f"the model: {member} takes statistics of {seen}, which parameters do not show",
                f"pass the model: lw.optim.{member}(model, …); what parameter groups say goes into overrides, such as "
                '{"*.bias": {"weight_decay": 0.0}}',
            )
        )
    if isinstance(given, Tensor) or not isinstance(given, Iterable):
        expected = "a model, or an iterable of parameters or of parameter groups"
        raise UnsupportedError(describe(f"a {type(given).__name__}", expected, "pass model or model.parameters()"))
    entries: list[Any] = list(given)
    of_groups = bool(entries) and isinstance(entries[0], dict)
    groups: list[Any] = list(map(in_pairs, entries)) if of_groups else [{"params": entries}]
    if not any(group["params"] for group in groups):
        raise InputError(describe("no parameters", "at least one", "pass e.g. model.parameters()"))
    return BareParameters(groups)


def in_pairs(group: dict[str, Any]) -> dict[str, Any]:
    """A group with pairs ``(name, tensor)``, where its names are beside them in "param_names", as torch keeps them."""
    params, names = _list(group["params"]), group.get("param_names")
    rest = {k: v for k, v in group.items() if k != "param_names"}
    if names is None or any(isinstance(p, tuple) for p in params):
        return {**rest, "params": params}
    if len(names) != len(params):
        given = f"a group of {len(params)} parameters with {len(names)} param_names"
        raise InputError(describe(given, "a name for each", "correct param_names, or leave it out"))
    return {**rest, "params": list(zip(names, params, strict=True))}


def _list(given: Any) -> list[Any]:
    return [given] if isinstance(given, Tensor) else list(given)
