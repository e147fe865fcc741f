"""Matrices that every step multiplies by: float32, or pairs of float16 where a GPU's tensor cores multiply them.

A matrix that is kept as a pair has the state ``name`` ``[K, 2, n, n]`` (hi, lo) and beside it ``name_scale`` ``[K]``.
What is saved is float32 without padding, so that a checkpoint does not depend on the device.
"""

import re

import torch
from torch import Tensor

from layerwise.foundations.linalg import triton_products
from layerwise.foundations.linalg.half_pairs import HalfPair, product, split
from layerwise.foundations.linalg.products import HALF_PAIRS, TORCH, Products
from layerwise.optim.rule import Shape, State

ALL = slice(None)


def keep(state: State, name: str, X: Tensor, as_pair: bool) -> None:
    """Begin to keep a matrix."""
    if not as_pair:
        state[name] = X
        return
    pair = split(X)
    state[name], state[f"{name}_scale"] = torch.stack([pair.hi, pair.lo], dim=1), pair.scale


def is_paired(state: State, name: str) -> bool:
    """Whether a matrix is kept as a pair."""
    return f"{name}_scale" in state


def matrix(state: State, name: str, groups: slice = ALL) -> Tensor | HalfPair:
    """A matrix as it is kept."""
    if not is_paired(state, name):
        return state[name][groups]
    halves = state[name][groups]
    return HalfPair(halves[:, 0], halves[:, 1], state[f"{name}_scale"][groups])


def value(state: State, name: str, groups: slice = ALL) -> Tensor:
    """A matrix in float32 (or float64)."""
    found = matrix(state, name, groups)
    return found.value() if isinstance(found, HalfPair) else found


def write(state: State, name: str, groups: slice, X: Tensor, good: Tensor | None = None) -> None:
    """Replace some groups; where `good` is false they keep what they have."""
    if not is_paired(state, name):
        old = state[name][groups]
        old.copy_(X if good is None else torch.where(good.view(-1, *[1] * (X.ndim - 1)), X, old))
        return
    halves, scale = state[name][groups], state[f"{name}_scale"][groups]
    if triton_products.available(X.device):
        triton_products.split(X, out=HalfPair(halves[:, 0], halves[:, 1], scale), where=good)
        return
    pair = split(X)
    for place, half in enumerate((pair.hi, pair.lo)):
        halves[:, place] = half if good is None else torch.where(good.view(-1, 1, 1), half, halves[:, place])
    scale.copy_(pair.scale if good is None else torch.where(good, pair.scale, scale))


def products_of(state: State, name: str) -> Products:
    """How a matrix is multiplied while it is refined: as it is kept."""
    return HALF_PAIRS if is_paired(state, name) else TORCH


def times(A: Tensor | HalfPair, B: Tensor | HalfPair) -> Tensor:
    """``A B``, in pairs where one of the two is."""
    if isinstance(A, Tensor) and isinstance(B, Tensor):
        return A @ B
    return product(A if isinstance(A, HalfPair) else split(A), B if isinstance(B, HalfPair) else split(B))


# --- what is saved -----------------------------------------------------------------------------------------


def own_size(name: str, found: Tensor, shape: Shape) -> tuple[int, ...]:
    """Axes of a state's tensor behind K, without padding."""
    rest = tuple(found.shape[1:])
    side = re.search(r"(?:^|_)([PQ])(?:_|$)", name)
    if side is not None:
        padded, own = (shape.outputs, shape.own_outputs) if side[1] == "P" else (shape.inputs, shape.own_inputs)
        return tuple(own if size == padded else size for size in rest)
    if rest == (shape.outputs, shape.inputs):
        return shape.own_outputs, shape.own_inputs
    return rest


def portable(state: State, shape: Shape) -> State:
    """The same without pairs and padding."""
    found: State = {}
    for name in state:
        if name.endswith("_scale") and is_paired(state, name.removesuffix("_scale")):
            continue
        X = value(state, name)
        found[name] = X[(ALL, *(slice(size) for size in own_size(name, X, shape)))]
    return found


def load(state: State, name: str, groups: slice, X: Tensor) -> None:
    """Put what was saved for some groups back, into padding and pairs where there are such."""
    whole = value(state, name, groups).clone()
    whole[(ALL, *(slice(size) for size in X.shape[1:]))] = X.to(whole)
    write(state, name, groups, whole)
