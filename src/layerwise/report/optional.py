"""The packages that pages are made with: imported when used, with a word on how to get them."""

from typing import Any

from layerwise.foundations import optional


def require(module: str) -> Any:
    """Import a module of matplotlib or jinja2.

    >>> require("json").loads("1")
    1
    """
    return optional.require(module, module.split(".")[0], "the report", extra="report")
