"""Packages that only data needs: imported when used, with a word on how to get them."""

from typing import Any

from layerwise.foundations import optional
from layerwise.foundations.optional import MissingPackageError as MissingPackageError


def require(module: str, package: str, purpose: str) -> Any:
    """Import a module of an optional package.

    >>> require("json", "json", "this example").loads("1")
    1
    """
    return optional.require(module, package, purpose, extra="data")
