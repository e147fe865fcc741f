"""Matrices that every step multiplies by: float32, or halves (float16) where a GPU's tensor cores multiply them.

A matrix that is kept as a pair has the state ``name`` ``[K, 2, n, n]`` (hi, lo) and beside it ``name_scale`` ``[K]``.
That of a basis (``U_P``, ``U_Q``) is always the same, see `orthogonal`: products with it rely on that. Inverses may be
packed, ``[K, 2, T, 16, 16]`` (`packed_halves`), and are then unpacked whenever they are asked for; factors may be, see
`symmetric`; scalings may be bfloat16, see `scalings`. What is saved is float32 without padding, so that a checkpoint
does not depend on the device.
"""

import re
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.optim.cuda import factor as symmetric
from layerwise.optim.cuda.linalg import moments_in_new_basis as half_turns
from layerwise.optim.cuda.linalg import packed_fp16 as packed_halves
from layerwise.optim.cuda.linalg.fp16 import Half, HalfPair
from layerwise.optim.cuda.linalg.orthogonal import basis_pair
from layerwise.optim.cuda.linalg.packed import is_packed
from layerwise.optim.cuda.linalg.products import HALF_PAIRS, TORCH, Products
from layerwise.optim.cuda.linalg.split_fp16 import halved, scaled_product, split
from layerwise.optim.cuda.scaled import Scaled
from layerwise.optim.cuda.triton import splits as triton_splits
from layerwise.optim.cuda.triton.device import MOST_MATRICES, available
from layerwise.optim.cuda.unscaled import unscaled
from layerwise.optim.rule import Shape, State

ALL = slice(None)
Kept = Tensor | HalfPair | Half


def keep(state: State, name: str, X: Tensor, halves: int, triangle: bool = False) -> None:
    """Begin to keep a matrix: as it is (0), as its first half (1), or as a pair (2); of halves, one `triangle`."""
    if not halves:
        state[name] = X
        return
    if triangle:
        state[name] = packed_halves.zeros(len(X), halves, X.shape[-1], X.device)
        state[f"{name}_scale"] = torch.ones(len(X), dtype=torch.float32, device=X.device)
        packed_halves.put_(state[name], state[f"{name}_scale"], X)
        return
    pair = basis_pair(X) if is_basis(name) else split(X)
    state[name], state[f"{name}_scale"] = torch.stack([pair.hi, pair.lo][:halves], dim=1), pair.scale


def is_halved(state: State, name: str) -> bool:
    """Whether a matrix is kept in halves."""
    return f"{name}_scale" in state


def are_packed_pairs(state: State, *names: str) -> bool:
    """Whether all of these are there, as triangles of both halves."""
    return all(name in state and packed_halves.is_packed(state[name]) and state[name].shape[1] == 2 for name in names)


def is_basis(name: str) -> bool:
    """Whether a matrix is orthogonal."""
    return name.startswith("U_")


def matrix(state: State, name: str, groups: slice = ALL) -> Tensor | HalfPair | Half:
    """A matrix as it is kept; of packed halves, squares for the moment."""
    halves = state[name][groups]
    if not is_halved(state, name):
        return halves
    scale = state[f"{name}_scale"][groups]
    halves = packed_halves.unpack(halves) if packed_halves.is_packed(halves) else halves
    return Half(halves[:, 0], scale) if halves.shape[1] == 1 else HalfPair(halves[:, 0], halves[:, 1], scale)


def value(state: State, name: str, groups: slice = ALL) -> Tensor:
    """A matrix in float32 (or float64)."""
    found = matrix(state, name, groups)
    if isinstance(found, Half):
        return found.hi.float() / found.scale[:, None, None]
    return found.value() if isinstance(found, HalfPair) else widened(symmetric.whole(found))


def widened(X: Tensor) -> Tensor:
    """Scalings in float32 where they are kept in bfloat16; all else as it is."""
    return X.float() if X.dtype == torch.bfloat16 else X


def rough(state: State, name: str) -> tuple[Tensor, Tensor]:
    """A matrix times a number for each group, as it lies there: 11 bits or more; and these numbers ``[K]``."""
    found = matrix(state, name)
    return (found, torch.ones_like(found[:, 0, 0])) if isinstance(found, Tensor) else (found.hi, found.scale)


def operand(state: State, name: str, groups: slice) -> Tensor | HalfPair:
    """A matrix to be refined: the pair, where one is kept, else its value."""
    found = matrix(state, name, groups)
    return found if isinstance(found, HalfPair) else value(state, name, groups)


def rough_copy(state: State, name: str, groups: slice) -> Tensor | Half:
    """A copy that lasts when the matrix is replaced: its first half, where it is kept in halves."""
    found = matrix(state, name, groups)
    if isinstance(found, Tensor):
        return found.clone()
    return Half(found.hi.clone(), found.scale.clone())


def write(state: State, name: str, groups: slice, X: Tensor | Half, good: Tensor | None = None) -> None:
    """Replace some groups; where `good` is false they keep what they have. A half is one of the same scale."""
    if isinstance(X, Half):
        half_turns.put_(state[name][groups][:, 0], X.hi, good)
        return
    if not is_halved(state, name):
        old = state[name][groups]
        if is_packed(old):
            symmetric.put_(old, X)  # from a checkpoint, all of them
            return
        old.copy_(X if good is None else torch.where(good.view(-1, *[1] * (X.ndim - 1)), X, old))
        return
    halves, scale = state[name][groups], state[f"{name}_scale"][groups]
    if packed_halves.is_packed(halves):
        packed_halves.put_(halves, scale, X, good)
        return
    if _by_kernels(X):
        fixed: dict[str, Any] = {"bound": 1.0, "cut": True} if is_basis(name) else {}
        if halves.shape[1] == 2:
            triton_splits.split(X, out=HalfPair(halves[:, 0], halves[:, 1], scale), where=good, **fixed)
        else:
            triton_splits.halved(X, out=Half(halves[:, 0], scale), where=good, **fixed)
        return
    pair = basis_pair(X) if is_basis(name) else split(X)
    for place, half in enumerate((pair.hi, pair.lo)[: halves.shape[1]]):
        halves[:, place] = half if good is None else torch.where(good.view(-1, 1, 1), half, halves[:, place])
    scale.copy_(pair.scale if good is None else torch.where(good, pair.scale, scale))


def products_of(state: State, name: str) -> Products:
    """How a matrix is multiplied while it is refined: as it is kept."""
    return HALF_PAIRS if is_halved(state, name) else TORCH


def between(
    left: Kept | None,
    X: Float[Tensor, "K O I"],
    right: Kept | None,
    largest: Float[Tensor, "K"] | None = None,
) -> Tensor:
    """``left X right``, where one may be missing; in first halves if one is kept so.

    `largest` is what no entry of each matrix of X exceeds, where that is known.
    """
    return unscaled(scaled_between(left, X, right, largest))


def scaled_between(
    left: Kept | None,
    X: Float[Tensor, "K O I"],
    right: Kept | None,
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


def _operand(M: Kept, rough: bool, largest: Tensor | None = None) -> HalfPair | Half:
    if not rough:
        return operand_of(M, largest) if isinstance(M, Tensor) else M  # type: ignore[return-value]
    if isinstance(M, Tensor) and _known(M, largest):
        return triton_splits.halved(M, amax=largest)
    return halved(M)


def operand_of(X: Float[Tensor, "K m n"], largest: Float[Tensor, "K"] | None = None) -> HalfPair:
    """The pair; where the kernels run and a bound on its entries is known, without a search for the largest."""
    return triton_splits.split(X, amax=largest) if _known(X, largest) else split(X)


def _known(X: Tensor, largest: Tensor | None) -> bool:
    return largest is not None and X.dtype == torch.float32 and _by_kernels(X)


def _by_kernels(X: Tensor) -> bool:
    return X.shape[:-2].numel() <= MOST_MATRICES and available(X.device)


# --- what is saved -----------------------------------------------------------------------------------------


def saved_names(state: State) -> list[str]:
    """What is saved: not the scales of pairs."""
    return [name for name in state if not (name.endswith("_scale") and is_halved(state, name.removesuffix("_scale")))]


def side_of(name: str) -> str | None:
    """Which of the factors P and Q a state belongs to, if to one."""
    found = re.search(r"(?:^|_)([PQ])(?:_|$)", name)
    return None if found is None else found[1]


def own(name: str, X: Tensor, shape: Shape) -> Tensor:
    """A state's tensor, or some groups of it, without padding."""
    rest = tuple(X.shape[1:])
    side = side_of(name)
    if side is not None:
        padded, own = (shape.outputs, shape.own_outputs) if side == "P" else (shape.inputs, shape.own_inputs)
        rest = tuple(own if size == padded else size for size in rest)
    elif rest == (shape.outputs, shape.inputs):
        rest = shape.own_outputs, shape.own_inputs
    return X[(ALL, *(slice(size) for size in rest))]


def portable(state: State, name: str, shape: Shape, groups: slice) -> Tensor:
    """Some groups without pairs and padding; perhaps a view. As large as they are: a stack is taken layer by layer."""
    return own(name, value(state, name, groups), shape)


def saved_sizes(state: State, shape: Shape) -> dict[str, tuple[int, ...]]:
    """Axes behind K of what is saved."""
    return {name: tuple(portable(state, name, shape, slice(0, 1)).shape[1:]) for name in saved_names(state)}


def load(state: State, name: str, groups: slice, X: Tensor) -> None:
    """Put what was saved for some groups back, into padding and pairs where there are such."""
    whole = value(state, name, groups).clone()
    whole[(ALL, *(slice(size) for size in X.shape[1:]))] = X.to(whole)
    write(state, name, groups, whole)
