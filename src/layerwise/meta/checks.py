"""What a step size, a number of steps and a task must be: refused in one sentence otherwise."""

from numbers import Integral

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe

Number = int | float


def step_sizes(
    eta: Number | Tensor, *, zero: bool = False, dtype: torch.dtype = torch.float64
) -> Float[Tensor, "*shape"]:
    """Step sizes as a tensor: finite and above zero, or zero where a projected step may end there.

    >>> step_sizes(0.1).dtype
    torch.float64
    """
    found = eta if isinstance(eta, Tensor) and eta.is_floating_point() else torch.as_tensor(eta, dtype=dtype)
    good = torch.isfinite(found) & ((found >= 0) if zero else (found > 0))
    if found.numel() == 0 or not bool(good.all()):
        bad = found[~good].flatten()
        given = f"eta={bad[0].item():g}" if len(bad) else "no step size"
        raise InputError(describe(given, f"finite step sizes {'≥' if zero else '>'} 0", "pass e.g. eta=0.1"))
    return found


def whole(value: int, name: str, example: int = 40) -> int:
    """A count of steps, tasks or examples: an integer of at least one.

    >>> whole(3, "steps")
    3
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise InputError(describe(f"{name}={value!r}", "an integer ≥ 1", f"pass e.g. {name}={example}"))
    return int(value)


def finite(tensor: Tensor, name: str) -> Tensor:
    """Refuse NaN and infinity in what the caller gave.

    >>> finite(torch.ones(2), "x").tolist()
    [1.0, 1.0]
    """
    if not bool(torch.isfinite(tensor).all()):
        raise InputError(describe(f"{name} with NaN or infinite entries", "finite numbers", f"clean {name} first"))
    return tensor
