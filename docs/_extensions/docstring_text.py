"""Docstrings are written to be read in a terminal; what reStructuredText would take for markup is escaped here.

``|x|`` is an absolute value and not a substitution, ``*args`` no emphasis, ``θ_`` no link. Literals and examples stay
as they are.
"""

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the tests use this module where Sphinx is not installed
    from sphinx.application import Sphinx

LITERAL = re.compile(r"(``.*?``|`[^`]*`)", re.DOTALL)
MARKUP = re.compile(r"[|*_\\]")


def escaped(lines: list[str]) -> list[str]:
    """Lines with markup escaped, but for literals, examples and blocks after ``::``.

    >>> escaped(["the norm |x|, with ``|y|``"])
    ['the norm \\\\|x\\\\|, with ``|y|``']
    """
    out, verbatim, literal = [], False, None
    text = LITERAL.split("\n".join(lines))
    joined = "".join(part if k % 2 else _outside(part) for k, part in enumerate(text)).split("\n")
    for plain, changed in zip(lines, joined, strict=True):
        indent = len(plain) - len(plain.lstrip())
        if plain.lstrip().startswith(">>>"):
            verbatim = True
        elif not plain.strip():
            verbatim = False
        if literal is not None and plain.strip() and indent <= literal:
            literal = None
        out.append(plain if verbatim or literal is not None else changed)
        if literal is None and not verbatim and plain.rstrip().endswith("::"):
            literal = indent
    return out


def _outside(text: str) -> str:
    return MARKUP.sub(lambda found: "\\" + found.group(0), text)


def process(app: "Sphinx", what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Before napoleon reads it.

    Of an attribute napoleon takes what stands before the first colon for a type, unless a line comes first: here an
    escaped space, which shows as nothing.
    """
    lines[:] = (["\\ "] if what in ("attribute", "property") else []) + escaped(lines)


def setup(app: "Sphinx") -> dict[str, bool]:
    """Listen, before napoleon does."""
    app.connect("autodoc-process-docstring", process, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
