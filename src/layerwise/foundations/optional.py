"""Packages that only a part of the library needs: imported when used, with a word on how to get them."""

import importlib
from typing import Any

from layerwise.foundations.errors import LayerwiseError, describe


class MissingPackageError(LayerwiseError, ImportError):
    """A package that is not installed; the message has the command to type."""


def require(module: str, package: str, purpose: str, extra: str) -> Any:
    """Import a module of an optional package; `extra` is the part of this library that asks for it.

    >>> require("json", "json", "this example", extra="report").loads("1")
    1
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            describe(
                f"no usable {package} ({error})", f"{package}, for {purpose}", f"type: pip install 'layerwise[{extra}]'"
            )
        ) from error
