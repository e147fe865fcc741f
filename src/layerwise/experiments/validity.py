"""Whether a configuration can be run: its types, finite numbers, and the signs that its presets show.

A wrong value is refused before anything is run or written. What holds for one field is derived, so that experiments
need not repeat it: a number must have the sign that it has in the presets (positive, or zero and more, or any), and a
tuple must not be empty unless it is in a preset. An experiment declares exceptions in `Experiment.ranges`, and
relations between fields in `Experiment.check`.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from layerwise.foundations.errors import InputError, describe

Range = tuple[float | int, float | int]
"""Least and largest value, both allowed."""


def check_values(config: Any, presets: Sequence[Any], ranges: Mapping[str, Range]) -> None:
    """Refuse the first field whose value cannot be right, in one sentence."""
    check_types(config)
    for field in dataclasses.fields(config):
        value, usual = getattr(config, field.name), [getattr(preset, field.name) for preset in presets]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            check_values(value, [other for other in usual if type(other) is type(value)], ranges)
            continue
        if isinstance(value, tuple | list) and not value and all(usual):
            raise InputError(
                describe(f"{field.name} with nothing in it", "at least one value", _example(field.name, usual))
            )
        least, largest, open_below = _range(usual, ranges.get(field.name))
        for number in _numbers(value):
            below = number <= least if open_below else number < least
            if not math.isfinite(number) or below or number > largest:
                whole = all(isinstance(n, int) for other in usual for n in _numbers(other)) and isinstance(number, int)
                expected = _in_words(least, largest, open_below, whole)
                raise InputError(describe(f"{field.name}={number}", expected, _example(field.name, usual)))


def check_types(config: Any) -> None:
    """Refuse a value that is not of the type its field declares, such as a text in place of a number."""
    try:
        hints = typing.get_type_hints(type(config))
    except (NameError, TypeError):  # names that only its own module or function knows
        return
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not _fits(value, hints.get(field.name, Any)):
            declared = str(field.type if isinstance(field.type, str) else getattr(field.type, "__name__", field.type))
            given = f"{field.name}={value!r}" if len(repr(value)) < 80 else f"{field.name}={repr(value)[:80]}…"
            raise InputError(describe(given, f"{field.name}: {declared}", "give it the type that is declared"))


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return all(_fits(item, arguments[0]) for item in value)
        return len(value) == len(arguments) and all(map(_fits, value, arguments))
    if origin is list:
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is None or hint is type(None):
        return value is None
    return not isinstance(hint, type) or isinstance(value, hint)  # what is no type says nothing


def _numbers(value: Any) -> Iterator[float | int]:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _numbers(item)


def _range(usual: Sequence[Any], declared: Range | None) -> tuple[float | int, float | int, bool]:
    """Least, largest, and whether the least itself is refused."""
    if declared is not None:
        return declared[0], declared[1], False
    least = min((number for value in usual for number in _numbers(value)), default=-math.inf)
    if least > 0:
        return 0, math.inf, True
    return (0, math.inf, False) if least == 0 else (-math.inf, math.inf, False)


def _in_words(least: float | int, largest: float | int, open_below: bool, whole: bool) -> str:
    kind = "an integer" if whole else "a finite number"
    if math.isfinite(least) and math.isfinite(largest):
        return f"{kind} from {least:g} to {largest:g}"
    if math.isfinite(largest):
        return f"{kind} ≤ {largest:g}"
    if not math.isfinite(least):
        return kind
    if open_below and whole:
        return f"{kind} ≥ {least + 1:g}"
    return f"{kind} {'>' if open_below else '≥'} {least:g}"


def _example(name: str, usual: Sequence[Any]) -> str:
    value = next((value for value in usual if value not in (None, ())), None)
    words = " ".join(map(str, value)) if isinstance(value, tuple | list) else value
    return "give another value" if value is None else f"pass e.g. --{name.replace('_', '-')} {words}"


def check_device(device: str) -> None:
    """Raise an `InputError` for a device that torch cannot compute on here; "cpu" is not even tried."""
    if device == "cpu":
        return
    import torch  # only for who asks for another device: the command line starts without it

    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise InputError(
            describe(
                f"device={device!r}, which cannot be used here ({reason})",
                "a device of this machine",
                "pass --device cpu, or run it where there is a GPU",
            )
        ) from error
