"""Orders of calls on one model: what is remembered from one call must not show in the next.

| step | what it does |
|---|---|
| ``("fisher", structure, estimator, batch)`` | batch −1: all of them |
| ``("jacobian", "dense" or "push" or "pull", batch)`` | |
| ``("ntk", "matrix" or "product" or "cross", batch)`` | "cross": with the first batch |
| ``("moment", structure, centered, batch)`` | of the gradients |
| ``("optimizer", estimator, batch)`` | statistics of a step a batch on a copy of the model |
| ``("perturb",)``, ``("gates",)`` | parameters move in place; gates leave zero |
| ``("freeze", i)`` | requires_grad of parameter i is toggled |
| ``("flag",)``, ``("config",)`` | a plain value in the input, or on the model, is toggled |
| ``("mode",)`` | train and eval |
"""

import random
from typing import Any

from cases import Spec
from parts import BLOCKS

STRUCTURES = ("dense", "block", "diag", "lowrank", "implicit", "kfac", "ekfac", "quasidiag")
CALLS = ("fisher", "jacobian", "ntk", "moment", "optimizer")


def random_plan(spec: Spec, rng: random.Random) -> tuple[tuple[Any, ...], ...]:
    """Some calls, a change, some calls, …"""
    changes = ["perturb", "freeze"]
    changes += ["gates"] * 4 * any("rezero" in b for b in spec.blocks)
    changes += [o for o in ("flag", "config") for _ in range(4) if o in spec.options]
    if all(BLOCKS[b].train for b in spec.blocks):
        changes.append("mode")
    steps: list[tuple[Any, ...]] = []
    for part in range(rng.choice((1, 2, 2, 3))):
        if part:
            change = rng.choice(changes)
            steps.append((change, rng.randrange(8)) if change == "freeze" else (change,))
        steps += [_call(spec, rng) for _ in range(rng.choice((1, 2, 3)))]
    return tuple(steps)


def _call(spec: Spec, rng: random.Random) -> tuple[Any, ...]:
    batch = rng.randrange(len(spec.sizes))
    what = rng.choices(CALLS, (10, 4, 3, 1, 2))[0]
    if what == "fisher":
        structure = rng.choices(STRUCTURES, (4, 2, 3, 3, 3, 2, 1, 1))[0]
        return what, structure, rng.choice(("exact", "exact", "empirical")), rng.choice((-1, -1, batch))
    if what == "jacobian":
        return what, rng.choice(("dense", "push", "pull")), batch
    if what == "ntk":
        same = len({t for _, t in spec.sizes}) == 1 or spec.head in ("linear", "last")
        return what, rng.choice(("matrix", "product", "cross") if same else ("matrix", "product")), batch
    if what == "moment":
        return (
            what,
            rng.choice(STRUCTURES[:5]),
            rng.random() < 0.5 and spec.precision == "float64",
            rng.choice((-1, batch)),
        )
    return what, "empirical", rng.choice((-1, batch))
