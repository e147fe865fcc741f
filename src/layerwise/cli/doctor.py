"""`layerwise doctor`: what holds the training of a model back."""

import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerwise.cli import exits
from layerwise.cli.options import parse, split_names
from layerwise.foundations.errors import InputError, NameLookupError, describe

ABOUT = """Examine a model on its data: what holds training back, layer by layer, and what would help.

MODULE:FUNCTION names a function without arguments that returns (model, data), (model, data, likelihood) or (model,
data, likelihood, optimizer); data is a batch (x, y) or an iterable of batches. The current folder is searched, too.

Examples: layerwise doctor my_package.train:make; layerwise doctor my_package.train:make --html doctor.html;
layerwise doctor my_package.train:make --seconds 20 --json
"""
OPTIONS = ("--seconds", "--memory", "--html", "--likelihood", "--seed")


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Options of `doctor`."""

    seconds: float = 60.0
    """How long the examination may take."""
    memory: float | None = None
    """Bytes that it may use; by default half of what is free."""
    likelihood: str | None = None
    """categorical, gaussian or bernoulli; by default that of the function, or by the type of the targets."""
    html: Path | None = None
    """Write a page to this file, too."""
    seed: int = 0
    """Of drawn labels and orders."""
    json: bool = False
    """Print one JSON document and nothing else on standard output."""


def doctor(argv: list[str]) -> int:
    """Examine what the function named gives."""
    names, words = split_names(argv, OPTIONS)
    options = parse(DoctorOptions, words, "layerwise doctor MODULE:FUNCTION", ABOUT)
    if len(names) != 1:
        raise InputError(
            describe(
                f"{len(names)} names for `layerwise doctor`",
                "one function that makes model and data, as MODULE:FUNCTION",
                "type e.g. layerwise doctor my_package.train:make",
            )
        )
    from layerwise.doctor.examination import doctor as examine

    model, data, likelihood, optimizer = _made(names[0])
    report = examine(
        model,
        data,
        options.likelihood or likelihood,
        optimizer=optimizer,
        seconds=options.seconds,
        memory=options.memory,
        seed=options.seed,
    )
    page = None if options.html is None else report.save_html(options.html)
    if options.json:
        print(report.to_json())
    else:
        print(report)
        if page is not None:
            print(f"page: {page.resolve()}")
    return exits.OK


def _made(reference: str) -> tuple[Any, Any, Any, Any]:
    """Model, data, likelihood and optimizer, the last two None where they are not given."""
    from torch import nn

    make = _function(reference)
    given = make()
    parts: tuple[Any, ...] = tuple(given) if isinstance(given, tuple | list) else ()
    if not 2 <= len(parts) <= 4 or not isinstance(parts[0], nn.Module):
        found = f"a {type(given).__name__}" if not parts else ", ".join(type(part).__name__ for part in parts)
        raise InputError(
            describe(
                f"{reference!r}, which returned {found}",
                "(model, data), (model, data, likelihood) or (model, data, likelihood, optimizer)",
                "return a model and its data",
            )
        )
    model, data, likelihood, optimizer = (*parts, None, None)[:4]
    return model, data, likelihood, optimizer


def _function(reference: str) -> Any:
    module, colon, attribute = reference.partition(":")
    if not colon or not attribute:
        raise InputError(
            describe(f"{reference!r}", "MODULE:FUNCTION, with a colon between them", f"type e.g. {module}:make")
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise NameLookupError(
            describe(
                f"{reference!r}, which could not be found ({error})",
                "MODULE:FUNCTION, where the module can be imported",
                "check the spelling, or set PYTHONPATH to the folder of the module",
            )
        ) from error
    if not callable(found):
        raise InputError(
            describe(
                f"{reference!r}, which is a {type(found).__name__}",
                "a function",
                "name the one that makes model and data",
            )
        )
    return found
