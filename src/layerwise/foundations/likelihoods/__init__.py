"""Likelihoods: what a model's output means. One file each; see `likelihood.py` for the conventions."""

from collections.abc import Mapping
from typing import Any

from layerwise.foundations.errors import InputError, NameLookupError, describe, unknown
from layerwise.foundations.likelihoods.bernoulli import Bernoulli as Bernoulli
from layerwise.foundations.likelihoods.categorical import Categorical as Categorical
from layerwise.foundations.likelihoods.custom import Custom as Custom
from layerwise.foundations.likelihoods.gaussian import Gaussian as Gaussian
from layerwise.foundations.likelihoods.likelihood import Likelihood as Likelihood
from layerwise.foundations.likelihoods.likelihood import Reading as Reading
from layerwise.foundations.likelihoods.likelihood import Terms as Terms

_BY_NAME: Mapping[str, type[Likelihood]] = {
    "categorical": Categorical,
    "gaussian": Gaussian,
    "bernoulli": Bernoulli,
}


def resolve(likelihood: "str | Likelihood", **options: Any) -> Likelihood:
    """A likelihood from its name and options, or the object itself.

    >>> resolve("categorical", ignore_index=0).ignore_index
    0
    """
    if isinstance(likelihood, Likelihood):
        if options:
            raise InputError(
                describe(
                    f"a likelihood object and the options {', '.join(options)}",
                    "options inside the object",
                    f"use {type(likelihood).__name__}({', '.join(f'{k}=…' for k in options)})",
                )
            )
        return likelihood
    if likelihood not in _BY_NAME:
        raise NameLookupError(unknown("likelihood", likelihood, _BY_NAME))
    cls = _BY_NAME[likelihood]
    known = [name for name in cls.__dataclass_fields__ if name != "name"]  # type: ignore[attr-defined]
    for option in options:
        if option not in known:
            raise InputError(unknown("option", option, known, where=f"of likelihood {likelihood!r}"))
    return cls(**options)
