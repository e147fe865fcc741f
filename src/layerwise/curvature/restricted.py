"""The diagonal block of some parameters, not formed: every product goes to the whole matrix."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from layerwise.curvature.matrix import SMALL, DenseMatrix, ParamMatrix
from layerwise.foundations.columns import Params, Shapes
from layerwise.foundations.vectors import ParamVector
from layerwise.layers.form import Part
from layerwise.layers.parts import own_name, own_shapes


@dataclass(frozen=True, eq=False, repr=False)
class Restricted(ParamMatrix):
    """The diagonal block of some parameters: the rest of the vector is zero."""

    whole: ParamMatrix
    parts: tuple[Part, ...]
    memory: int | None = None

    @property
    def structure(self) -> str:  # type: ignore[override]
        """Of the whole."""
        return self.whole.structure

    @property
    def shapes(self) -> Shapes:  # type: ignore[override]
        """Of these parameters."""
        return own_shapes(self.parts)

    @property
    def dtype(self) -> torch.dtype:
        """Of the whole."""
        return self.whole.dtype

    @property
    def device(self) -> torch.device:
        """Of the whole."""
        return self.whole.device

    @property
    def is_psd(self) -> bool:
        """Of the whole."""
        return self.whole.is_psd

    def _mv(self, params: Params) -> Params:
        columns = next(iter(params.values())).shape[0]
        padded = {
            k: torch.zeros(columns, *shape, dtype=self.dtype, device=self.device)
            for k, shape in self.whole.shapes.items()
        }
        for part in self.parts:
            part.of(padded).copy_(params[own_name(part)])
        out = self.whole._mv(padded)
        return {own_name(part): part.of(out) for part in self.parts}

    def _dense(self) -> DenseMatrix:
        if self.whole.numel() > SMALL:
            return super()._dense()
        whole = DenseMatrix(self.whole.to_dense(), self.whole.shapes, self.is_psd, layers={"": self.parts})
        return whole.layer("")

    def trace(self, samples: int = 64, seed: int = 0) -> Tensor:
        """Sum of the diagonal where that is exact, else an estimate."""
        diagonal = self.diagonal(samples, seed)
        return diagonal.flat().sum() if diagonal.standard_error is None else super().trace(samples, seed)

    def diagonal(self, samples: int = 64, seed: int = 0) -> ParamVector:
        """These entries of the whole's."""
        whole = self.whole.diagonal(samples, seed)
        error = None if whole.standard_error is None else self._own(whole.standard_error)
        return ParamVector(self._own(whole).dict(), error)

    def _own(self, whole: ParamVector) -> ParamVector:
        return ParamVector({own_name(part): part.of(whole.dict()) for part in self.parts})

    def layer(self, name: str) -> ParamMatrix:
        """A layer inside."""
        return self.whole.layer(name)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Restricted":
        """Another device or dtype."""
        return replace(self, whole=self.whole.to(device, dtype))
