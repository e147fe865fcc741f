"""Matrix products on a GPU that Triton makes cheaper: the symmetric half only, and pairs of float16 in one kernel.

Each function does what a few calls of torch do as well (`symmetric_product.gram`, `split_fp16.product`), so ask
`available` first and use those elsewhere. Triton is imported at the first use. Nothing here asks the device for a
value. Rows that begin on 16 bytes (widths padded to a multiple of 16) load fastest; other widths are right, but slow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float, Float16, Float32
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.optim.cuda.linalg.split_fp16 import Half, HalfPair
from layerwise.optim.cuda.triton.arguments import one
from layerwise.optim.cuda.triton.device import MOST_MATRICES, available, ceil, kernels, on, processors
from layerwise.optim.cuda.triton.splits import halved, split

__all__ = ["Tiles", "available", "gram_update_", "halved", "pair_product", "split", "takes"]

ALIGNED = 8  # halves in 16 bytes, what a thread loads at once
FINISH_LINES = 32
LISTED = 8
"""Matrices that one launch takes as a list: each is some 5 µs of the host's, whether it is needed or not."""


@dataclass(frozen=True)
class Tiles:
    """Shape of the tiles of a product: rows, columns and depth, then how Triton runs them."""

    m: int = 128
    n: int = 128
    depth: int = 64
    warps: int = 8
    stages: int = 3
    group: int = 8


GRAM_TILES = Tiles(stages=4)
PAIR_TILES = Tiles()
ROUGH_TILES = Tiles(stages=4)


def gram_update_(
    total: Float32[Tensor, "..."],
    X: Float[Tensor, "*K m n"] | Sequence[Float[Tensor, "m n"]],
    weight: Float32[Tensor, "*K"],
    alpha: int | float = 1.0,
    by: Tensor | None = None,
    *,
    tiles: Tiles = GRAM_TILES,
    parts: int | None = None,
) -> Float32[Tensor, "..."]:
    """Move running means towards the products of half-precision matrices, in place.

        total ← total + weight·(alpha·XᵀX − total)

    Totals are ``[*K, n, n]``, or packed (`linalg.packed`), of which the leading n × n blocks move. Only tiles on and
    below the diagonal are read and computed; the result is symmetric. A weight of 0 leaves its total unchanged whatever
    X is, a weight of 1 replaces it. `X` is one matrix, a stack, or a sequence of matrices of one shape, type and row
    stride, one for each total (`LISTED` in a launch); its last stride is 1. `parts` splits the rows of X among more
    programs (chosen from the shape when None); alpha is multiplied by `by`, a number on the device.
    """
    packed = total.ndim == 4
    total_ = total if packed else _stack(total, "total")
    matrices = (_stack(X, "X"),) if isinstance(X, Tensor) else tuple(X)
    if total.numel() == 0:
        return total
    _check_gram(total_, matrices, packed)
    _launch_gram(total_, matrices, weight, alpha, tiles, parts, packed, one(total.device) if by is None else by)
    return total


def filled_up(matrices: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`LISTED` matrices, or as many as there are, as a kernel takes them, the first one repeated.

    >>> [len(filled_up((torch.empty(2, 2),) * n)) for n in (1, 2, 8)]
    [8, 8, 8]
    """
    return (*matrices, *[matrices[0]] * (LISTED - len(matrices)))


def _launch_gram(
    total: Tensor,
    matrices: tuple[Tensor, ...],
    weight: Tensor,
    alpha: int | float,
    tiles: Tiles,
    parts: int | None,
    packed: bool,
    by: Tensor,
) -> None:
    first, weight, K = matrices[0], weight.reshape(-1).contiguous(), len(total)
    if first.ndim == 2 and K > LISTED:
        for few in (slice(start, start + LISTED) for start in range(0, K, LISTED)):
            _launch_gram(total[few], matrices[few], weight[few], alpha, tiles, parts, packed, by)
        return
    m, n = first.shape[-2:]
    X_k = first.stride(0) if first.ndim == 3 else 0
    across = ceil(n, tiles.n)
    count = across * (across + 1) // 2
    parts = _parts(count * K, m, tiles, processors(total.device)) if parts is None else parts
    rows_each = ceil(ceil(m, parts), tiles.depth) * tiles.depth
    shape = (parts, K, count, tiles.n, tiles.n) if parts > 1 else (1,)
    partial = torch.empty(shape, dtype=torch.float32, device=total.device)
    strides, listed = total.stride()[:2], matrices if first.ndim == 3 else filled_up(matrices)
    with on(total.device):
        kernels().gram_kernel[(count, parts, K)](
            total, listed, weight, by, float(alpha), partial, m, n, rows_each, *strides, X_k, first.stride(-2),
            LISTED=len(listed), SPLIT=parts > 1, PACKED=packed, BLOCK=tiles.n, BLOCK_ROWS=tiles.depth,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        if parts > 1:
            lines = min(FINISH_LINES, tiles.n)
            kernels().gram_finish_kernel[(count, tiles.n // lines, K)](
                total, weight, partial, parts, n, *strides, PACKED=packed, BLOCK=tiles.n, LINES=lines, num_warps=4
            )


def pair_product(
    A: HalfPair | Half,
    B: HalfPair | Half,
    *,
    symmetric: bool = False,
    skew: bool = False,
    add: Float[Tensor, "*K m n"] | None = None,
    alpha: Float32[Tensor, "*K"] | int | float = 1.0,
    beta: Float32[Tensor, "*K"] | int | float = 1.0,
    identity: int | float = 0.0,
    out: Float[Tensor, "*K m n"] | None = None,
    cut: bool = False,
    whole: bool = False,
    tiles: Tiles | None = None,
) -> Float[Tensor, "*K m n"]:
    """The products ``identity·I + beta·add + alpha·A B`` of pairs, as one kernel; one matrix or a stack.

    If one operand is a `Half`, only the pair's `hi` is used, unless the `whole` pair is asked for. `alpha` and `beta`
    are numbers, or one for each matrix on the device. With `symmetric` the result is known to be symmetric: tiles on
    and below the diagonal are computed and mirrored (`add` is read there only); with `skew` too, ``A B`` is symmetric
    and `add` antisymmetric. `out`, of float32 or rounded to float16, may be `add`, but shares no memory with A or B;
    with `cut` finite numbers that float16 cannot hold are cut off, else they become infinite.
    """
    pairs = isinstance(A, HalfPair), isinstance(B, HalfPair)
    pairs = pairs if whole or all(pairs) else (False, False)
    tiles = tiles or (PAIR_TILES if any(pairs) else ROUGH_TILES)
    A_hi, A_lo, A_scale = _parts_of(A)
    B_hi, B_lo, B_scale = _parts_of(B)
    K, m, depth = A_hi.shape
    n = B_hi.shape[2]
    if B_hi.shape[:2] != (K, depth) or (symmetric and m != n):
        raise InputError(
            describe(
                f"a product of {tuple(A.shape)} with {tuple(B.shape)}",
                "equal stacks [K, m, n] or two matrices, with fitting inner axes" + ", and m = n" * symmetric,
                "check the axes, or transpose with `.mT`",
            )
        )
    if symmetric and tiles.m != tiles.n:
        raise InputError(describe(f"{tiles}", "square tiles for a symmetric product", "pass tiles with m = n"))
    C = torch.empty(*A.shape[:-1], n, dtype=torch.float32, device=A.device) if out is None else out
    if C.numel() == 0:
        return C
    C_, D_ = _stack(_adjacent(C, "out"), "out"), None if add is None else _stack(_adjacent(add, "add"), "add")
    (alphas, alpha_number), (betas, beta_number) = _factor(alpha), _factor(beta)
    across = ceil(n, tiles.n)
    count = across * (across + 1) // 2 if symmetric else ceil(m, tiles.m) * across
    D_strides = (0, 0) if D_ is None else D_.stride()[:2]
    with on(A.device):
        kernels().pair_product_kernel[(count, K)](
            C_, A_hi, A_lo, B_hi, B_lo, A_scale, B_scale, D_, alphas, betas, alpha_number, beta_number, float(identity),
            m, n, depth, *A_hi.stride(), *B_hi.stride(), *C_.stride()[:2], *D_strides,
            A_PAIR=pairs[0], B_PAIR=pairs[1], HAS_D=D_ is not None, HAS_ALPHA=alphas is not None,
            HAS_BETA=betas is not None, HAS_IDENTITY=identity != 0, SYMMETRIC=symmetric, SKEW=skew,
            EVEN_DEPTH=depth % tiles.depth == 0, CUT=cut,
            BLOCK_M=tiles.m, BLOCK_N=tiles.n, BLOCK_DEPTH=tiles.depth,
            GROUP=tiles.group, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return C


def takes(A: HalfPair | Half, B: HalfPair | Half) -> bool:
    """Whether `pair_product` is the way to multiply these: equal stacks, on a GPU, with rows that begin on 16 bytes.

    >>> from layerwise.optim.cuda.linalg.split_fp16 import split
    >>> takes(split(torch.eye(16)), split(torch.eye(16)))
    False
    """
    alike = A.hi.ndim in (2, 3) and A.shape[:-2] == B.shape[:-2]
    alike = alike and A.shape[:-2].numel() <= MOST_MATRICES
    return alike and available(A.device) and _loads_fast(A.hi) and _loads_fast(B.hi)


def _loads_fast(half: Tensor) -> bool:
    row, column = half.stride()[-2:]
    return (column == 1 and row % ALIGNED == 0) or (row == 1 and column % ALIGNED == 0)


def _factor(x: Tensor | int | float) -> tuple[Tensor | None, float]:
    return (x.reshape(-1).contiguous(), 1.0) if isinstance(x, Tensor) else (None, float(x))


def _check_gram(total: Tensor, matrices: tuple[Tensor, ...], packed: bool) -> None:
    first, K = matrices[0] if matrices else torch.empty(0, 0), total.shape[0]
    across = ceil(first.shape[-1], 16)
    alike = all((X.shape, X.stride(), X.dtype) == (first.shape, first.stride(), first.dtype) for X in matrices)
    narrow = across * (across + 1) // 2 <= total.shape[1] if packed else first.shape[-1] == total.shape[-1]
    fitting = narrow and (first.shape[0] if first.ndim == 3 else len(matrices)) == K
    half, whole = first.dtype in (torch.float16, torch.bfloat16), not packed or total[0].is_contiguous()
    if not (alike and fitting and half and whole and first.stride(-1) == 1 and total.stride(-1) == 1):
        raise InputError(
            describe(
                f"{len(matrices)} × X of {first.dtype}, shape {tuple(first.shape)}, strides {first.stride()}, "
                f"for totals of shape {tuple(total.shape)}, strides {total.stride()}",
                "matrices alike, of float16 or bfloat16, one for each total and as wide (packed totals may be wider), "
                "with a last stride of 1",
                "cast X, or call `.contiguous()`",
            )
        )


@cache
def _parts(units: int, rows: int, tiles: Tiles, processors: int) -> int:
    """Into how many parts to cut the rows, so that few processors wait for the last tiles; by a model of the time.

    A processor does a row of a tile in 7 ns; storing and adding the parts runs at 3 TB/s, after a launch of 2 µs.
    """
    row, launch, byte = 7e-9, 2e-6, 1 / 3e12

    def seconds(parts: int) -> float:
        waves = ceil(units * parts, processors)
        added = launch + units * parts * tiles.n**2 * 8 * byte if parts > 1 else 0.0
        return waves * rows / parts * row * (tiles.n / 128) ** 2 + added

    return min((p for p in range(1, 9) if p == 1 or rows // p >= 4 * tiles.depth), key=seconds)


def _parts_of(pair: HalfPair | Half) -> tuple[Float16[Tensor, "K m n"], Float16[Tensor, "K m n"], Float32[Tensor, "K"]]:
    hi, scale = _stack(pair.hi, "a pair"), pair.scale.reshape(-1).contiguous()
    if isinstance(pair, Half):
        return hi, hi, scale
    lo = _stack(pair.lo, "a pair")
    if hi.stride() != lo.stride():
        hi, lo = hi.contiguous(), lo.contiguous()
    return hi, lo, scale


def _stack(M: Tensor, name: str) -> Tensor:
    if M.ndim not in (2, 3):
        raise InputError(
            describe(f"{name} of shape {tuple(M.shape)}", "a matrix or a stack [K, m, n]", "flatten the batch axes")
        )
    return M if M.ndim == 3 else M[None]


def _adjacent(M: Tensor, name: str) -> Tensor:
    if M.stride(-1) != 1:
        raise InputError(describe(f"{name} with strides {M.stride()}", "a last stride of 1", "call `.contiguous()`"))
    return M
