"""Packages that only data needs: imported when used, with a word on how to get them."""

import importlib
from typing import Any

from layerwise.foundations.errors import LayerwiseError, describe


class MissingPackageError(LayerwiseError, ImportError):
    """A package that is not installed; the message has the command to type."""


def require(module: str, package: str, purpose: str) -> Any:
    """Import a module of an optional package.

    >>> require("json", "json", "this example").loads("1")
    1
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            describe(
                f"no usable {package} ({error})", f"{package}, for {purpose}", "type: pip install 'layerwise[data]'"
            )
        ) from error
