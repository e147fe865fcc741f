"""How far a learned dictionary is from the one that made the data."""

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, NameLookupError, describe, unknown
from layerwise.foundations.optional import require

METRICS = {"cosine": 1, "sqeuclidean": 2}
"""What 1 − |⟨A_i, B_j⟩| of unit columns is multiplied by: ‖a ± b‖² = 2 − 2|⟨a, b⟩|."""


def recovery_error(
    A: Float[Tensor, "*batch d p"],
    B: Float[Tensor, "*batch d q"],
    metric: str = "cosine",
    *,
    matched: bool = False,
) -> Float[Tensor, "*batch"]:
    """The mean over atoms of A of the distance to the nearest atom of B, up to sign; columns are taken as directions.

    Args:
        A: the truth, atoms as columns.
        B: what was learned.
        metric: "cosine", 1 − |cos| (reported by Wu (2023)), or "sqeuclidean", min ‖A_i ± B_j‖² of unit columns, twice
            as much.
        matched: each atom of B stands for one of A at most (the best such assignment, needs SciPy). Otherwise several
            atoms may have one nearest, so that more atoms in B never make the error larger.

    >>> A = torch.eye(3)
    >>> B = torch.tensor([[0.0, -1.0, 0.8], [2.0, 0.0, 0.6], [0.0, 0.0, 0.0]])
    >>> recovery_error(A, B), recovery_error(A, B, "sqeuclidean"), recovery_error(A, B, matched=True)
    (tensor(0.3333), tensor(0.6667), tensor(0.3333))
    """
    if metric not in METRICS:
        raise NameLookupError(unknown("metric", metric, METRICS))
    if A.dtype != B.dtype or A.device != B.device:
        given = f"dictionaries of {A.dtype} on {A.device} and of {B.dtype} on {B.device}"
        raise InputError(describe(given, "one type and one device", "convert one with .to(…)"))
    if min(A.dim(), B.dim()) < 2 or A.shape[-2] != B.shape[-2] or A.shape[:-2] != B.shape[:-2]:
        given = f"dictionaries of shapes {tuple(A.shape)} and {tuple(B.shape)}"
        raise InputError(describe(given, "[d, p] and [d, q], atoms as columns", "transpose one, if it is in rows"))
    if matched and B.shape[-1] < A.shape[-1]:
        given = f"{B.shape[-1]} atoms to match {A.shape[-1]}"
        raise InputError(describe(given, "at least as many", "leave out matched=True"))
    sizes = A.norm(dim=-2), B.norm(dim=-2)
    for name, size in zip("AB", sizes, strict=True):
        if not bool((torch.isfinite(size) & (size > 0)).all()):
            given = f"{name} with columns that are zero or not finite"
            raise InputError(describe(given, "atoms that are directions", "leave such columns out"))
    cosines = ((A / sizes[0][..., None, :]).mT @ (B / sizes[1][..., None, :])).abs().clamp_max(1)
    best = _matched(cosines) if matched else cosines.amax(-1)
    return METRICS[metric] * (1 - best).mean(-1)


def _matched(cosines: Tensor) -> Tensor:
    assign = require("scipy.optimize", "scipy", "matched dictionaries", extra="scipy").linear_sum_assignment
    found = []
    for one in cosines.reshape(-1, *cosines.shape[-2:]):
        rows, columns = assign(-one.detach().cpu().numpy())
        found.append(one[torch.as_tensor(rows), torch.as_tensor(columns)])
    return torch.stack(found).view(cosines.shape[:-1])
