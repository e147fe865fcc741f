"""The learning rate of a model scaled by α: divided by α², where the optimizer's step is in proportion to it."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from layerwise.foundations.errors import InputError, UnsupportedError, describe

MARK = "rescaled_by"
"""In the parameter groups, which a checkpoint of the optimizer keeps."""
_RESCALED = WeakTensorKeyDictionary()
"""From a parameter to the α that its learning rate was divided for."""

Opt = TypeVar("Opt", bound=torch.optim.Optimizer)


def rescaled(optimizer: Opt, alpha: float | int) -> Opt:
    """The optimizer with its learning rates divided by α², as `lw.linearized` with that α needs it.

    Gradients of ``f₀ + α (f − f₀)`` are α times as large and outputs move α times as far, so that with the rate divided
    by α² outputs move as those of the plain model do at the plain rate. Momentum stays as it is.

    >>> import torch, layerwise as lw
    >>> net = lw.linearized(torch.nn.Linear(4, 3), alpha=10)
    >>> opt = lw.regimes.rescaled(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), alpha=10)
    >>> opt.param_groups[0]["lr"]
    0.001

    It is hard to forget: a linearized model warns at its first backward pass if the rate of none of its parameters was
    divided for its α. The state of a plain run may be loaded: its rates are divided then. Make a schedule after this
    call, for it remembers the rate that it finds; schedules with rates of their own (`OneCycleLR`) must be given theirs
    divided by α².

    Args:
        optimizer: `torch.optim.SGD` or `lw.optim.SGD`, with or without momentum, without weight decay. Steps of others
            are not in proportion to the gradient, which would undo the rescaling.
        alpha: that of the linearized model; its linear limit, infinity, has the plain rate and needs no call.
    """
    if isinstance(alpha, bool) or not isinstance(alpha, float | int) or not 0 < alpha < math.inf:
        do = "give that of lw.linearized; alpha=inf has the plain learning rate"
        raise InputError(describe(f"alpha={alpha!r}", "a finite number above 0", do))
    _refuse_adaptive(optimizer)
    for group in optimizer.param_groups:
        _refuse_group(group)
    for group in optimizer.param_groups:
        rate = group["lr"]
        group["lr"] = rate / alpha**2
        group[MARK] = float(alpha)
        for parameter in group["params"]:
            _RESCALED[parameter] = float(alpha)
    optimizer.defaults["lr"] = optimizer.defaults["lr"] / alpha**2  # of groups that are added
    optimizer.register_load_state_dict_post_hook(_still_rescaled(float(alpha)))
    return optimizer


def _still_rescaled(alpha: float) -> Callable[[torch.optim.Optimizer], None]:
    """After a state was loaded: that of a plain run, as of one that both regimes are forked from, has plain rates."""

    def hook(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            if group.get(MARK, alpha) != alpha:
                given = f"the state of an optimizer that was rescaled for alpha={group[MARK]:g}"
                raise InputError(describe(given, f"one for alpha={alpha:g}, or a plain one", "rescale for its α"))
            if MARK not in group:
                group["lr"], group[MARK] = group["lr"] / alpha**2, alpha

    return hook


def rescaled_by(parameter: Tensor) -> float | None:
    """The α for which the learning rate of a parameter was divided; None if it was not."""
    return _RESCALED.get(parameter)


def _refuse_adaptive(optimizer: Any) -> None:
    if type(optimizer) is torch.optim.SGD:
        return
    from layerwise.optim.members.sgd import SGD  # takes a while, and is seldom needed

    name = f"{type(optimizer).__module__.split('.')[0]}'s {type(optimizer).__name__}"
    do = "take torch.optim.SGD or lw.optim.SGD"
    if type(optimizer) is not SGD:
        expected = "gradient descent, whose step is in proportion to the gradient; other steps would undo the rescaling"
        raise UnsupportedError(describe(name, expected, do))
    scale, graft, clip = optimizer._size.method, optimizer._graft.method, optimizer._clip.kind
    if scale != "formula" or graft or clip:
        given = f"{name} with scale={scale!r}, graft={graft!r}, clip={clip!r}"
        expected = "steps in proportion to the gradient: scale='formula', no graft, no clip"
        raise UnsupportedError(describe(given, expected, "leave these options out"))
    if any(group.get("update") == "fallback" for group in optimizer.param_groups):
        given = f"{name} with parameters that get another update"
        raise UnsupportedError(describe(given, "one update for all", "leave the overrides out"))


def _refuse_group(group: dict[str, Any]) -> None:
    if group.get("weight_decay"):
        raise InputError(
            describe(
                f"weight_decay={group['weight_decay']}",
                "no weight decay: it would pull to zero, away from the start, and not scale with α",
                "set weight_decay=0",
            )
        )
    if MARK in group:
        given = f"an optimizer that was rescaled for alpha={group[MARK]:g}"
        raise InputError(describe(given, "the plain learning rate", "rescale once, or make the optimizer anew"))
    if "initial_lr" in group:
        given = "an optimizer with a schedule, which would set the plain learning rate again"
        raise InputError(describe(given, "one without", "rescale first, then make the schedule"))
