"""Errors of the library: each says what was given, what was expected, and what to do.

Every class derives from `LayerwiseError`, so one ``except`` catches all of them, and from the built-in
exception a caller would expect (`ValueError`, `KeyError`, ...), so existing handlers keep working.
"""

import difflib
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
    """Word an error the same way everywhere: given, expected, what to do.

    >>> print(describe("damping=-1.0", "a number ≥ 0", "pass e.g. damping=1e-3"))
    given: damping=-1.0; expected: a number ≥ 0; do: pass e.g. damping=1e-3
    """
    return f"given: {given}; expected: {expected}; do: {do}"


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """Word a name that matches nothing, with the nearest that exists.

    >>> print(unknown("layer", "haed", ["head"]))
    given: 'haed', which names no layer; expected: the name of a layer; do: did you mean 'head'? Known: head
    """
    article = "an" if kind[:1] in "aeiou" else "a"
    return describe(f"{name!r}, which names no {kind}", f"the name of {article} {kind}", nearest(str(name), known))


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as ``did you mean 'kfac'?``, or the list of what exists.

    >>> nearest("kfca", ["kfac", "diag"])
    "did you mean 'kfac'? Known: diag, kfac"
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    shown = ", ".join(names[:30]) + (", …" if len(names) > 30 else "")
    return (f"did you mean {close[0]!r}? " if close else "") + f"Known: {shown or 'none'}"
