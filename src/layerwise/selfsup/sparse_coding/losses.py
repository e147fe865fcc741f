"""What a dictionary is judged by: how well it represents samples, or how well it predicts what it was not shown."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.random import stream
from layerwise.selfsup.sparse_coding.omp import SparseCode, check_numbers, check_shapes, omp, pursue


def reconstruction_loss(
    Y: Float[Tensor, "*batch n d"], B: Float[Tensor, "*batch d q"], k: int, *, normalize: bool = False
) -> Float[Tensor, "*batch"]:
    """L(B, k): the mean of ‖y − B z‖², with z by OMP (a constant of the gradient). Noise is represented, too.

    >>> reconstruction_loss(torch.tensor([[3.0, 4.0]]), torch.eye(2), 1)
    tensor(9.)
    """
    residual = Y - represented(omp(Y, B, k, normalize=normalize), B)
    return residual.square().sum(-1).mean(-1)


def masked_omp_loss(
    Y: Float[Tensor, "*batch n d"],
    B: Float[Tensor, "*batch d q"],
    k: int,
    visible: Bool[Tensor, "*#batch d"],
    *,
    normalize: bool = False,
) -> Float[Tensor, "*batch"]:
    """L_mask(B, k, M): the mean of ‖[y − B z]‖² over hidden coordinates, with z by OMP on the visible ones, M.

    Noise of hidden coordinates cannot be represented, and adds its variance for each of them.

    >>> B = torch.tensor([[0.6], [0.8]])
    >>> round(float(masked_omp_loss(torch.tensor([[3.0, 5.0]]), B, 1, torch.tensor([True, False]))), 4)
    1.0
    """
    check_shapes(Y, B, k, visible)
    if bool(visible.all(-1).any()):
        raise InputError(describe("no hidden row", "at least one, to predict", "hide some coordinates"))
    residual = Y - represented(omp(Y, B, k, visible=visible, normalize=normalize), B)
    return (residual * ~visible[..., None, :]).square().sum(-1).mean(-1)


def heldout_masked_loss(
    Y: Float[Tensor, "*batch n d"],
    B: Float[Tensor, "*batch d q"],
    k: int,
    hidden_fraction: float | int = 0.1,
    *,
    generator: torch.Generator | int = 0,
    normalize: bool = False,
) -> Float[Tensor, "*batch"]:
    """The masked loss of samples that were not trained on, every coordinate hidden once, in parts of equal size.

    It needs no truth, and says when to stop and how many atoms to take: see `DictionaryLearner`. Its mean over the
    parts is the masked loss of a random mask; coordinates of an incomplete last part are left out.

    Args:
        Y: held-out samples.
        B: a dictionary.
        k: atoms a sample.
        hidden_fraction: the share of coordinates that is hidden at a time.
        generator: a generator, or a seed, for the division into parts.
        normalize: see `omp`.

    >>> round(float(heldout_masked_loss(torch.ones(4, 20), torch.full((20, 1), 20**-0.5), 1)), 6)
    0.0
    """
    check_shapes(Y, B, k)
    d = Y.shape[-1]
    hidden = hidden_count(d, hidden_fraction)
    if d - hidden < k:
        given = f"k={k} with {d - hidden} visible rows of {d}"
        raise InputError(describe(given, "at least k visible rows", "hide fewer coordinates, or take a smaller k"))
    random = generator if isinstance(generator, torch.Generator) else stream(generator, "parts")
    parts = torch.randperm(d, generator=random)[: d // hidden * hidden].view(-1, hidden)
    visible = torch.ones(len(parts), d, dtype=torch.bool).scatter_(1, parts, False).to(Y.device)
    columns = B.reshape(-1, *B.shape[-2:])
    sizes = columns.norm(dim=-2)
    check_numbers(Y, columns, sizes)
    return torch.stack([_hidden_loss(Y, B, k, part, sizes, normalize) for part in visible]).mean(0)


def _hidden_loss(Y: Tensor, B: Tensor, k: int, visible: Tensor, sizes: Tensor, normalize: bool) -> Tensor:
    batch, (n, d) = Y.shape[:-2], Y.shape[-2:]
    keep = visible.to(Y.dtype).expand(len(sizes), d)
    columns = B.reshape(-1, *B.shape[-2:])
    sizes = (columns * keep[..., None]).norm(dim=-2) if normalize else sizes
    code = pursue(Y.reshape(-1, n, d), columns, sizes, k, visible=keep, normalize=normalize)
    residual = Y - represented(SparseCode(*(part.reshape(*batch, n, k) for part in code)), B)
    return (residual * ~visible).square().sum(-1).mean(-1)


def represented(code: SparseCode, B: Float[Tensor, "*batch d q"]) -> Float[Tensor, "*batch n d"]:
    """B z, from the atoms that z has.

    >>> code = SparseCode(torch.tensor([[1, 0]]), torch.tensor([[2.0, 1.0]]))
    >>> represented(code, torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    tensor([[1., 2.]])
    """
    return gathered(code.indices, B.mT, code.values)


def gathered(
    indices: Tensor, atoms: Float[Tensor, "*batch q d"], values: Float[Tensor, "*batch n k"]
) -> Float[Tensor, "*batch n d"]:
    """Sums of atoms (as rows), each multiplied by its value."""
    *batch, n, k = indices.shape
    q, d = atoms.shape[-2:]
    first = (torch.arange(max(1, indices.numel() // (n * k)), device=indices.device) * q).view(*batch, 1, 1)
    flat = atoms.reshape(-1, d)
    total = torch.zeros((), device=values.device, dtype=values.dtype)
    for t in range(k):
        chosen = flat.index_select(0, (indices[..., t : t + 1] + first).reshape(-1)).view(*batch, n, d)
        total = total + chosen * values[..., t : t + 1]
    return total


def hidden_count(d: int, fraction: float | int) -> int:
    """⌊fraction · d⌋ hidden coordinates, at least one.

    >>> hidden_count(100, 0.1), hidden_count(57, 0.1), hidden_count(4, 0.1)
    (10, 5, 1)
    """
    if not 0 < fraction < 1:
        raise InputError(describe(f"hidden_fraction={fraction}", "a number in (0, 1)", "take e.g. 0.1"))
    if d < 2:
        given = f"samples of {d} feature(s)"
        raise InputError(describe(given, "two or more, so that some can be hidden", "use hidden_fraction=0"))
    return min(d - 1, max(1, int(fraction * d + 1e-9)))
