"""How bases were lately followed, in a checkpoint: a run that goes on takes as many sweeps as without a break.

With one exception: what the device said in the last two steps (`solver.LAG`) is known in the checkpoint, where a run
that is not interrupted would hear of it later. Bases that are renewed at every step may take another number once.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from layerwise.optim.cuda.basis_monitor import BasisWatch, recalled
from layerwise.optim.rule import State
from layerwise.optim.step.stack import Stack

BASES = ("U_P", "U_Q")


def lately(stack: Stack) -> dict[str, list[list[int]]]:
    """What is known of each group of each basis."""
    found = {}
    for name in BASES:
        watch, before = stack.memory.get(name), stack.memory.get(recalled(name))
        if isinstance(watch, BasisWatch):
            found[name] = watch.numbers()
        elif before is not None:
            found[name] = before
    return found


def followed(stack: Stack) -> dict[str, State]:
    """The same by layer, as it is saved."""
    known, dtype = lately(stack), stack.shape.dtype
    return {
        spec.name: {recalled(name): torch.tensor(rows[groups], dtype=dtype) for name, rows in known.items()}
        for spec, groups in stack.slices()
    }


def recall(stack: Stack, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Let watches begin with what was saved, where all layers have some."""
    for name in BASES:
        rows = [saved.get(spec.name, {}).get(recalled(name)) for spec in stack.specs]
        if name in stack.state and all(X is not None for X in rows):
            stack.memory[recalled(name)] = [[int(x) for x in row] for X in rows for row in X.tolist()]  # type: ignore[union-attr]
