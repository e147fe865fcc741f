"""One look for each algorithm on all pages: a hue, a marker and, where an algorithm is drawn twice, a dash.

The hues keep the idea of Okabe and Ito (Color Universal Design, 2008) in two sets, for light and for dark pages: each
stands out from its page by 3:1 or more, and any two stay further apart than the closest of their original eight, for
ordinary sight and for the three kinds of colour blindness. Hue is never the only difference: markers and dashes differ.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

HUES = {
    "ink": ("#1b1f24", "#e6e9ec"),
    "blue": ("#0047a9", "#4568d2"),
    "red": ("#782006", "#b5502a"),
    "green": ("#008070", "#20a165"),
    "pink": ("#ea3ca6", "#d675c9"),
    "orange": ("#b3560d", "#c4b19b"),
    "sky": ("#3f98de", "#51c8ff"),
    "sand": ("#909b20", "#ffd647"),
}
"""From a name to the colour on a light and on a dark page."""

PAPER = ("#ffffff", "#15181c")
"""The page itself, light and dark."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
DASHES = ("solid", (0, (5, 1.6)), (0, (1.2, 1.4)), (0, (6, 1.6, 1.2, 1.6)), (0, (9, 2.5)))
THEORY = (0, (3.2, 1.8))
"""The dash of a curve that is no run: a limit, a bound, a prediction."""

_KNOWN = {
    "kfac": ("blue", "o"),
    "ngd": ("sky", "D"),
    "dfw": ("green", "s"),
    "adam": ("pink", "^"),
    "sgd": ("orange", "v"),
    "amgd": ("red", "P"),
    "amgd bn": ("sand", "X"),
    "min min": ("ink", "*"),
    "ekfac": ("blue", "<"),
    "foof": ("green", "D"),
    "loco prop": ("green", "^"),
    "shampoo": ("red", "s"),
    "soap": ("pink", "o"),
    "muon": ("sand", "D"),
    "spectral": ("sand", "o"),
    "mahalanobis": ("sky", "X"),
    "sign": ("orange", "s"),
}
_SPELLINGS = {
    "k fac": "kfac",
    "ek fac": "ekfac",
    "locoprop": "loco prop",
    "minmin": "min min",
    "altminmin": "min min",
    "alt min min": "min min",
    "amgd batch norm": "amgd bn",
    "amgd batchnorm": "amgd bn",
    "natural gradient": "ngd",
}
_NEUTRAL = {"theory", "bound", "floor", "limit", "target", "prediction", "noise"}


@dataclass(frozen=True)
class Look:
    """How a curve is drawn."""

    hue: str
    marker: str
    dash: str | tuple = "solid"


def algorithm(label: str) -> str:
    """The algorithm that a label speaks of, or the label itself in lower case.

    >>> algorithm("K-FAC, lr 1e-2"), algorithm("exact NGD"), algorithm("AMGD_BN (whiten_pop)"), algorithm("Width 64")
    ('kfac', 'ngd', 'amgd bn', 'width 64')
    """
    words = " ".join(re.findall(r"[a-z0-9]+", label.casefold()))
    names = sorted([*_KNOWN, *_SPELLINGS], key=len, reverse=True)
    found = [(where.start(), name) for name in names if (where := re.search(rf"\b{name}\b", words))]
    if not found:
        return words or label.casefold()
    first = min(start for start, _ in found)
    name = next(name for start, name in found if start == first)  # the longest that begins there
    return _SPELLINGS.get(name, name)


def look(label: str) -> Look:
    """The look of an algorithm: fixed for those known here, drawn from the name (always the same) for others.

    >>> look("KFAC") == look("kfac 1e-2"), look("noise floor").hue
    (True, 'ink')
    """
    name = algorithm(label)
    if name in _KNOWN:
        return Look(*_KNOWN[name])
    if _NEUTRAL & set(name.split()):
        return Look("ink", "o")
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    hues = [hue for hue in HUES if hue != "ink"]
    return Look(hues[number % len(hues)], MARKERS[number // len(hues) % len(MARKERS)])


def looks(labels: Iterable[str]) -> dict[str, Look]:
    """The looks of all curves of a figure; labels that would look alike differ in dash and marker.

    >>> two = looks(["NGD 1e-2", "NGD 1e-4"])
    >>> [one.hue for one in two.values()], two["NGD 1e-2"].dash, two["NGD 1e-4"].dash != "solid"
    (['sky', 'sky'], 'solid', True)
    """
    plain = {label: look(label) for label in labels}
    taken = {one.marker for one in plain.values()}
    given: dict[str, Look] = {}
    for label, one in plain.items():
        marker, repeat = one.marker, sum(other.hue == one.hue for other in given.values())
        if any((other.hue, other.marker) == (one.hue, marker) for other in given.values()):
            marker = next((free for free in MARKERS if free not in taken), marker)
            taken.add(marker)
        given[label] = Look(one.hue, marker, DASHES[repeat % len(DASHES)])
    return given


def css_name(hue: str) -> str:
    """The CSS variable that holds a hue, so that one drawing serves light and dark pages.

    >>> css_name("blue")
    '--hue-blue'
    """
    return f"--hue-{hue}"
