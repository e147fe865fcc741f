"""`Batch`: one batch of data, and what must hold of it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from layerwise.foundations.asked import Checks, not_finite
from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.types import Tree, leaves


@dataclass(frozen=True)
class Batch:
    """One batch of data, and its number."""

    x: Tree
    y: object
    mask: Tensor | None
    number: int
    part: tuple[int, int] | None = None
    """First example and number of examples of the whole, where this is a part of a batch."""
    found_finite: tuple[int, ...] = ()
    """Versions of its tensors at which all their values were found finite, such as those of what this was cut from."""

    def versions(self) -> tuple[int, ...]:
        """How often each tensor has been written to, if that is known; a view has the version of what it is of."""
        tensors = list(leaves((self.x, self.y)))
        return () if any(t.is_inference() for t in tensors) else tuple(t._version for t in tensors)


def add_batch_checks(checks: Checks, batch: Batch) -> None:
    """Finiteness of inputs and targets, and a mask of zeros and ones."""
    mask, number = batch.mask, batch.number
    if batch.found_finite and mask is None and batch.found_finite == batch.versions():
        return
    if mask is not None and mask.dtype != torch.bool:
        checks.add(((mask != 0) & (mask != 1)).any(), lambda: _odd_mask(number))
    target = batch.y if mask is None else None  # where a target is masked it may be anything
    for tensor in leaves((batch.x, target)):
        if tensor.is_floating_point():
            checks.add(not_finite(tensor), lambda tensor=tensor: _odd_values(tensor, number))


def add_output_check(checks: Checks, f: Tensor, number: int) -> None:
    """Finiteness of the model's output."""
    checks.add(not_finite(f), lambda: _odd_output(number))


def _odd_mask(number: int) -> InputError:
    return InputError(
        describe(
            f"batch {number} with a third entry whose values are not all 0 or 1",
            "a mask (x, y, mask): which positions count",
            "pass (x, y) alone, or a bool mask",
        )
    )


def _odd_values(tensor: Tensor, number: int) -> InputError:
    bad = int((~torch.isfinite(tensor)).sum())
    return InputError(
        describe(
            f"batch {number} with {bad} values that are NaN or infinite",
            "finite inputs and targets",
            "clean the data or leave the batch out; nothing of this call was kept",
        )
    )


def _odd_output(number: int) -> InputError:
    return InputError(
        describe(
            f"batch {number}, on which the model's output is NaN or infinite",
            "finite outputs",
            "check the parameters and the inputs; nothing of this call was kept",
        )
    )
