"""`DeviceRoots`: inverses and inverse roots of a stack's factors as a GPU keeps them and multiplies by them.

An inverse is found anew at every refresh, by products of blocks (`linalg.block_inverse`): the same launches whatever
the factor has become. Roots of other powers are an eigenbasis with eigenvalues, see `basis`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.optim.backend import ALL, Factor, InverseRoots, Shifts, Side
from layerwise.optim.channels import times_inputs
from layerwise.optim.cuda import factor as factors
from layerwise.optim.cuda.basis import TrackedSide, largest_before, rotated, unrotated
from layerwise.optim.cuda.device_step import largest_of, run
from layerwise.optim.cuda.factor import DeviceFactor
from layerwise.optim.cuda.fp16_steps import scaled_half
from layerwise.optim.cuda.linalg import two_sided_product
from layerwise.optim.cuda.linalg.block_inverse import block_inverse
from layerwise.optim.cuda.linalg.fp16 import Half
from layerwise.optim.cuda.scaled import Scaled, unscaled
from layerwise.optim.cuda.storage import StoredMatrix, between, scaled_between
from layerwise.optim.reference import guarded_root
from layerwise.optim.rule import Context, Health


@dataclass
class DeviceInverse:
    """``(M + shift I)⁻¹`` of one side, kept in fp16."""

    matrix: StoredMatrix
    own: int
    """Rows without padding."""

    def refresh_(
        self, key: Any, M: DeviceFactor, shift: Callable[[], Tensor | None], groups: slice, context: Context
    ) -> None:
        """By products of blocks; the last inverse stays where the factor is not positive definite."""
        call = lambda: self._renew(M, shift(), groups, context.health)  # noqa: E731
        run((key, groups.start, groups.stop, context.damping), call, context, "inverse")

    def _renew(self, factor: DeviceFactor, shift: Tensor | None, groups: slice, health: Health) -> None:
        assert shift is not None
        mean = factor.mean_eigenvalue(groups)  # in padding: any number > 0
        M = factors.damped(factor.mean[groups], shift, factor.own, mean)
        X, good = block_inverse(M)
        health.count("fallbacks", (~good & (mean != 0)).sum())  # of zeros there is nothing to invert yet
        self.matrix.write(groups, X, good & (mean > 0))

    def solve_(self, M: Tensor, shift: Tensor, groups: slice, context: Context) -> None:
        """Of a matrix that is not the factor itself."""
        root = self.matrix.value(groups)
        self.matrix.write(groups, guarded_root(M, shift, 1.0, root, context.health))


@dataclass
class DeviceRoots(InverseRoots):
    """Inverses where the power is 1, else a basis with eigenvalues; a diagonal factor has the root itself."""

    power: tuple[float, float]
    sides: dict[Side, DeviceInverse | TrackedSide | Tensor]
    by_eigh: bool = False
    of: tuple[Factor | None, Factor | None] = (None, None)
    """The factors P and Q."""
    before: list[Tensor] = field(default_factory=list)
    """The largest entries of the last direction: from which scale the next is written in fp16."""

    def __post_init__(self) -> None:
        self.reads_factors = any(isinstance(side, TrackedSide) for side in self.sides.values())

    @property
    def multiplies_in_fp16(self) -> bool:
        """Whether the gradient is multiplied in fp16."""
        return not all(isinstance(side, Tensor) for side in self.sides.values())

    def tensors(self) -> dict[str, Tensor]:
        """By side."""
        found: dict[str, Tensor] = {}
        for name, side in self.sides.items():
            if isinstance(side, Tensor):
                found[f"{name}_root"] = side
            else:
                found |= side.tensors() if isinstance(side, TrackedSide) else side.matrix.tensors(f"{name}_root")
        return found

    def saved(self, groups: slice = ALL) -> dict[str, Tensor]:
        """In float32, without padding."""
        found: dict[str, Tensor] = {}
        for name, side in self.sides.items():
            if isinstance(side, TrackedSide):
                found |= side.saved(groups)
            else:
                root = side[groups] if isinstance(side, Tensor) else side.matrix.saved(groups, side.own)
                found[f"{name}_root"] = root
        return found

    def load(self, name: str, groups: slice, value: Tensor) -> None:
        """Into fp16."""
        for key, side in self.sides.items():
            if isinstance(side, TrackedSide):
                side.load(name, groups, value)
            elif name == f"{key}_root" and isinstance(side, Tensor):
                side[groups] = value
            elif name == f"{key}_root" and isinstance(side, DeviceInverse):
                side.matrix.load(groups, value)

    def narrow(self, groups: slice) -> "DeviceRoots":
        """Views."""
        found: dict[Side, Any] = {}
        for name, side in self.sides.items():
            if isinstance(side, DeviceInverse):
                found[name] = DeviceInverse(side.matrix.narrow(groups), side.own)
            else:
                found[name] = side[groups] if isinstance(side, Tensor) else side.narrow(groups)
        return replace(self, sides=found, before=[])

    def refresh_(
        self,
        P: Factor | None,
        Q: Factor | None,
        shifts: Shifts,
        groups: slice,
        context: Context,
        scale: float | None = None,
    ) -> None:
        """Side by side, each captured by itself."""
        for place, factor in enumerate((P, Q)):
            name: Side = "P" if place == 0 else "Q"
            side = self.sides.get(name)
            if side is None or not isinstance(factor, DeviceFactor):
                continue
            shift = lambda place=place: shifts(*means((P, Q), groups))[place]  # noqa: E731
            if isinstance(side, TrackedSide):
                side.refresh_((id(self), name), factor, groups, context)
            elif isinstance(side, DeviceInverse) and scale is None:
                side.refresh_((id(self), name), factor, shift, groups, context)
            else:
                M, added = factor.dense(groups), shift()
                assert added is not None
                M = M if scale is None else scale * M
                if isinstance(side, DeviceInverse):
                    side.solve_(M, added, groups, context)
                else:
                    root = side[groups]
                    root.copy_(guarded_root(M, added, self.power[place], root, context.health, self.by_eigh))

    def direction(self, X: Float[Tensor, "K O I"], context: Context, shifts: Shifts) -> Tensor | Scaled:
        """``P⁻ᵖ X Q⁻ᑫ``, perhaps not yet divided by the scales of fp16."""
        P, Q, largest = self.sides.get("P"), self.sides.get("Q"), largest_of(X, context)
        left, right = (side.matrix.matrix() if isinstance(side, DeviceInverse) else side for side in (P, Q))
        left, right = (None if isinstance(side, TrackedSide) else side for side in (left, right))
        if X.dtype == torch.float32 and all(side is None or isinstance(side, Half) for side in (left, right)):
            none = left is None and right is None
            D = X if none else two_sided_product.half_between(left, X, right, largest)  # type: ignore[arg-type]
        elif isinstance(left, Tensor) or isinstance(right, Tensor):
            D = between(left, X, None, largest=largest)
            D = D if right is None else times_inputs(D, right)  # type: ignore[arg-type]
        else:
            D = scaled_between(left, X, right, largest=largest)
        return self._in_basis(unscaled(D), context, shifts) if self.reads_factors else D

    def _in_basis(self, X: Tensor, context: Context, shifts: Shifts) -> Tensor | Scaled:
        """``U_P [(s_P + shift)⁻ᵖ (s_Q + shift)⁻ᑫ ⊙ U_Pᵀ ∇L U_Q] U_Qᵀ``: the same where a basis is kept, not roots."""
        P, Q = (side if isinstance(side, TrackedSide) else None for side in (self.sides.get("P"), self.sides.get("Q")))
        sizes, damped = means(self.of), context.damping > 0
        a, b = (
            None if side is None or shift is None or mean is None else side.root(shift, power, mean, damped)
            for side, shift, power, mean in zip((P, Q), shifts(*sizes), self.power, sizes, strict=True)
        )
        U_P, U_Q = (None if side is None else side.matrix.half() for side in (P, Q))
        R = rotated(
            U_P, X, U_Q, largest_of(X, context), rough=all(side is None or side.half_gradient for side in (P, Q))
        )
        return unrotated(U_P, scaled_half(R, a, b, largest_before(self.before, X)), U_Q)


def means(factors: tuple[Factor | None, Factor | None], groups: slice = ALL) -> list[Tensor | None]:
    """Mean eigenvalues, which damping is relative to."""
    return [None if factor is None else factor.mean_eigenvalue(groups) for factor in factors]
