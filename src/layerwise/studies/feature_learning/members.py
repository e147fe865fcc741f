"""The library's own optimizers as members of one comparison: who they are, and at which rates each is tried.

None has momentum beyond what defines it, so that the step is the formula, and none is clipped unless asked for.
Statistics are averaged over about ten batches, and damping is relative and small: what is compared is preconditioning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerwise import optim
from layerwise.foundations.errors import InputError, unknown

if TYPE_CHECKING:  # the table is read by commands that compute nothing
    from torch import nn
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class Member:
    """One optimizer of the comparison."""

    label: str
    """What figures call it."""
    make: Callable[[nn.Module, float], Optimizer]
    """From a model and a rate to the optimizer."""
    exponents: tuple[float, ...]
    """Decimal logarithms of the rates that enclose its best one on the problems of this study."""
    inverts_inputs: bool
    """Whether the step contains the inverse of the second moment of a layer's inputs."""

    @property
    def rates(self) -> tuple[float, ...]:
        """10 to the power of the exponents."""
        return tuple(10.0**exponent for exponent in self.exponents)


def _steps(first: float, last: float) -> tuple[float, ...]:
    """Exponents from first to last in halves.

    >>> _steps(-2.0, -1.0)
    (-2.0, -1.5, -1.0)
    """
    return tuple(first + 0.5 * i for i in range(round(2 * (last - first)) + 1))


def _member(
    label: str, make: Callable[[nn.Module, float], Optimizer], first: float, last: float, inverts: bool = False
) -> Member:
    return Member(label=label, make=make, exponents=_steps(first, last), inverts_inputs=inverts)


def _muon(model: nn.Module, lr: float) -> Optimizer:
    return optim.Muon(model, lr=lr, momentum=0.0, weight_decay=0.0, orthogonalize="polar", scale="formula")


def members(
    damping: float | int = 1e-4, likelihood: str = "gaussian", clip: float | int | None = None
) -> dict[str, Member]:
    """From a short name to the member, in the order of legends; damping is relative to a factor's mean eigenvalue.

    `clip` bounds the step of those that this library clips by default (KFAC, EKFAC, Mahalanobis, NGD); without it
    theirs is the bare formula too.

    >>> list(members())[:3]
    ['sgd', 'adam', 'sign']
    """
    averaged: dict[str, Any] = {
        "damping": damping,
        "factor_decay": 0.9,
        "refresh_every": 5,
        "momentum": 0.0,
    }
    fisher: dict[str, Any] = averaged | {"likelihood": likelihood, "clip": clip}
    whole: dict[str, Any] = {"damping": damping, "clip": clip, "likelihood": likelihood}
    return {
        "sgd": _member("SGD", lambda model, lr: optim.SGD(model, lr=lr), -1.5, 0.0),
        "adam": _member("Adam", lambda model, lr: optim.Adam(model, lr=lr), -3.0, -1.5),
        "sign": _member("Sign", lambda model, lr: optim.Sign(model, lr=lr), -3.5, -2.0),
        "muon": _member("Muon", lambda model, lr: _muon(model, lr), -2.5, -1.0),
        "shampoo": _member(
            "Shampoo",
            lambda model, lr: optim.Shampoo(model, lr=lr, momentum=0.0, refresh_every=5, scale="formula"),
            -2.5,
            -1.0,
        ),
        "soap": _member(
            "SOAP", lambda model, lr: optim.SOAP(model, lr=lr, refresh_every=5, scale="formula"), -3.0, -1.5
        ),
        "locoprop": _member("LocoProp", lambda model, lr: optim.LocoProp(model, lr=lr), 0.0, 1.5, True),
        "foof": _member(
            "FOOF", lambda model, lr: optim.FOOF(model, lr=lr, **averaged, scale="formula"), -2.0, -0.5, True
        ),
        "kfac": _member(
            "KFAC", lambda model, lr: optim.KFAC(model, lr=lr, **fisher, scale="formula"), -2.0, -0.5, True
        ),
        "ekfac": _member(
            "EKFAC", lambda model, lr: optim.EKFAC(model, lr=lr, **fisher, scale="formula"), -2.0, -0.5, True
        ),
        "mahalanobis": _member(
            "Mahalanobis-spectral",
            lambda model, lr: optim.MahalanobisSpectral(model, lr=lr, **fisher, scale="formula"),
            -3.0,
            -1.5,
            True,
        ),
        "ngd": _member("NGD", lambda model, lr: optim.NGD(model, lr=lr, **whole), -2.0, -0.5, True),
    }


MEMBERS = members()
"""All of them with the default damping, for a square loss."""


def member(name: str) -> Member:
    """A member by its short name.

    >>> member("kfac").label
    'KFAC'
    """
    if name not in MEMBERS:
        raise InputError(unknown("member", name, MEMBERS))
    return MEMBERS[name]
