"""In which precision averages in an eigenbasis are kept; they are computed in that of the factors.

EKFAC's scalings, where they are measured, and the momentum of EKFAC and SOAP are kept in bfloat16 where the kernels
that read and write them run. To store one rounds it by at most 2⁻⁸ of itself; an average gathers that from step to
step, hence `MOST_DECAY` and `MOST_MOMENTUM`. Sums over examples are made in float32 before.
"""

import torch

from layerwise.optim.cuda.triton.device import available
from layerwise.optim.rule import Shape

MOST_DECAY = 0.8
"""Of running scalings in bfloat16. An average stops where what is new, times 1 − decay, is less than half of the last
bit: with the same gradient at every step that leaves up to 2⁻⁸/(1 − decay) of a scaling. Directions are then wrong by
5e-3 (decay 0.75), 7e-3 (0.8) or 1.2e-2 (0.875), where 1e-2 is allowed; see `docs/decisions/0015`."""
MOST_MOMENTUM = 0.95
"""Of a momentum in bfloat16. It errs by 0.4 % (0.9) to 0.5 % (0.95) where gradients vary by a tenth of their mean or
more, by 1 to 6 % with 0.99; by 2.5 % and 5 % where they are always the same."""


def scalings_dtype(shape: Shape, scaling: str, decay: float) -> torch.dtype:
    """Of a stack whose factors are treated by products.

    The factors' own products ("none") are not rounded: they are what the rule says, where moments that are measured are
    known to some tenths.
    """
    return _rounded(shape, scaling == "batch" or (scaling == "running" and decay <= MOST_DECAY))


def momentum_dtype(shape: Shape, decay: float) -> torch.dtype:
    """Of a stack whose gradients are of half precision."""
    return _rounded(shape, decay <= MOST_MOMENTUM)


def _rounded(shape: Shape, enough: bool) -> torch.dtype:
    return torch.bfloat16 if enough and shape.dtype == torch.float32 and available(shape.device) else shape.dtype
