"""`Experiment`: one file declares a paper's figure or theorem: configuration, cells, claims and figures."""

import dataclasses
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from layerwise.experiments.claims import Claim
from layerwise.experiments.figures import Figure
from layerwise.experiments.validity import Range, check_device, check_types, check_values
from layerwise.foundations.errors import InputError, LayerwiseError, NameLookupError, describe, unknown

PRESETS = ("smoke", "laptop", "paper")
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is run as one piece and recorded as one piece: a setting, with all seeds that are still missing."""

    key: str
    """Unique within an experiment and preset, such as "trace/kfac"; stable between versions."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What distinguishes this cell, as plain values."""
    random: bool = True
    """False where no seed enters, so that all seeds agree; where one does, seeds that agree bit by bit are reported."""

    def __post_init__(self) -> None:
        if not self.key or not self.key.isprintable():
            raise InputError(describe(f"cell key {self.key!r}", "printable text", 'name it, such as "trace/kfac"'))


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one seed of a cell: what becomes one line of the records."""

    seed: int
    values: Mapping[str, Any]
    """Single numbers (and short strings)."""
    series: Mapping[str, Sequence[float | int]] = field(default_factory=dict)
    """Curves: lists of equal length, such as "iteration" and "dist"."""

    def __post_init__(self) -> None:
        lengths = {name: len(column) for name, column in self.series.items()}
        if len(set(lengths.values())) > 1:
            raise InputError(describe(f"series of lengths {lengths}", "one length", "give every series all its points"))


def nothing_more(config: Any) -> None:
    """The `check` of an experiment whose fields go together as they are."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A figure, table or theorem that can be run and checked with one command."""

    name: str
    """What the user types, such as "head-to-head"."""
    title: str
    paper: str
    figure: str
    summary: str
    """A few sentences: what is shown, and how the paper's text was read where it is ambiguous."""
    presets: Mapping[str, Any]
    """"smoke", "laptop" and "paper", each a frozen keyword-only dataclass with a field `seeds: int`."""
    cells: Callable[[Any], Sequence[Cell]]
    """From a configuration to what is swept."""
    run: Callable[[Any, Cell, Sequence[int]], Iterable[Row]]
    """Runs a cell for some seeds, all at once where the study can (one tensor program); the result of a seed must not
    depend on which others run beside it."""
    claims: Callable[[Any], Sequence[Claim]]
    figures: Callable[[Any, Sequence[Record]], Sequence[Figure]]
    cost: str = ""
    """About how long presets take, in words."""
    ranges: Mapping[str, Range] = field(default_factory=dict)
    """Least and largest value of a field, where it may differ from what its presets show: by default a number that is
    positive in all presets must be so, one that is zero in some may not be negative, and all must be finite."""
    whole_cells: bool = False
    """Whether seeds of a cell share work, such as a search for options: processes are then given all of them."""
    check: Callable[[Any], object] = nothing_more
    """Raises an `InputError` for fields that do not go together, such as k > dx; called before anything is run."""

    def __post_init__(self) -> None:
        def refuse(given: str, expected: str, do: str) -> None:
            raise InputError(describe(f"experiment {self.name!r} with {given}", expected, do))

        if not NAME.fullmatch(self.name):
            refuse("a name of another form", "lower-case words joined by dashes", 'name it like "head-to-head"')
        if sorted(self.presets) != sorted(PRESETS):
            refuse(f"presets {sorted(self.presets)}", f"the presets {', '.join(PRESETS)}", "declare all three")
        for preset, config in self.presets.items():
            if not dataclasses.is_dataclass(config) or isinstance(config, type):
                refuse(f"preset {preset} = {config!r}", "a dataclass instance", "make it a frozen dataclass")
            if not _is_frozen(config) or type(config) is not type(self.presets["smoke"]):
                refuse(
                    f"preset {preset} of another kind",
                    "frozen dataclasses of one class",
                    "use one @dataclass(frozen=True)",
                )
            seeds = getattr(config, "seeds", None)
            if not isinstance(seeds, int) or seeds < 1:
                refuse(f"preset {preset} with seeds={seeds!r}", "an integer field seeds ≥ 1", "add seeds: int")
            plain(config)
        unknown_fields = set(self.ranges) - _field_names(self.presets["smoke"])
        if unknown_fields:
            refuse(f"ranges of {', '.join(sorted(unknown_fields))}", "ranges of its fields", "correct the names")

    def preset(self, name: str) -> Any:
        """The configuration of a preset; an unknown name is answered with the nearest."""
        if name not in self.presets:
            raise NameLookupError(unknown("preset", name, self.presets))
        return self.presets[name]

    def refuse_bad(self, config: Any, here: bool = True) -> None:
        """Raise an `InputError`, in one sentence, for a configuration that cannot be run.

        Whether there is its device is only known where it is run `here`, not on other machines.
        """
        if type(config) is not type(self.presets["smoke"]):
            raise InputError(
                describe(
                    f"a configuration of type {type(config).__name__} for {self.name!r}",
                    f"a {type(self.presets['smoke']).__name__}",
                    "make it from a preset, with dataclasses.replace",
                )
            )
        check_values(config, list(self.presets.values()), self.ranges)
        if here:
            check_device(getattr(config, "device", "cpu"))
        for what in (self.check, self.cells, self.claims):
            try:
                what(config)
            except LayerwiseError:
                raise
            except Exception as error:  # a value that nobody foresaw; better now than after an hour
                name = getattr(what, "__name__", "check")
                raise InputError(
                    describe(
                        f"settings of {self.name!r} that `{name}` cannot take ({type(error).__name__}: {error})",
                        "settings that go together",
                        f"compare with those of a preset: layerwise run {self.name} --help",
                    )
                ) from error

    def cells_of(self, config: Any) -> list[Cell]:
        """The cells of a configuration, checked to have keys of their own."""
        cells = list(self.cells(config))
        twice = sorted(key for key, times in Counter(cell.key for cell in cells).items() if times > 1)
        if twice or not cells:
            raise InputError(
                describe(
                    f"experiment {self.name!r} whose cells are {', '.join(map(repr, twice)) or 'none'}"
                    + (" twice" if twice else ""),
                    "at least one cell, each key once",
                    "correct the function `cells`",
                )
            )
        return cells


def _is_frozen(config: Any) -> bool:
    return config.__dataclass_params__.frozen


def _field_names(config: Any) -> set[str]:
    """Of a configuration and of those inside it."""
    inner = [getattr(config, f.name) for f in dataclasses.fields(config)]
    nested = [_field_names(value) for value in inner if dataclasses.is_dataclass(value) and not isinstance(value, type)]
    return {f.name for f in dataclasses.fields(config)}.union(*nested)


def seeds_of(config: Any, first: int = 0) -> list[int]:
    """The seeds that a configuration asks for: `first`, `first` + 1, …"""
    if not isinstance(config.seeds, int) or config.seeds < 1:
        raise InputError(describe(f"seeds={config.seeds!r}", "an integer ≥ 1", "pass e.g. --seeds 5"))
    if first < 0:
        raise InputError(describe(f"first seed {first}", "an integer ≥ 0", "pass e.g. --first-seed 1000"))
    return list(range(first, first + config.seeds))


def plain(config: Any) -> dict[str, Any]:
    """A configuration as plain values: numbers, text, None, and lists and dictionaries of them.

    >>> @dataclass(frozen=True, kw_only=True)
    ... class Config:
    ...     seeds: int = 2
    ...     scales: tuple[str, ...] = ("none", "trace")
    >>> plain(Config())
    {'seeds': 2, 'scales': ['none', 'trace']}
    """
    return {f.name: _plain(getattr(config, f.name), f.name) for f in dataclasses.fields(config)}


def _plain(value: Any, name: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_plain(item, name) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(value)
    raise InputError(
        describe(
            f"configuration field {name!r} of type {type(value).__name__}",
            "numbers, text, None, tuples and dataclasses of them",
            "name the thing in the configuration and make it in `run`",
        )
    )


def restore(default: Any, values: Mapping[str, Any]) -> Any:
    """The inverse of `plain`: a configuration like `default` with the values of a manifest.

    >>> @dataclass(frozen=True, kw_only=True)
    ... class Config:
    ...     seeds: int = 2
    ...     scales: tuple[str, ...] = ("none", "trace")
    >>> restore(Config(), {"seeds": 5, "scales": ["max"]})
    Config(seeds=5, scales=('max',))
    """
    known = {f.name for f in dataclasses.fields(default)}
    if known != set(values):
        raise InputError(
            describe(
                f"a recorded configuration with other fields ({', '.join(sorted(known ^ set(values)))})",
                f"the fields of {type(default).__name__}",
                "it is of another version: run the experiment again and move the old records away",
            )
        )
    restored = type(default)(**{name: _restored(getattr(default, name), value) for name, value in values.items()})
    check_types(restored)
    return restored


def _restored(default: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(default) and isinstance(value, Mapping):
        return restore(default, value)
    if isinstance(value, list) and not isinstance(default, list):
        return tuple(_restored(None, item) for item in value)
    return value


def digest(experiment: str, config: Any) -> str:
    """Eight hexadecimal digits for what is run; the number of seeds is left out, so that more of them extend a run."""
    fields = {name: value for name, value in plain(config).items() if name != "seeds"}
    text = json.dumps([experiment, fields], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
