"""Assertions that say who is wrong, in what, and by how much."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Agreement:
    """Compares numbers on behalf of one subject, relative to the size of what is expected."""

    subject: str
    tol: float

    def require(self, holds: bool, what: str) -> None:
        """Fail unless a claim holds."""
        if not holds:
            raise AssertionError(f"{self.subject}: {what}")

    def close(self, got: Tensor, expected: Tensor, what: str, tol: float | None = None) -> None:
        """Fail unless two tensors have one shape and ``max |got − expected| ≤ tol · max(1, max |expected|)``."""
        self.require(
            got.shape == expected.shape,
            f"{what} has shape {tuple(got.shape)}, expected {tuple(expected.shape)}",
        )
        if not expected.numel():
            return
        got, expected = got.detach().to(torch.float64), expected.detach().to(torch.float64)
        self.require(bool(got.isfinite().all()), f"{what} is not finite")
        gap = float((got - expected).abs().max())
        scale = max(1.0, float(expected.abs().max()))
        self.require(
            gap <= (self.tol if tol is None else tol) * scale,
            f"{what} differs by {gap:.3g} (entries are up to {scale:.3g})",
        )

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Word an exception of the subject's own as a failure of this step."""
        try:
            yield
        except AssertionError as error:
            if str(error).startswith(self.subject):
                raise
            raise AssertionError(f"{self.subject}: {what} raised {error!r}") from error
        except Exception as error:
            raise AssertionError(f"{self.subject}: {what} raised {type(error).__name__}: {error}") from error
