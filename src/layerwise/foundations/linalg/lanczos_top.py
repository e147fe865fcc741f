"""Leading eigenpairs of a symmetric operator given by its products.

Block Lanczos with thick restart and explicit Rayleigh-Ritz: the block has as many columns as eigenpairs are
wanted, so an eigenvalue is found as many times as it occurs.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.linalg.checks import MatMul, apply_block, require_at_least
from layerwise.foundations.linalg.draws import Device, gaussian
from layerwise.foundations.linalg.eigh import guarded_eigh


def lanczos_top(
    matmul: MatMul,
    d: int,
    k: int,
    *,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    device: Device = "cpu",
    tol: float = 1e-8,
    max_steps: int = 200,
    block: int | None = None,
) -> tuple[Float[Tensor, "k"], Float[Tensor, "d k"], Float[Tensor, "k"]]:
    """The k algebraically largest eigenvalues, ascending, their vectors, and the residuals ``‖M u − θ u‖``.

    Stops when all residuals are ``≤ tol |θ_max|`` or at the precision of the products (below ``100 ε |θ_max|``, where
    they have stopped falling), else after ``max_steps`` products with blocks of `block` columns (None: k); the
    residuals say which. Holds at most about ``2 max(6k, 30)`` vectors. Fewer columns a block make fewer products with
    columns in all; an eigenvalue that occurs more often than a block has columns is then found slowly.

    Reference: Wu and Simon 2000, Thick-restart Lanczos; Golub and Underwood 1977, for the block form.

    >>> M = torch.diag(torch.tensor([5.0, 1.0, 5.0, 2.0], dtype=torch.float64))
    >>> g = torch.Generator().manual_seed(0)
    >>> lanczos_top(lambda X: M @ X, 4, 3, generator=g, dtype=torch.float64)[0].round().tolist()
    [2.0, 5.0, 5.0]
    """
    _check(d, k, max_steps)
    width = k if block is None else min(block, k)
    require_at_least("block", width, 1)
    most, keep = max(6 * k, 30), max(2 * k, 10)
    looks = max(1, k // (2 * width))  # a look costs as much as a product, where there are many pairs to look at
    W = torch.empty(d, 0, dtype=dtype, device=device)
    MW, H = W, W.mT @ W  # H = Wᵀ M W, grown by the rows and columns of each block
    columns = gaussian(d, width, generator, dtype, device)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    least, stalled = float("inf"), 0
    max_steps = max(max_steps, -(-k // width))  # fewer would not give k pairs
    for step in range(1, max_steps + 1):
        columns = _orthonormal_block(W, columns, generator)
        W, MW = torch.cat([W, columns], 1), torch.cat([MW, apply_block(matmul, columns)], 1)
        H = _bordered(H, W.mT @ MW[:, -columns.shape[1] :])
        full = W.shape[1] + width > most
        last = step == max_steps or W.shape[1] == d
        columns = MW[:, -columns.shape[1] :]
        if not (last or full or (W.shape[1] >= k and step % looks == 0)):
            continue
        theta, S = guarded_eigh(H, name="Rayleigh-Ritz matrix of Lanczos", clamp=False)
        found, done = _ritz_pairs(W, MW, theta, S, k, tol)
        worst = float(found[2].max())
        stalled = stalled + 1 if worst > 0.9 * least and least <= _rounding(theta) else 0
        if best is None or worst <= least:
            best, least = found, worst
        if done or last or stalled == 2:
            break
        if full:
            # The next block is made orthogonal to the whole space before most of that space is dropped.
            columns = _orthonormal_block(W, columns, generator)
            W, MW, H = W @ S[:, -keep:], MW @ S[:, -keep:], torch.diag(theta[-keep:])
    assert best is not None
    return best


def _check(d: int, k: int, max_steps: int) -> None:
    require_at_least("k", k, 1)
    require_at_least("max_steps", max_steps, 1)
    if k > d:
        raise InputError(describe(f"k={k} eigenpairs of dimension {d}", f"k ≤ {d}", f"pass k={d} or fewer"))


def _rounding(theta: Float[Tensor, "p"]) -> float:
    """The size of residuals that rounding alone may leave."""
    return 100 * torch.finfo(theta.dtype).eps * float(theta.abs().max())


def _bordered(H: Float[Tensor, "p p"], C: Float[Tensor, "q b"]) -> Float[Tensor, "q q"]:
    """H enlarged to ``q = p + b`` by the columns C on the right and their transpose below."""
    b = C.shape[1]
    H = torch.nn.functional.pad(H, (0, b, 0, b))
    H[:, -b:] = C
    H[-b:, :-b] = C[:-b].mT
    return H


def _ritz_pairs(
    W: Float[Tensor, "d p"],
    MW: Float[Tensor, "d p"],
    theta: Float[Tensor, "p"],
    S: Float[Tensor, "p p"],
    k: int,
    tol: float,
) -> tuple[tuple[Float[Tensor, "k"], Float[Tensor, "d k"], Float[Tensor, "k"]], bool]:
    """The last k Ritz pairs with explicit residuals, and whether they are small enough."""
    values, top = theta[-k:], S[:, -k:]
    vectors = W @ top
    residuals = torch.linalg.vector_norm(MW @ top - vectors * values, dim=0)
    rounding = 10 * torch.finfo(theta.dtype).eps * theta.abs().max()
    goal = torch.maximum(tol * theta[-1].abs(), rounding)
    return (values, vectors, residuals), bool((residuals <= goal).all())


def _orthonormal_block(
    W: Float[Tensor, "d p"], block: Float[Tensor, "d b"], generator: torch.Generator
) -> Float[Tensor, "d c"]:
    """An orthonormal basis of what ``block`` adds to the orthonormal W.

    A direction that adds nothing (the Krylov space is exhausted) is replaced by a random one, so that the
    search goes on in the rest of the space and copies of an eigenvalue are not missed. ``c`` is smaller than
    ``b`` only where W nearly fills the space.
    """
    d, p = W.shape
    columns = min(block.shape[1], d - p)
    threshold = 1e3 * torch.finfo(W.dtype).eps * torch.linalg.vector_norm(block, dim=0).max()
    rest = block - W @ (W.mT @ block)
    U, s, _ = torch.linalg.svd(rest, full_matrices=False)
    kept = U[:, :columns][:, s[:columns] > threshold]
    missing = columns - kept.shape[1]
    if missing:
        kept = torch.cat([kept, gaussian(d, missing, generator, W.dtype, W.device)], 1)
    for _ in range(2):  # twice is enough for orthogonality at machine precision (Parlett)
        kept = kept - W @ (W.mT @ kept)
        kept = torch.linalg.qr(kept).Q
    return kept
