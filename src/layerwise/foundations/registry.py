"""Folders whose modules register themselves, so that a new file needs no list to be edited."""

import importlib
import pkgutil
from functools import cache


@cache
def import_folder(package: str) -> None:
    """Import every module of a package, once."""
    folder = importlib.import_module(package)
    for module in pkgutil.iter_modules(folder.__path__):
        importlib.import_module(f"{package}.{module.name}")
