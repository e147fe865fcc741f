"""A dictionary that represents samples better than the truth does, and is wrong: theorem 2.3.2 of Wu (2023), built."""

import itertools
import math

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.selfsup.sparse_coding.data import unit_columns

MOST_SUPPORTS = 200_000
"""That `exhaustive_loss` tries."""


def pair_dictionary(A: Float[Tensor, "d p"], directions: int = 8) -> Float[Tensor, "d q"]:
    """Atoms in the plane of every two atoms of A, at equal angles, without those that are near an atom of A.

    k of its atoms imitate 2k atoms of A, and so represent noise as well as those do; but each atom of A is at least
    1 − cos(π/2T) away (cosine), T the number of directions. A code has any scale, so that directions need covering, and
    not, as in the proof, lengths.

    >>> from layerwise.selfsup import sample_sparse_data
    >>> A = sample_sparse_data(20, 30, 2, n=1, sigma=0).A
    >>> pair_dictionary(A).shape[1] < 435 * 8
    True
    """
    if directions < 2 or A.shape[1] < 2:
        given = f"{directions} directions of {A.shape[1]} atoms"
        raise InputError(describe(given, "two or more of both", "take e.g. directions=8"))
    A = unit_columns(A)
    i, j = torch.triu_indices(A.shape[1], A.shape[1], 1, device=A.device)
    first, second = A[:, i], A[:, j]
    second = second - (first * second).sum(0) * first
    planes = second.norm(dim=0) > torch.finfo(A.dtype).eps ** 0.5  # atoms that are the same up to sign have none
    first, second = first[:, planes], unit_columns(second[:, planes])
    angles = (torch.arange(directions, dtype=A.dtype, device=A.device) + 0.5) * math.pi / directions
    B = (first[..., None] * angles.cos() + second[..., None] * angles.sin()).flatten(1)
    nearest = math.cos(math.pi / (2 * directions)) + 1e-6  # each pair has atoms at that angle: rounding must not choose
    return B[:, (A.mT @ B).abs().amax(0) < nearest]


def exhaustive_loss(Y: Float[Tensor, "n d"], A: Float[Tensor, "d p"], k: int) -> Float[Tensor, ""]:
    """L(A, k), the mean of the least ‖y − A z‖² over all supports of k atoms; what `omp` only bounds from above.

    >>> exhaustive_loss(torch.tensor([[3.0, 4.0]]), torch.eye(2), 1)
    tensor(9.)
    """
    p = A.shape[1]
    if not 1 <= k <= min(A.shape) or math.comb(p, k) > MOST_SUPPORTS:
        given = f"all supports of k={k} of {p} atoms"
        raise InputError(describe(given, f"1 ≤ k ≤ {min(A.shape)} and at most {MOST_SUPPORTS} supports", "use omp"))
    least = torch.finfo(A.dtype).eps ** 0.5
    explained = Y.new_zeros(len(Y))
    unit = A / A.norm(dim=0).clamp_min(torch.finfo(A.dtype).tiny)
    supports = torch.tensor(list(itertools.combinations(range(p), k)), device=A.device)
    for some in supports.split(1000):
        basis, triangle = torch.linalg.qr(unit.mT[some].mT)  # [supports, d, k]
        dependent = (triangle.diagonal(dim1=-2, dim2=-1).abs() <= least).any(-1)
        if bool(dependent.any()):  # QR would make up directions
            U, S, _ = torch.linalg.svd(unit.mT[some[dependent]].mT, full_matrices=False)
            basis[dependent] = U * S.gt(least)[:, None]
        explained = torch.maximum(explained, (Y @ basis).square().sum(-1).amax(0))
    return (Y.square().sum(-1) - explained).mean()
