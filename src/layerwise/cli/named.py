"""Experiments by the names that the user types: of the catalog, of a folder of it, ``module:EXPERIMENT``, or all."""

import os
import sys
from collections.abc import Sequence

from layerwise.experiments import catalog
from layerwise.experiments.experiment import Experiment

ALL = "all"
"""Names no experiment, but all of the catalog."""
ABOUT_NAMES = """\
An experiment of your own is named by where it is, such as my_package.mean:EXPERIMENT (the current folder is searched,
too); `all` names those of layerwise, and zhang2025, george2023 or wu2024 those of one paper. Without names, all of
layerwise are meant."""


def find(name: str) -> Experiment:
    """An experiment by name, or by reference to a module that may lie in the current folder."""
    if ":" in name and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return catalog.find(name)


def find_all(names: Sequence[str]) -> list[Experiment] | None:
    """Those that are named, each once; None if nobody is."""
    if not names:
        return None
    found: dict[str, Experiment] = {}
    for name in names:
        inside = catalog.folders().get(name, ())
        some = catalog.experiments().values() if name == ALL else [find(part) for part in inside or (name,)]
        found |= {experiment.name: experiment for experiment in some}
    return list(found.values())
