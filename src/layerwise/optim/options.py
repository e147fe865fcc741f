"""Options of the optimizer: checked, and cut into parameter groups."""

import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.vectors import trainable
from layerwise.layers.table import LayerSpec, LayerTable, matches
from layerwise.optim.elementwise import AdamRule, GradientDescent
from layerwise.optim.parameters import BareParameters
from layerwise.optim.rule import UpdateRule

GROUP_OPTIONS = ("lr", "momentum", "nesterov", "weight_decay", "damping", "factor_decay")
FALLBACKS: Mapping[str, Callable[[], UpdateRule]] = {"adam": AdamRule, "sgd": GradientDescent}
BOUNDS = {"lr": math.inf, "momentum": 1.0, "weight_decay": math.inf, "factor_decay": 1.0}
"""Numbers from 0 to below this."""


def parameter_groups(
    model: nn.Module, table: LayerTable, overrides: Mapping[str, Mapping[str, Any]], defaults: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """One parameter group for every pattern of `overrides`, and one for the rest; or the groups that were given."""
    if isinstance(model, BareParameters) and (len(model.groups) > 1 or len(model.groups[0]) > 1):
        if overrides:
            raise InputError(describe("overrides beside parameter groups", "one of them", "put options in the groups"))
        for group in model.groups:
            check_numbers({**defaults, **group})
        return model.groups
    params, taken = dict(model.named_parameters()), set[str]()
    if not isinstance(model, BareParameters):  # parameters that are given take part when they are unfrozen, as in torch
        params = trainable(model)
    groups = []
    for pattern, options in overrides.items():
        _check_names(pattern, options)
        names = [name for name in _parameters_of(table, pattern) if name not in taken]
        if not names:
            raise InputError(
                describe(
                    f"overrides for {pattern!r}, which matches no layer",
                    f"a pattern of: {', '.join(table.names()[:6])}, …",
                    "see lw.layers(model)",
                )
            )
        check_numbers({**defaults, **options})
        taken.update(names)
        groups.append({"params": [(name, params[name]) for name in names], **options})
    rest = [(name, p) for name, p in params.items() if name not in taken]
    return [*([{"params": rest}] if rest else []), *groups]


def _check_names(pattern: str, options: Mapping[str, Any]) -> None:
    allowed = (*GROUP_OPTIONS, "update")
    unknown = [key for key in options if key not in allowed]
    if unknown:
        raise InputError(
            describe(
                f"overrides={{{pattern!r}: {{{unknown[0]!r}: …}}}}",
                f"options among: {', '.join(allowed)}",
                "other options hold for the whole optimizer",
            )
        )


def _parameters_of(table: LayerTable, pattern: str) -> list[str]:
    """Parameters of the layers that a pattern names, without repeats."""

    def named(spec: LayerSpec) -> bool:
        return matches(spec, pattern) or fnmatchcase(spec.parameters[0].rpartition(".")[0], pattern)

    return list(dict.fromkeys(name for spec in table.layers if named(spec) for name in spec.parameters))


def fallback_rule(given: str | UpdateRule) -> UpdateRule:
    """What parameters get that the rule does not treat."""
    if isinstance(given, UpdateRule):
        return given
    if given not in FALLBACKS:
        raise InputError(describe(f"update_fallback={given!r}", '"adam", "sgd" or an UpdateRule', "choose one of them"))
    return FALLBACKS[given]()


def positive(name: str, value: int) -> int:
    """A number of steps."""
    if not isinstance(value, int | float) or value < 1:
        raise InputError(describe(f"{name}={value!r}", "a number of steps ≥ 1", "pass e.g. 10"))
    return int(value)


def known(name: str, value: str, names: tuple[str, ...]) -> str:
    """One of some names."""
    if value not in names:
        raise InputError(describe(f"{name}={value!r}", " or ".join(f'"{k}"' for k in names), "choose one of them"))
    return value


def switch(name: str, value: bool | None) -> bool | None:
    """On, off, or None for the optimizer's own choice; a word such as "no" would count as on."""
    if value is not None and not isinstance(value, bool):
        raise InputError(describe(f"{name}={value!r}", "True, False or None", "choose one of them"))
    return value


def check_numbers(options: Mapping[str, Any]) -> None:
    """Learning rates and decays within their bounds."""
    known("update", options["update"], ("rule", "fallback"))
    for name, below in BOUNDS.items():
        value = float(options[name])
        if not 0 <= value < below:
            limit = "≥ 0" if below == math.inf else f"from 0 to below {below:g}"
            raise InputError(describe(f"{name}={value}", f"a number {limit}", "choose another"))
