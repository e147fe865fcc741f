"""A number that knows how uncertain it is."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


class Estimate(torch.Tensor):
    """A 0-dim tensor, the mean of random samples, with its standard error.

    It is used like any tensor; results of operations on it are plain tensors, since the error of a function
    of an estimate is not that of the estimate.

    Attributes:
        standard_error: of the mean; infinite for one sample, 0 for an exact value. Where one eigenvalue
            dominates the draws are skewed, and below about 50 samples the error shown is too small.
        samples: how many independent samples entered the error.

    >>> Estimate(torch.tensor(12.3456), standard_error=0.41, samples=32)
    12.35 ± 0.41 (32 samples)
    """

    standard_error: float
    samples: int
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, value: Float[Tensor, ""], *, standard_error: float, samples: int) -> "Estimate":
        """Wrap a value; it shares memory with the tensor given."""
        return torch.Tensor._make_subclass(cls, value.detach())

    def __init__(self, value: Float[Tensor, ""], *, standard_error: float, samples: int) -> None:
        self.standard_error = float(standard_error)
        self.samples = int(samples)

    @classmethod
    def from_samples(cls, draws: Float[Tensor, "s"], *, offset: float = 0.0) -> "Estimate":
        """The mean of independent draws plus a known part, with error ``std / √s``.

        >>> Estimate.from_samples(torch.tensor([1.0, 3.0])).standard_error
        1.0
        """
        s = draws.numel()
        # float64 on the host: a mean of large values must not lose what the draws have in common.
        x = draws.detach().cpu().double()
        error = float(x.std(correction=1)) / math.sqrt(s) if s > 1 else math.inf
        value = (x.mean() + offset).to(device=draws.device, dtype=draws.dtype)
        return cls(value, standard_error=error, samples=s)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        value, error = float(self), self.standard_error
        if not math.isfinite(value) or not math.isfinite(error) or error <= 0:
            return f"{value:.6g} ± {error:.2g} ({self.samples} samples)"
        digits = 1 - math.floor(math.log10(error))  # two digits of the error, and the value to match
        if -4 <= digits <= 8:
            places = max(0, digits)
            return f"{value:.{places}f} ± {error:.{places}f} ({self.samples} samples)"
        return f"{value:.6g} ± {error:.2g} ({self.samples} samples)"

    def __format__(self, format_spec: str) -> str:
        return format(float(self), format_spec) if format_spec else repr(self)

    def __reduce_ex__(self, proto: Any) -> Any:
        return _rebuild, (self.detach().clone(), self.standard_error, self.samples)

    def __deepcopy__(self, memo: dict) -> "Estimate":
        return _rebuild(self.detach().clone(), self.standard_error, self.samples)


def _rebuild(value: Tensor, standard_error: float, samples: int) -> Estimate:
    return Estimate(value, standard_error=standard_error, samples=samples)
