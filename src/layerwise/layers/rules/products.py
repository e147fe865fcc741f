"""Reads matrix products: which argument is the weight, which the rows, and how the output's axes are those of the rows.

    rows [*lead, I] · W → [*lead, O],   or of K matrices at once   [*lead, K, I] → [*lead, K, O]

`linear`, `matmul` and ``@``, `mm`, `bmm`, `addmm`, `baddbmm` and `einsum` of two tensors; `grouped_mm` as one product
for each of its groups of rows; a depthwise `conv1d` (Mamba's) as products of windows, one matrix ``[1, k]`` a channel.
"""

import itertools
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.layers.form import Form, LayerRule, Part

Move = Callable[[Tensor], Tensor]
GROUPED_MM: Any = getattr(torch, "_grouped_mm", None)
"""What `torch.nn.functional.grouped_mm` calls; Hugging Face's mixtures of experts use either."""


def _same(t: Tensor) -> Tensor:
    return t


def _swap(t: Tensor) -> Tensor:
    return t.mT


def _matrix_last(t: Tensor) -> Tensor:
    """``[*lead, K, n, d] -> [*lead, n, K, d]``, and back."""
    return t.movedim(-3, -2)


def _swap_matrix_last(t: Tensor) -> Tensor:
    """``[*lead, K, d, n] -> [*lead, n, K, d]``."""
    return t.mT.movedim(-3, -2)


def _channels_last(t: Tensor) -> Tensor:
    """``[*lead, K, n] -> [*lead, n, K, 1]``."""
    return t.mT.unsqueeze(-1)


def _channels_first(t: Tensor) -> Tensor:
    return t.squeeze(-1).mT


def _swap_matrix_first(t: Tensor) -> Tensor:
    return t.movedim(-2, -3).mT


@dataclass(frozen=True)
class Product:
    """One reading of a call; which of its tensors are parameters is not known here."""

    weight: Tensor
    """A parameter, or a view of one."""
    transposed: bool
    """Whether it is [K, I, O] and not [K, O, I]."""
    x: Tensor
    """``[*lead, I]``, or ``[*lead, K, I]`` where the weight has three axes."""
    bias: Tensor | None = None
    to_rows: Move = _same
    """From the call's output to ``[*lead, O]`` or ``[*lead, K, O]``."""
    from_rows: Move = _same


def readings(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Product]:
    """The ways to read a call: for a product of two tensors each of them may be the weight."""
    reader = _READERS.get(func)
    if reader is not None:
        try:
            yield from reader(*args, **kwargs)
        except TypeError:  # arguments that the function itself will refuse
            return


def grouped(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, list[int]] | None:
    """Rows, weights ``[E, I, O]`` and rows a weight of a grouped product (experts of a mixture); None if it is none."""
    if func is not GROUPED_MM or len(args) < 2:
        return None
    x, weight, offs = *args[:2], kwargs.get("offs", args[2] if len(args) > 2 else None)
    if not isinstance(offs, Tensor) or x.ndim != 2 or weight.ndim != 3:
        return None
    ends = [0, *offs.tolist()]
    if ends[-1] != len(x):
        return None
    return x, weight, [stop - start for start, stop in itertools.pairwise(ends)]


def _linear(input: Any, weight: Any, bias: Any = None) -> Iterator[Product]:
    if weight.ndim == 2:
        yield Product(weight, False, input, bias)


def _matmul(input: Any, other: Any, **_: Any) -> Iterator[Product]:
    a, b = input, other
    if b.ndim == 2 and a.ndim >= 1:
        yield Product(b, True, a)
    if a.ndim == 2 and b.ndim >= 2:
        yield Product(a, False, b.mT, None, _swap, _swap)
    if a.ndim >= 3 and b.ndim == 3 and a.shape[-3] == b.shape[0]:
        yield Product(b, True, _matrix_last(a), None, _matrix_last, _matrix_last)
    if b.ndim >= 3 and a.ndim == 3 and b.shape[-3] == a.shape[0]:
        yield Product(a, False, _swap_matrix_last(b), None, _swap_matrix_last, _swap_matrix_first)


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1, **_: Any) -> Iterator[Product]:
    if alpha != 1:
        return
    for found in _matmul(mat1, mat2):
        whole = beta == 1 and input.ndim == 1 and found.weight is mat2
        yield Product(found.weight, found.transposed, found.x, input if whole else None, found.to_rows, found.from_rows)


def _baddbmm(input: Any, batch1: Any, batch2: Any, *, alpha: Any = 1, **_: Any) -> Iterator[Product]:
    if alpha == 1:
        yield from _matmul(batch1, batch2)


def _conv1d(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: Any = 1
) -> Iterator[Product]:
    """One kernel a channel; its bias is read as a parameter by itself."""
    if groups != weight.shape[0] or weight.shape[1] != 1 or input.shape[-2] != groups or isinstance(padding, str):
        return
    s, p, d = (value if isinstance(value, int) else value[0] for value in (stride, padding, dilation))
    windows = F.pad(input, (p, p)).unfold(-1, d * (weight.shape[-1] - 1) + 1, s)[..., ::d]  # [*lead, K, n, k]
    yield Product(weight, False, windows.movedim(-3, -2), None, _channels_last, _channels_first)


def _einsum(equation: Any, *operands: Any) -> Iterator[Product]:
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], tuple | list) else operands
    if not isinstance(equation, str) or len(tensors) != 2:
        return
    left, arrow, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or len(terms) != 2:
        return
    for term, tensor in zip(terms, tensors, strict=True):
        if "..." in term:  # axes without a letter get one; a weight has none of them
            size = tensor.ndim - len(term) + len("...")
            letters = "".join(c for c in string.ascii_letters if c not in equation)[:size]
            terms, result = [t.replace("...", letters) for t in terms], result.replace("...", letters)
            break
    for number in (1, 0):
        found = _contraction(terms[number], tensors[number], terms[1 - number], tensors[1 - number], result)
        if found is not None:
            yield found


def _contraction(w: str, weight: Tensor, x: str, rows: Tensor, out: str) -> Product | None:
    """``W[k, i, o]`` and ``x[…, k, i]``: one index is summed, one is the output's alone, the rest are in both."""
    if (
        weight.ndim not in (2, 3)
        or len(w) != weight.ndim
        or len(x) != rows.ndim
        or any(len(set(term)) < len(term) for term in (w, x, out))
    ):
        return None
    summed, own = [c for c in w if c not in out], [c for c in w if c not in x]
    shared = [c for c in w if c in x and c in out]
    lead = [c for c in x if c not in w]
    if len(summed) != 1 or len(own) != 1 or summed[0] not in x or any(c not in out for c in lead):
        return None
    k = shared[:1]
    if len(shared) != weight.ndim - 2 or (k and w[0] != k[0]) or len(out) != len(lead) + len(k) + 1:
        return None
    order = [out.index(c) for c in (*lead, *k, own[0])]
    back = [order.index(axis) for axis in range(len(order))]
    return Product(
        weight,
        w.index(summed[0]) < w.index(own[0]),
        rows.permute([x.index(c) for c in (*lead, *k, summed[0])]),
        None,
        lambda t: t.permute(order),
        lambda t: t.permute(back),
    )


_READERS: dict[Any, Callable[..., Iterator[Product]]] = {
    F.linear: _linear,
    F.conv1d: _conv1d,
    torch.einsum: _einsum,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    torch.baddbmm: _baddbmm,
    Tensor.baddbmm: _baddbmm,
    **dict.fromkeys(
        (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm), _matmul
    ),
}


class StackedRule(LayerRule[nn.Module]):
    """K matrices in one parameter, each with rows of its own: x is ``[*lead, K, I]``."""

    rounds_inputs = True

    def forms(self, module: nn.Module, parts: dict[str, Part]) -> dict[str, Form]:
        """None: what is used in a product is found by use, not by its module."""
        return {}

    def lead(self, module: nn.Module, site: str, x: Tensor) -> int:
        """All but the matrix and the features."""
        return x.ndim - 2

    def inputs(self, module: nn.Module, site: str, x: Tensor) -> Tensor:
        """``[*lead, 1, K, I]``."""
        return x.unsqueeze(-3)

    def outgrads(self, module: nn.Module, site: str, dy: Tensor) -> Tensor:
        """``[V, *lead, 1, K, O]``."""
        return dy.unsqueeze(-3)
