"""Orthonormal rows and the largest singular value of many small matrices by products, Cholesky and triangular solves.

On a GPU, QR goes matrix by matrix and SVD asks the host after every sweep, while these are a few launches for all
matrices, wait for nothing and can be recorded in a CUDA graph.
"""

import functools
import math

import torch
from jaxtyping import Float
from torch import Tensor

BETWEEN = 4
"""Squarings between two normalisations: λ_max of a matrix with trace 1 is at least 1/k, and k^-16 is still a number."""


def orthonormal_by_products(G: Float[Tensor, "*r k dx"]) -> Float[Tensor, "*r k dx"]:
    """The Q of Gᵀ = QᵀR with diag(R) > 0, as rows, from Cholesky factors L of GGᵀ: L⁻¹G, three times.

    The first two times the diagonal of GGᵀ is raised by what rounding may have taken away, so that the factor exists
    (Fukaya et al., "Shifted Cholesky QR", 2020): a singular value s then becomes s / √(s² + shift), which is 1 after
    both for s above 1e-10, and the third makes the rows orthonormal. Dependent rows are made independent by a change of
    the size of rounding; as with QR, their directions are as good as random. Not a number where G is not finite.
    It is computed in double precision, where the shift is small enough for all that single precision can hold.

    >>> orthonormal_by_products(torch.tensor([[0.0, -2.0, 0.0], [3.0, 1.0, 0.0]]).double()).round().int().tolist()
    [[0, -1, 0], [1, 0, 0]]
    """
    k, dx = G.shape[-2:]
    Q, double = G.double(), torch.finfo(torch.float64)
    shift = 11 * (k * dx + k * (k + 1)) * double.eps
    # neither the result nor the shift feels the size of a row, but squares of its entries must be numbers
    largest = torch.linalg.vector_norm(Q, torch.inf, dim=-1, keepdim=True).clamp(min=double.tiny)
    Q = torch.add(Q / largest, _generic(k, dx, str(G.device)), alpha=2 * double.eps)
    for raised in (True, True, False):
        gram = Q @ Q.mT
        if raised:
            gram.diagonal(dim1=-2, dim2=-1).mul_(1 + shift)
        Q = torch.linalg.solve_triangular(torch.linalg.cholesky_ex(gram).L, Q, upper=False)
    return Q.to(G.dtype)


@functools.cache
def _generic(k: int, dx: int, device: str) -> Tensor:
    """Numbers in [−1, 1] without a pattern that rows could share."""
    places = torch.arange(1, k * dx + 1, dtype=torch.float64).view(k, dx)
    return (places * math.sqrt(2) * places).cos().to(device)


def largest_singular_value(A: Float[Tensor, "*r m k"]) -> Float[Tensor, "*r"]:
    """‖A‖ by squaring W = AᵀA until N = 1/ε: tr W^(N+1) / tr W^N is λ_max to a relative k/N, whatever the gaps.

    The largest value loses no digits in AᵀA, unlike the smaller ones. It is computed in double precision: k^-16 is zero
    in single precision from k = 400 on. For A with entries whose squares are numbers.

    >>> round(float(largest_singular_value(torch.diag(torch.tensor([3.0, -4.0, 1.0]).double()))), 14)
    4.0
    """
    W = A.double().mT @ A.double()
    tiny = torch.finfo(W.dtype).tiny
    power = W
    for number in range(-int(math.log2(torch.finfo(W.dtype).eps))):
        if number % BETWEEN == 0:
            power = power / _trace(power).clamp(min=tiny)[..., None, None]
        power = power @ power
    return ((W * power).sum((-2, -1)) / _trace(power).clamp(min=tiny)).sqrt().to(A.dtype)


def _trace(A: Tensor) -> Tensor:
    return A.diagonal(dim1=-2, dim2=-1).sum(-1)
