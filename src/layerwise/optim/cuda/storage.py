"""Matrices that every step multiplies by, in fp16: where a GPU's tensor cores multiply them.

Split fp16 (2×fp16) is a pair (hi, lo) with a power of two for each group. A basis is one half, of a power of two that
is always the same, see `linalg.orthogonal`: products with it rely on that. Inverses may be packed,
``[K, 2, T, 16, 16]``, and are unpacked whenever they are asked for. What is saved is float32 without padding, so that a
checkpoint does not depend on the device.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.optim.cuda.linalg import moments_in_new_basis, packed_fp16, two_sided_product
from layerwise.optim.cuda.linalg.fp16 import Half, HalfPair
from layerwise.optim.cuda.linalg.orthogonal import BASIS_SCALE, basis_half
from layerwise.optim.cuda.linalg.split_fp16 import halved, power_of_two_scale, scaled_product, split
from layerwise.optim.cuda.scaled import Scaled, unscaled
from layerwise.optim.cuda.triton import splits
from layerwise.optim.cuda.triton.device import MOST_MATRICES, available

ALL = slice(None)
Stored = Tensor | HalfPair | Half


@dataclass
class StoredMatrix:
    """A matrix of each group, as it is kept."""

    data: Tensor
    """``[K, h, n, n]``, h = 2 for split fp16 (hi, lo); or packed, ``[K, h, T, 16, 16]``."""
    scale: Tensor
    """``[K]``."""
    orthogonal: bool = False
    """Whether it is a basis."""

    @classmethod
    def keep(cls, X: Tensor, halves: int, *, triangle: bool = False) -> "StoredMatrix":
        """Begin to keep a matrix: in fp16 (1), or in split fp16 (2); one `triangle` of it."""
        ones = torch.ones(len(X), dtype=torch.float32, device=X.device)
        if triangle:
            found = cls(packed_fp16.zeros(len(X), halves, X.shape[-1], X.device), ones)
        else:
            found = cls(torch.zeros(len(X), halves, *X.shape[1:], dtype=torch.float16, device=X.device), ones)
        # As refreshes write, whose kernels look at a mask.
        found.write(ALL, X, torch.ones(len(X), dtype=torch.bool, device=X.device))
        return found

    @classmethod
    def basis(cls, U: Tensor) -> "StoredMatrix":
        """Begin to keep a basis. Once: no kernel is compiled for it."""
        scale = torch.full((len(U),), BASIS_SCALE, dtype=torch.float32, device=U.device)
        return cls((BASIS_SCALE * U).half().unsqueeze(1), scale, orthogonal=True)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """As they are stored."""
        return {name: self.data, f"{name}_scale": self.scale}

    def narrow(self, groups: slice) -> "StoredMatrix":
        """Some groups, over the same memory."""
        return StoredMatrix(self.data[groups], self.scale[groups], self.orthogonal)

    def clone(self) -> "StoredMatrix":
        """A copy."""
        return StoredMatrix(self.data.clone(), self.scale.clone(), self.orthogonal)

    def matrix(self, groups: slice = ALL) -> HalfPair | Half:
        """As it is multiplied; of packed fp16, squares for the moment."""
        halves, scale = self.data[groups], self.scale[groups]
        halves = packed_fp16.unpack(halves) if packed_fp16.is_packed(halves) else halves
        return Half(halves[:, 0], scale) if halves.shape[1] == 1 else HalfPair(halves[:, 0], halves[:, 1], scale)

    def half(self, groups: slice = ALL) -> Half:
        """A basis, as it is multiplied."""
        return Half(self.data[groups][:, 0], self.scale[groups])

    def value(self, groups: slice = ALL) -> Tensor:
        """In float32."""
        found = self.matrix(groups)
        return found.hi.float() / found.scale[:, None, None] if isinstance(found, Half) else found.value()

    def write(self, groups: slice, X: Tensor | Half, good: Tensor | None = None) -> None:
        """Replace some groups; where `good` is false they keep what they have. A half is one of the same scale."""
        halves, scale = self.data[groups], self.scale[groups]
        if self.orthogonal:
            half = X if isinstance(X, Half) else basis_half(X)
            moments_in_new_basis.put_(halves[:, 0], half.hi, good)
            return
        assert isinstance(X, Tensor)
        largest = two_sided_product.row_bound(X) if halves.shape[1] == 1 else None
        if largest is not None:  # an inverse of almost nothing has entries for which there is no scale
            finite = torch.isfinite(largest)
            good = finite if good is None else good & finite
        if packed_fp16.is_packed(halves):
            packed_fp16.put_(halves, scale, X, good, largest)
        elif _by_kernels(X) and halves.shape[1] == 2:
            splits.split(X, out=HalfPair(halves[:, 0], halves[:, 1], scale), where=good)
        elif _by_kernels(X):
            splits.halved(X, out=Half(halves[:, 0], scale), where=good, amax=largest)
        else:
            pair = split(X, None if largest is None else power_of_two_scale(largest))
            for place, half in enumerate((pair.hi, pair.lo)[: halves.shape[1]]):
                halves[:, place] = half if good is None else torch.where(good.view(-1, 1, 1), half, halves[:, place])
            scale.copy_(pair.scale if good is None else torch.where(good, pair.scale, scale))

    def saved(self, groups: slice, own: int) -> Tensor:
        """Some groups in float32, without padding."""
        return self.value(groups)[:, :own, :own]

    def load(self, groups: slice, X: Tensor) -> None:
        """Put that back, into padding and fp16."""
        whole = self.value(groups)
        whole[(ALL, *(slice(size) for size in X.shape[1:]))] = X.to(whole)
        self.write(groups, whole)


def between(
    left: Stored | None,
    X: Float[Tensor, "K O I"],
    right: Stored | None,
    largest: Float[Tensor, "K"] | None = None,
) -> Tensor:
    """``left X right``, where one may be missing; in first halves if one is kept so.

    `largest` is what no entry of each matrix of X exceeds, where that is known.
    """
    return unscaled(scaled_between(left, X, right, largest))


def scaled_between(
    left: Stored | None,
    X: Float[Tensor, "K O I"],
    right: Stored | None,
    largest: Float[Tensor, "K"] | None = None,
) -> Tensor | Scaled:
    """The same before it is divided: the scales are powers of two, which are carried along and taken out once."""
    kept = [M for M in (left, right) if M is not None]
    if all(isinstance(M, Tensor) for M in kept):
        X = X if left is None else left @ X  # type: ignore[operator]
        return X if right is None else X @ right  # type: ignore[operator]
    rough = any(isinstance(M, Half) for M in kept)
    C, scales = X, ()
    for M, first in ((left, True), (right, False)):
        if M is not None:
            kept_one, other = _operand(M, rough), _operand(C, rough, largest)
            C, scale = scaled_product(kept_one, other) if first else scaled_product(other, kept_one)
            scales, largest = (*scales, scale), None
    return Scaled(C, scales)


def _operand(M: Stored, rough: bool, largest: Tensor | None = None) -> HalfPair | Half:
    if not rough:
        return operand_of(M, largest) if isinstance(M, Tensor) else M  # type: ignore[return-value]
    return half_of(M, largest) if isinstance(M, Tensor) else halved(M)


def operand_of(X: Float[Tensor, "K m n"], largest: Float[Tensor, "K"] | None = None) -> HalfPair:
    """The pair; where the kernels run and a bound on its entries is known, without a search for the largest."""
    return splits.split(X, amax=largest) if _known(X, largest) else split(X)


def half_of(X: Float[Tensor, "K m n"], largest: Float[Tensor, "K"] | None = None) -> Half:
    """The same in one half."""
    return splits.halved(X, amax=largest) if _known(X, largest) else halved(X)


def _known(X: Tensor, largest: Tensor | None) -> bool:
    return largest is not None and X.dtype == torch.float32 and _by_kernels(X)


def _by_kernels(X: Tensor) -> bool:
    return X.shape[:-2].numel() <= MOST_MATRICES and available(X.device)
