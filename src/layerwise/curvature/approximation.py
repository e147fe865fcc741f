"""`Approximation`: what is kept of one layer. One file a structure; each is found by its name.

`observe` is cheap and sees every batch; `refresh` is dear (decompositions) and comes between passes; `finish`
divides the sums once and gives the operator.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from layerwise.foundations.operators import BlockOperator
from layerwise.layers.io.layer_io import LayerIO
from layerwise.layers.table import LayerSpec


@dataclass(frozen=True)
class Options:
    """Choices that structures share."""

    sharing: str = "expand"
    conv: str = "kfc"
    damping_split: str | None = None
    completion: str | None = None


@dataclass(eq=False)
class Approximation(ABC):
    """Sums over the data for one layer, and the operator made of them."""

    name: ClassVar[str]
    passes: ClassVar[int] = 1
    known: ClassVar[dict[str, type["Approximation"]]] = {}
    spec: LayerSpec
    options: Options
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:  # noqa: B027 - a structure may begin with nothing
        """Make empty sums."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in cls.__dict__:
            Approximation.known[cls.name] = cls

    @abstractmethod
    def observe(self, io: LayerIO, first: bool) -> None:
        """Add a batch; `first` says that its inputs have not been seen with other cotangents."""

    def refresh(self) -> None:  # noqa: B027 - most structures need one pass
        """What is needed before the next pass."""

    def correct(self, io: LayerIO) -> None:  # noqa: B027 - most structures need one pass
        """Add a batch in the second pass."""

    def sums(self, count: float) -> list[tuple[Tensor, float]]:
        """Sums that are to be divided in place before `finish`, each with its divisor; all layers' together."""
        return []

    @abstractmethod
    def finish(self, count: float) -> BlockOperator:
        """Divide by the number of examples (or terms)."""

    def diagonals(self) -> list[Tensor] | None:
        """Diagonals of second moments, finite only where all of the operator is; None: look at all that it stores."""
        return None

    def positions(self) -> int:
        """Rows the input factor was averaged over."""
        return 0

    @classmethod
    def bytes_needed(cls, spec: LayerSpec, itemsize: int) -> int:
        """What the statistics of a layer will take."""
        return spec.form.numel() * itemsize

    def zeros(self, *shape: int) -> Tensor:
        """An empty sum."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)
