"""Registries that find what stands in their folder, so that a new file needs no list to be edited."""

import importlib
import pkgutil
from functools import cache
from typing import Generic, TypeVar

T = TypeVar("T")


class TypeRegistry(Generic[T]):
    """Values keyed by a class and found through the MRO of the class asked for.

    The modules of `package` are imported at the first look-up, not at import, so that the import graph stays
    free of cycles.
    """

    def __init__(self, package: str) -> None:
        self._package = package
        self._entries: dict[type, T] = {}
        self._discovered = False

    def add(self, key: type, value: T) -> None:
        """Register `value` for `key` and its subclasses; the newest registration wins."""
        self._entries[key] = value

    def find(self, key: type) -> T | None:
        """The value registered for the nearest base of `key`, or None."""
        self._discover()
        return next((self._entries[base] for base in key.__mro__ if base in self._entries), None)

    def registered(self, key: type) -> type | None:
        """The nearest base of `key` that has an entry, or None."""
        self._discover()
        return next((base for base in key.__mro__ if base in self._entries), None)

    def names(self) -> list[str]:
        """Names of the classes that have an entry."""
        self._discover()
        return sorted(key.__name__ for key in self._entries)

    def _discover(self) -> None:
        if not self._discovered:
            self._discovered = True
            import_folder(self._package)


@cache
def import_folder(package: str) -> None:
    """Import every module of a package, once."""
    folder = importlib.import_module(package)
    for module in pkgutil.iter_modules(folder.__path__):
        importlib.import_module(f"{package}.{module.name}")
