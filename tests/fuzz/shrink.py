"""Makes a failing case smaller, one thing at a time, as long as it fails in the same way."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cases import Spec, make
from parts import BLOCKS
from plans import CALLS
from verdicts import Verdict, judge, worst


def shrunk(spec: Spec, verdict: Verdict) -> tuple[Spec, Verdict]:
    """The smallest spec found whose worst call has the same word, and its verdict."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(spec):
            found = _verdict(candidate)
            if found is not None and found.word == verdict.word:
                spec, verdict, smaller = candidate, found, True
                break
    return spec, verdict


def _verdict(spec: Spec) -> Verdict | None:
    try:
        return worst(judge(make(spec), stop=True))
    except Exception:  # not every smaller spec is a case
        return None


def _smaller(spec: Spec) -> Iterator[Spec]:
    """Every spec with one thing less; the most telling things first."""
    for i in range(len(spec.plan)):
        yield replace(spec, plan=spec.plan[:i] + spec.plan[i + 1 :])
    for i in range(len(spec.blocks)):
        yield replace(spec, blocks=spec.blocks[:i] + spec.blocks[i + 1 :])
    for i in range(len(spec.sizes)):
        if len(spec.sizes) > 1:
            yield _without_batch(spec, i)
    wanted = {BLOCKS[b].wants for b in spec.blocks}
    for option in spec.options:
        if option not in wanted:
            yield replace(spec, options=tuple(o for o in spec.options if o != option))
    for i in range(len(spec.frozen)):
        yield replace(spec, frozen=spec.frozen[:i] + spec.frozen[i + 1 :])
    simple = {"head": "linear", "stem": "none", "likelihood": "gaussian", "precision": "float64", "C": 2, "D": 2}
    for name, value in simple.items():
        if getattr(spec, name) != value:
            yield replace(spec, **{name: value})
    for i, (n, t) in enumerate(spec.sizes):
        for size in ((n - 1, t), (n, t - 1)):
            fixed = any(BLOCKS[b].fixed for b in spec.blocks) or "mask" in spec.options
            if min(size) >= 1 and size[1] >= 2 and not (fixed and size[1] != t and len(spec.sizes) > 1):
                yield replace(spec, sizes=(*spec.sizes[:i], size, *spec.sizes[i + 1 :]))


def _without_batch(spec: Spec, number: int) -> Spec:
    """Calls on it are made on its neighbour; later ones keep theirs."""

    def moved(step: tuple[Any, ...]) -> tuple[Any, ...]:
        if step[0] not in CALLS or step[-1] < number or step[-1] <= 0:
            return step
        return (*step[:-1], step[-1] - 1)

    sizes = spec.sizes[:number] + spec.sizes[number + 1 :]
    return replace(spec, sizes=sizes, plan=tuple(moved(step) for step in spec.plan))
