"""The catalog: every experiment of this folder, found by importing it, and experiments of other modules by reference.

A module of this folder, or of a folder in it, that has an `EXPERIMENT` is in the catalog; nothing else is edited. An
experiment elsewhere is named by where it is: ``my_package.my_module:EXPERIMENT``.
"""

import importlib
import pkgutil
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from layerwise.experiments.experiment import Experiment
from layerwise.foundations.errors import InputError, NameLookupError, describe, unknown

ATTRIBUTE = "EXPERIMENT"
DECLARATION = re.compile(rf"^{ATTRIBUTE}\b", re.MULTILINE)


@cache
def experiments() -> dict[str, Experiment]:
    """All experiments of the catalog by name, sorted."""
    package = importlib.import_module("layerwise.experiments")
    found: dict[str, Experiment] = {}
    for module in _modules(Path(package.__path__[0]), package.__name__):
        experiment = getattr(importlib.import_module(module), ATTRIBUTE, None)
        if experiment is None:
            continue
        if experiment.name in found:
            raise InputError(
                describe(f"two experiments named {experiment.name!r}", "a name for each", f"rename that of {module}")
            )
        found[experiment.name] = experiment
    return dict(sorted(found.items()))


def folders() -> dict[str, tuple[str, ...]]:
    """Names of the experiments in each folder of the catalog, such as all of one thesis."""
    inside: dict[str, list[str]] = {}
    for name, experiment in experiments().items():
        module = (reference_to(experiment) or "").partition(":")[0].split(".")
        if len(module) > 3:
            inside.setdefault(module[2], []).append(name)
    return {folder: tuple(names) for folder, names in inside.items()}


def _modules(folder: Path, package: str) -> Iterator[str]:
    """Modules that assign an `EXPERIMENT`, folders included; the runner and its engines need not be imported."""
    for info in pkgutil.iter_modules([str(folder)]):
        name = f"{package}.{info.name}"
        if info.ispkg:
            yield from _modules(folder / info.name, name)
        elif _declares(folder / f"{info.name}.py"):
            yield name


def _declares(file: Path) -> bool:
    return not file.exists() or DECLARATION.search(file.read_text(encoding="utf-8")) is not None


def find(name: str) -> Experiment:
    """An experiment by its name, or by reference (``module:ATTRIBUTE``); an unknown name is answered with the nearest.

    >>> find("no-such-thing")
    Traceback (most recent call last):
    ...
    layerwise.foundations.errors.NameLookupError: Unknown experiment 'no-such-thing'. Available: ...
    """
    if ":" in name:
        return from_reference(name)
    known = experiments()
    if name not in known:
        raise NameLookupError(unknown("experiment", name, known))
    return known[name]


def from_reference(reference: str) -> Experiment:
    """The experiment that ``module:ATTRIBUTE`` names; the attribute may have parts, ``module:holder.ATTRIBUTE``."""
    module, _, attribute = reference.partition(":")
    try:
        found = importlib.import_module(module)
        for part in (attribute or ATTRIBUTE).split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise NameLookupError(
            describe(
                f"{reference!r}, which could not be found ({error})",
                "module:ATTRIBUTE, where the module can be imported",
                "check the spelling, or set PYTHONPATH to the folder of the module",
            )
        ) from error
    if not isinstance(found, Experiment):
        raise InputError(
            describe(f"{reference!r}, which is a {type(found).__name__}", "an Experiment", "name its EXPERIMENT")
        )
    return found


def reference_to(experiment: Experiment) -> str | None:
    """Where an experiment is, as ``module:ATTRIBUTE``, so that another process can find it; None if nowhere."""
    for function in (experiment.run, experiment.cells, experiment.claims):
        module = getattr(function, "__module__", None)
        for name, value in list(vars(sys.modules.get(module or "", None) or object).items()):
            if value is experiment:
                return f"{module}:{name}"
    for module, loaded in list(sys.modules.items()):  # its functions may lie in modules of their own
        if module != "__main__" and vars(loaded).get(ATTRIBUTE) is experiment:
            return f"{module}:{ATTRIBUTE}"
    return None
