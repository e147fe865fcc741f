"""Options of a command, read from a dataclass by tyro."""

import dataclasses
import itertools
from typing import Any, TypeVar

from layerwise.foundations.optional import require

T = TypeVar("T")


def parse(kind: type[T], argv: list[str], prog: str, description: str, default: T | None = None) -> T:
    """Fill a dataclass from the words of the command line; a mistake is explained and ends with exit code 2."""
    if not argv and default is None:
        return kind()  # nothing to read; the parser alone takes longer to import than a list takes to print
    tyro = require("tyro", "tyro", "the command line", extra="cli")
    config = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
    extra = {} if default is None else {"default": default}
    return tyro.cli(kind, args=argv, prog=prog, description=description, config=config, **extra)


def split_names(argv: list[str], valued: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Names and options apart; an option of `valued` takes the word after it along.

    >>> split_names(["head-to-head", "--out", "runs", "--json"], ("--out",))
    (['head-to-head'], ['--out', 'runs', '--json'])
    """
    names, options, taken = [], [], False
    for word in argv:
        if taken or word.startswith("-"):
            options.append(word)
            taken = not taken and word in valued
        else:
            names.append(word)
    return names, options


def value_of(argv: list[str], option: str, default: str) -> str:
    """What an option is set to, before all options are known; the last one counts.

    >>> value_of(["--preset=smoke", "--seeds", "3"], "--preset", "laptop")
    'smoke'
    """
    found = default
    for word, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        if word == option:
            found = following
        elif word.startswith(f"{option}="):
            found = word.partition("=")[2]
    return found


def joined(name: str, first: type, config: Any) -> tuple[type, Any]:
    """One flat dataclass of the options of a command and the fields of a configuration, and its defaults."""
    kind = dataclasses.make_dataclass(
        name,
        [("run", first, dataclasses.field(default_factory=first)), ("experiment", type(config), config)],
        frozen=True,
        kw_only=True,
    )
    return kind, kind(experiment=config)


def unchecked(config: Any) -> Any:
    """The same configuration without the checks of its class, which would be told in a box of the parser.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Config:
    ...     steps: int = 1
    ...     def __post_init__(self):
    ...         assert self.steps > 0
    >>> form = unchecked(Config())
    >>> form.steps, type(form)(steps=-1).steps
    (1, -1)
    """
    kind = type(config)
    if not hasattr(kind, "__post_init__"):
        return config
    same = {name: getattr(kind, name) for name in ("__doc__", "__module__", "__qualname__")}
    form = type(kind.__name__, (kind,), same | {"__post_init__": lambda self: None})
    return form(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})
