"""One layer's part of the tangent kernel, from the standard form of two sets of examples.

    Θ[n v, m w] = ⟨Σ_s g[v,n,s] a[n,s]ᵀ, Σ_t g′[w,m,t] a′[m,t]ᵀ⟩

is a contraction of four tensors. The order in which they are contracted decides what it costs:

| order | first | then | multiply-adds a pair of examples and a group |
|---|---|---|---|
| `gram` | ``A = a·a′``, ``B = g·g′`` | ``Σ_st A B`` | ``S T (I + V W O)`` |
| `chain` | ``A = a·a′``, ``H = A g′`` | ``g·H`` | ``S T (I + W O) + S V W O`` |
| `product` | ``R′ = Σ g′a′ᵀ``, ``H = R′ a`` | ``g·H`` | ``S W O I + S V W O`` |
| `rows` | ``R = Σ g aᵀ``, ``R′`` | ``R·R′`` | ``V W O I`` |

`product` is a vector product: the pull-back ``R′`` of each output of the second set, pushed forward through the
first. `rows` keeps per-example gradients on both sides.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from layerwise.layers.io.one_hot import OneHot
from layerwise.layers.io.standard import Chunk, Gradients, Standard

Block = Float[Tensor, "N V M W"]


def rows_of(chunk: Chunk) -> Float[Tensor, "N V D"]:
    """Per-example gradients as rows, example-major."""
    return chunk.per_example_grads().flatten(2).transpose(0, 1)


def rows(left: Chunk, right: Chunk) -> Block:
    """Per-example gradients on both sides."""
    alike = left is right
    left, right = _small_vocabulary(left, right)
    R = rows_of(left)
    R2 = R if alike else rows_of(right)
    return (R.flatten(0, 1) @ R2.flatten(0, 1).mT).view(*R.shape[:2], *R2.shape[:2])


def gram(left: Standard, right: Standard) -> Block:
    """The product of two Gram matrices, summed over pairs of positions."""
    (v, n, s, k, _), (w, m, t, *_) = left.g.shape, right.g.shape
    A = _input_gram(left.a, right.a).to(left.g.dtype)  # K, N·S, M·T
    g = left.g.permute(3, 1, 0, 2, 4).reshape(k, n * v * s, -1)
    g2 = g if right is left else right.g.permute(3, 1, 0, 2, 4).reshape(k, m * w * t, -1)
    B = (g @ g2.mT).view(k, n, v, s, m, w, t)
    B *= A.view(k, n, 1, s, m, 1, t)
    return B.sum((0, 3, 6)) if k * s * t > 1 else B.view(n, v, m, w)


def chain(left: Standard, right: Standard) -> Block:
    """The Gram matrix of the inputs applied to the second gradients: ``H = A g′``."""
    (_, n, s, k, _), (w, m, t, _, o) = left.g.shape, right.g.shape
    A = _input_gram(left.a, right.a).to(left.g.dtype).view(k, n * s, m, t).transpose(1, 2)  # K, M, N·S, T
    g2 = right.g.permute(3, 1, 2, 0, 4).reshape(k, m, t, w * o)
    return _dot(left.g, (A @ g2).view(k, m, n, s, w, o))


def product(left: Standard, right: Standard) -> Block:
    """The second pull-backs applied to the first inputs: ``H = R′ a``."""
    (_, n, s, k, _), (w, m, *_, o) = left.g.shape, right.g.shape
    a, second = left.a, right
    if isinstance(a, OneHot):
        first, second = _small_vocabulary(left, right)
        assert isinstance(first, Standard)
        assert isinstance(first.a, OneHot)
        a = first.a.dense(left.g.dtype)
    R2 = second.per_example_grads().permute(2, 1, 0, 3, 4).reshape(k, m, w * o, -1)
    inputs = a.permute(2, 0, 1, 3).reshape(k, 1, n * s, -1)
    return _dot(left.g, (inputs @ R2.mT).view(k, m, n, s, w, o))


def _dot(g: Float[Tensor, "V N S K O"], H: Float[Tensor, "K M N S W O"]) -> Block:
    """``Σ_{k,s,o} g H``."""
    v, n, s, k, o = g.shape
    m, w = H.shape[1], H.shape[4]
    left = g.permute(1, 0, 3, 2, 4).reshape(n, v, k * s * o)
    right = H.permute(2, 1, 4, 0, 3, 5).reshape(n, m * w, k * s * o)
    return (left @ right.mT).view(n, v, m, w)


def _input_gram(a: Tensor | OneHot, a2: Tensor | OneHot) -> Shaped[Tensor, "K NS MT"]:
    """``a·a′`` for all pairs of examples and positions."""
    if isinstance(a, OneHot) and isinstance(a2, OneHot):
        first, second = a.index.reshape(-1, 1), a2.index.reshape(1, -1)
        return ((first == second) & (first >= 0)).unsqueeze(0)
    assert isinstance(a, Tensor)
    assert isinstance(a2, Tensor)
    return a.flatten(0, 1).movedim(1, 0) @ a2.flatten(0, 1).permute(1, 2, 0)


def _small_vocabulary(left: Chunk, right: Chunk) -> tuple[Chunk, Chunk]:
    """One-hot inputs renumbered by the tokens that occur, so that no row is as long as the vocabulary."""
    if not isinstance(left, Standard) or not isinstance(left.a, OneHot):
        return left, right
    assert isinstance(right, Standard)
    assert isinstance(right.a, OneHot)
    indices, size = (left.a.index, right.a.index), left.a.size
    both = torch.cat([index.flatten() for index in indices])
    if both.device.type == "cpu":
        numbers, count = _by_token(both)
    elif size > both.numel():
        numbers, count = _by_place(both)
    else:
        return left, right
    parts = zip(numbers.split([index.numel() for index in indices]), indices, strict=True)
    first, second = (OneHot(part.view(index.shape), count) for part, index in parts)
    return Standard(first, left.g), Standard(second, right.g)


def _by_token(index: Int[Tensor, "M"]) -> tuple[Int[Tensor, "M"], int]:
    """A number for each token that occurs, and how many there are; padding stays −1."""
    tokens, place = torch.unique(index, return_inverse=True)
    absent = int(tokens.numel() > 0 and tokens[0] == -1)
    return place - absent, tokens.numel() - absent


def _by_place(index: Int[Tensor, "M"]) -> tuple[Int[Tensor, "M"], int]:
    """As many numbers as positions, so that the number of tokens need not be read back from the device.

    >>> _by_place(torch.tensor([7, -1, 7, 3]))
    (tensor([ 2, -1,  2,  1]), 4)
    """
    place = torch.searchsorted(index.sort().values, index)
    return torch.where(index < 0, -1, place), index.numel()


ORDERS: dict[str, Callable[..., Block]] = {"gram": gram, "chain": chain, "product": product, "rows": rows}


def contract(order: str, left: Chunk, right: Chunk) -> Block:
    """One layer's kernel between two sets of examples, in the order named."""
    if isinstance(left, Gradients) or isinstance(right, Gradients):
        return rows(left, right)
    return ORDERS[order](left, right)
