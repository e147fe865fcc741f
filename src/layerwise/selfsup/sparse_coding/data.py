"""Samples of a sparse model y = A z + ε, and where a dictionary may start."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe, not_one_of
from layerwise.foundations.random import stream
from layerwise.selfsup.sparse_coding.omp import SparseCode

STARTS = ("sample", "local", "gauss")


class SparseData(NamedTuple):
    """A dictionary, samples of it, and further samples that no training sees."""

    A: Float[Tensor, "d p"]
    Y: Float[Tensor, "n d"]
    held_out: Float[Tensor, "extra d"]
    codes: SparseCode
    """Those of Y, without the noise."""


def sample_sparse_data(
    d: int,
    p: int,
    k: int,
    n: int,
    sigma: float | int,
    *,
    held_out: int = 0,
    signal: float | int | None = None,
    A: Float[Tensor, "d p"] | None = None,
    generator: torch.Generator | int = 0,
    dtype: torch.dtype = torch.float64,
) -> SparseData:
    """Draw A with unit columns of a Gaussian matrix, k-sparse z on uniform supports, and y = A z + ε, ε ~ N(0, σ²I).

    Args:
        d: coordinates of a sample.
        p: atoms.
        k: atoms a sample.
        n: samples.
        sigma: standard deviation of the noise in each coordinate; 1/√d is as much noise as signal.
        held_out: further samples of the same law.
        signal: None divides every z by its norm, as in the experiments of Wu (2023); a number is the standard deviation
            of its entries, as in the theorem on masking.
        A: a dictionary of the caller's, in place of one that is drawn.
        generator: a generator, or a seed.
        dtype: of everything.

    >>> data = sample_sparse_data(20, 40, 3, n=5, sigma=0.1, held_out=7)
    >>> data.A.shape, data.Y.shape, data.held_out.shape, data.codes.indices.shape
    (torch.Size([20, 40]), torch.Size([5, 20]), torch.Size([7, 20]), torch.Size([5, 3]))
    """
    if A is not None and A.shape != (d, p):
        given = f"A of shape {tuple(A.shape)} with d={d}, p={p}"
        raise InputError(describe(given, f"atoms as columns, [{d}, {p}]", "transpose it, or correct d and p"))
    if not 1 <= k <= p or n < 0 or held_out < 0:
        given = f"k={k} atoms a sample of {p}, n={n}, held_out={held_out}"
        raise InputError(describe(given, "1 ≤ k ≤ p and no negative numbers", "correct them"))
    if A is not None and not bool(torch.isfinite(A).all()):
        raise InputError(describe("A with NaN or infinite entries", "finite numbers", "correct them"))
    if signal is not None and not 0 <= signal < float("inf"):
        raise InputError(describe(f"signal={signal}", "a finite number ≥ 0, or None", "take e.g. 1.0"))
    if not 0 <= sigma < float("inf"):
        raise InputError(describe(f"sigma={sigma}", "a finite number ≥ 0", "take e.g. 0.1"))
    random = generator if isinstance(generator, torch.Generator) else stream(generator, "sparse data")
    if A is None:
        A = unit_columns(torch.randn(d, p, generator=random, dtype=dtype))
    support = torch.rand(n + held_out, p, generator=random).topk(k, -1).indices
    z = torch.randn(n + held_out, k, generator=random, dtype=dtype)
    z = z / z.norm(dim=-1, keepdim=True) if signal is None else z * signal
    clean = (A.mT[support] * z[..., None]).sum(-2)
    Y = clean + sigma * torch.randn(n + held_out, d, generator=random, dtype=dtype)
    return SparseData(A, Y[:n], Y[n:], SparseCode(support[:n], z[:n]))


def start_dictionary(
    start: str, atoms: int, data: SparseData, *, generator: torch.Generator | int = 0
) -> Float[Tensor, "d atoms"]:
    """B at the start: "sample" (held-out samples), "local" (A and held-out samples) or "gauss", with unit columns.

    "local" starts at the truth, and shows how far a training leaves it; it needs the truth, so is no method.
    """
    if atoms < 1:
        raise InputError(describe(f"{atoms} atoms", "at least one", "take more"))
    known = {"local": min(data.A.shape[1], atoms)}.get(start, 0)
    if start not in STARTS:
        raise InputError(not_one_of("start", start, STARTS))
    if start == "gauss":
        random = generator if isinstance(generator, torch.Generator) else stream(generator, "start")
        return unit_columns(torch.randn(data.A.shape[0], atoms, generator=random, dtype=data.A.dtype))
    if len(data.held_out) < atoms - known:
        given = f"{len(data.held_out)} held-out samples for {atoms - known} atoms"
        raise InputError(describe(given, "one for each atom", "draw data with held_out=… as large"))
    samples = data.held_out[: atoms - known]
    if bool((samples == 0).all(1).any()):
        raise InputError(describe("held-out samples that are zero", "directions", "leave them out"))
    return torch.cat([data.A[:, :known], unit_columns(samples.mT)], 1)


def unit_columns(B: Float[Tensor, "*batch d q"]) -> Float[Tensor, "*batch d q"]:
    """Every column divided by its norm.

    >>> unit_columns(torch.tensor([[3.0, 0.0], [4.0, 2.0]]))
    tensor([[0.6000, 0.0000],
            [0.8000, 1.0000]])
    """
    return B / B.norm(dim=-2, keepdim=True)
