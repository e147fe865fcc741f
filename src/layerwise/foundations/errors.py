"""Errors of the library: each says in sentences what is wrong, what was expected, and what to do.

Every class derives from `LayerwiseError`, so one ``except`` catches all of them, and from the built-in
exception a caller would expect (`ValueError`, `KeyError`, ...), so existing handlers keep working.
"""

import difflib
import re
from collections.abc import Iterable


class LayerwiseError(Exception):
    """Base class of all errors that the library raises on purpose."""


class InputError(LayerwiseError, ValueError):
    """An argument or a batch that cannot be used as given."""


class NameLookupError(LayerwiseError, KeyError):
    """A name (of a layer, structure, likelihood, ...) that matches nothing."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


class UnsupportedError(LayerwiseError, TypeError):
    """A combination that does not exist; the message names those that do."""


class InteractionError(LayerwiseError, ValueError):
    """Examples of a batch influence one another, so per-example quantities are not defined."""


class MemoryBudgetError(LayerwiseError, MemoryError):
    """A result that would not fit in the memory allowed."""


class NumericalError(LayerwiseError, ArithmeticError):
    """A factor that is not finite, a decomposition that does not converge, a matrix that is not definite."""


class FileFormatError(LayerwiseError, OSError):
    """A file that cannot be written, or a saved one that is truncated, foreign or of another version."""


def describe(given: str, expected: str, do: str) -> str:
    """Word an error in three sentences: what was given, what was expected, what to do.

    >>> print(describe("damping=-1.0", "a number ≥ 0", "pass e.g. damping=1e-3"))
    Got damping=-1.0. Expected a number ≥ 0. Pass e.g. damping=1e-3.
    """
    advice = do[:1].upper() + do[1:] if _OPENS_WITH_A_WORD.match(do) else do
    return " ".join(map(_stopped, (f"Got {given}", f"Expected {expected}", advice)))


def unknown(kind: str, name: object, known: Iterable[object], where: str = "") -> str:
    """Word a name that matches nothing, with the nearest that exists; `where` says what it was looked up in.

    >>> print(unknown("layer", "haed", ["head", "body"]))
    Unknown layer 'haed'. Did you mean 'head'? Available: body, head.
    >>> print(unknown("option", "varianse", ["variance"], where="of likelihood 'gaussian'"))
    Unknown option 'varianse' of likelihood 'gaussian'. Did you mean 'variance'? Available: variance.
    """
    return _looked_up(f"{kind} {name!r}", name, known, where)


def not_one_of(option: str, value: object, known: Iterable[object], where: str = "") -> str:
    """Word the value of an option that takes one of a few names.

    >>> print(not_one_of("damping_split", "tace", ["exact", "trace", "equal"]))
    Unknown damping_split='tace'. Did you mean 'trace'? Available: equal, exact, trace.
    """
    return _looked_up(f"{option}={value!r}", value, known, where)


def nearest(name: object, known: Iterable[object]) -> str:
    """The nearest of the names that exist, if one is near, and what there is to choose from.

    >>> nearest("kfca", ["kfac", "diag"])
    "Did you mean 'kfac'? Available: diag, kfac."
    """
    names = {str(each): each for each in known}
    close = difflib.get_close_matches(str(name), names, n=1)
    shown = ", ".join(sorted(names)[:30]) + (", …" if len(names) > 30 else "")
    return (f"Did you mean {names[close[0]]!r}? " if close else "") + _stopped(f"Available: {shown or 'none'}")


def what_is_wrong(error: BaseException) -> str:
    """The first part of a message of this module, without the advice that follows it.

    >>> what_is_wrong(InputError(describe("damping=-1.0", "a number ≥ 0", "pass e.g. damping=1e-3")))
    'damping=-1.0'
    >>> what_is_wrong(NameLookupError(unknown("layer", "haed", ["head", "body"])))
    "Unknown layer 'haed'"
    """
    return _ADVICE.split(str(error).removeprefix("Got "), maxsplit=1)[0]


# Advice that opens with code (`opt.zero_grad()`, `init = ...`, a quoted name) keeps its first letter as it is.
_OPENS_WITH_A_WORD = re.compile(r"[a-z]+[,:;]?( (?!=)|$)")
_ADVICE = re.compile(r"\. (?:Expected |Did you mean |Available: )")


def _looked_up(what: str, name: object, known: Iterable[object], where: str) -> str:
    return f"Unknown {what} {where}".rstrip() + f". {nearest(name, known)}"


def _stopped(sentence: str) -> str:
    return sentence if sentence.endswith((".", "?", "!", "…")) else f"{sentence}."
