"""Eigenvectors and the spaces they span: overlap, matricization, correspondence (Wu 2023, sections 4.3 and C.6)."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe, not_one_of


def overlap(U: Float[Tensor, "d p"], V: Float[Tensor, "e q"], k: int | None = None) -> Float[Tensor, ""]:
    """``‖U_kᵀ V_k‖_F² / k``: how much of one k-dimensional space lies in another, from 0 to 1.

    U and V have orthonormal columns, of which the first k (None: all) are compared. Spaces drawn at random have
    `random_overlap(k, d)`.

    >>> import torch
    >>> E = torch.eye(4)
    >>> float(overlap(E[:, :2], E[:, 1:3]))
    0.5
    """
    U, V = _compared(U, V)
    k = _dimension(U, V, k)
    return (U[:, :k].mT @ V[:, :k]).square().sum() / k


def overlap_curve(U: Float[Tensor, "d p"], V: Float[Tensor, "e q"]) -> Float[Tensor, "k"]:
    """`overlap` at every k from 1 on, up to the number of columns.

    >>> import torch
    >>> overlap_curve(torch.eye(4)[:, :2], torch.eye(4)[:, [1, 0]]).tolist()
    [0.0, 1.0]
    """
    U, V = _compared(U, V)
    k = _dimension(U, V, None)
    squares = (U[:, :k].mT @ V[:, :k]).square().cumsum(0).cumsum(1).diagonal()
    return squares / torch.arange(1, k + 1, dtype=squares.dtype, device=squares.device)


def random_overlap(k: int, d: int) -> float:
    """``k / d``: the expected overlap of two k-dimensional spaces, one of which is drawn at random.

    >>> random_overlap(10, 400)
    0.025
    """
    if not 1 <= k <= d:
        raise InputError(
            describe(f"k={k} and d={d}", "1 ≤ k ≤ d", "take a smaller k: d is the number of entries of the weight")
        )
    return k / d


def _compared(U: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    for name, basis in (("U", U), ("V", V)):
        if not isinstance(basis, Tensor) or basis.ndim != 2 or not basis.is_floating_point():
            raise InputError(describe(f"{name} that is no matrix", "orthonormal columns [d, k]", "pass eigenvectors"))
    if U.shape[0] != V.shape[0]:
        raise InputError(
            describe(
                f"vectors of {U.shape[0]} and of {V.shape[0]} entries",
                "two bases of one space",
                "compare the same layer",
            )
        )
    dtype = torch.promote_types(U.dtype, V.dtype)
    for name, basis in (("U", U), ("V", V)):
        if not _is_orthonormal(basis):
            raise InputError(
                describe(
                    f"{name} with columns that are not orthonormal",
                    "orthonormal columns",
                    "pass torch.linalg.qr(U).Q",
                )
            )
    return U.to(dtype), V.to(dtype)


def _is_orthonormal(basis: Float[Tensor, "p k"]) -> bool:
    gram = basis.double().mT @ basis.double()
    return bool((gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device)).abs().max() <= 1e-3)


def _dimension(U: Tensor, V: Tensor, k: int | None) -> int:
    most = min(U.shape[1], V.shape[1])
    if k is None:
        return most
    if not 1 <= k <= most:
        raise InputError(describe(f"k={k} with {most} vectors", f"1 ≤ k ≤ {most}", "compute more eigenvectors"))
    return k


def matricization(h: Float[Tensor, "*d"], shape: tuple[int, int]) -> Float[Tensor, "*s"]:
    """``Mat(h) [m, n]`` of a vector [mn], or ``[k, m, n]`` of columns [mn, k]; row-major: ``u ⊗ v`` becomes ``u vᵀ``.

    (The thesis prints the index ``(i−1) m + j``; with ``vec(W)`` row-major it is ``(i−1) n + j``.)

    >>> import torch
    >>> u, v = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0])
    >>> torch.equal(matricization(torch.kron(u, v), (2, 3)), torch.outer(u, v))
    True
    """
    m, n = shape
    if h.ndim not in (1, 2) or h.shape[0] != m * n:
        raise InputError(
            describe(
                f"vectors of shape {tuple(h.shape)} for a {m} × {n} weight",
                f"[{m * n}] or [{m * n}, k]",
                "reshape them",
            )
        )
    return h.reshape(m, n) if h.ndim == 1 else h.mT.reshape(-1, m, n)


def rank_one_ness(h: Float[Tensor, "*d"], shape: tuple[int, int]) -> Float[Tensor, "*k"]:
    """``‖Mat(h)‖_2 / ‖Mat(h)‖_F``: 1 where the vector is a Kronecker product, at least ``1/√min(m, n)``.

    >>> import torch
    >>> rank_one_ness(torch.ones(6), (2, 3)).round(decimals=4).item()
    1.0
    >>> rank_one_ness(torch.eye(2).flatten(), (2, 2)).round(decimals=4).item()
    0.7071
    """
    s = torch.linalg.svdvals(matricization(h, shape).double())
    return s[..., 0] / torch.linalg.vector_norm(s, dim=-1)


def correspondence(
    h: Float[Tensor, "*d"], basis: Float[Tensor, "p p"], side: Literal["input", "output"] = "input"
) -> Float[Tensor, "p *k"]:
    """How much of ``Mat(h_j)`` lies along each vector of an orthonormal basis, [p, k]; every column sums to 1.

        input:  ‖Mat(h_j) v_i‖²,  basis V of the inputs [n, n]        output:  ‖Mat(h_j)ᵀ u_i‖²,  basis U [m, m]

    (C.258–259). A Kronecker product ``u_a ⊗ v_b`` has a single 1, at b for inputs and at a for outputs.

    >>> import torch
    >>> correspondence(torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0]), torch.eye(3)).tolist()  # row 0, column 2
    [0.0, 0.0, 1.0]
    """
    if side not in ("input", "output"):
        raise InputError(not_one_of("side", side, ("input", "output")))
    p, d = basis.shape[0], h.shape[0]
    if basis.ndim != 2 or basis.shape[1] != p or d % p or not _is_orthonormal(basis):
        raise InputError(
            describe(
                f"vectors of {d} entries and a basis of shape {tuple(basis.shape)}",
                "a square orthonormal basis of the inputs (or outputs) of the layer",
                "pass decoupled(...).V, or .U with side='output'",
            )
        )
    dtype = torch.promote_types(h.dtype, basis.dtype)
    shape = (d // p, p) if side == "input" else (p, d // p)
    mats, basis = matricization(h, shape).to(dtype), basis.to(dtype)
    mats = mats if h.ndim == 2 else mats.unsqueeze(0)
    along = mats @ basis if side == "input" else mats.mT @ basis  # k, other, p
    found = along.square().sum(1).mT
    return found if h.ndim == 2 else found[:, 0]
