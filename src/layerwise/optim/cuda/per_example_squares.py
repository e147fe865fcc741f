"""Squares of per-example gradients in a basis, EKFAC's scalings, for all layers of a stack.

Of half precision, as the layers computed: errors of single products average out over examples.
"""

from collections.abc import Sequence

import torch
from jaxtyping import BFloat16, Float, Float32
from torch import Tensor

from layerwise.optim.cuda.contraction_orders import Order, Sizes
from layerwise.optim.cuda.rows import has_plain_rows
from layerwise.optim.rule import Recorded


def alike(recorded: Sequence[Sequence[Recorded]]) -> bool:
    """Whether every layer has one call, of a plain linear map in half precision, and all look the same."""
    if not recorded or any(len(calls) != 1 or not has_plain_rows(calls[0].io) for calls in recorded):
        return False
    looks = {
        (call.io.examples, call.factor, call.io.calls[0].x.shape, call.io.spec.form.bias is not None)
        for (call,) in recorded
    }
    return len(looks) == 1


@torch.no_grad()
def squares_of_stack(
    recorded: Sequence[Sequence[Recorded]], P: tuple[Tensor, Tensor], Q: tuple[Tensor, Tensor]
) -> Float32[Tensor, "K O I"]:
    """``Σ_n (U_Pᵀ (Σ_s g aᵀ) U_Q)²`` of layers that are `alike`; a basis may be wider than they are.

    P and Q are bases times a number for each group, and these numbers.
    """
    layers, (U_P, scale_P), (U_Q, scale_Q) = [call for (call,) in recorded], P, Q
    sizes, examples = Sizes.of(layers[0], U_P, U_Q), layers[0].io.examples
    order, by = sizes.order, layers[0].factor / scale_P / scale_Q
    found = torch.empty(len(layers), sizes.O, sizes.I, dtype=torch.float32, device=U_P.device)
    for some in sizes.shares(len(layers), examples):
        bases, total = (_rounded(U_P[some, : sizes.p], by[some]), U_Q[some].bfloat16()), found[some]
        for part in sizes.parts(examples):
            rows = [_rows(layer, part) for layer in layers[some]]
            g, a = (_stacked(side) for side in zip(*rows, strict=True))
            squares = squares_of_rows(g, a, *bases, sizes, order, total if not part.start else torch.empty_like(total))
            if part.start:
                total.add_(squares)
    return found


def _rounded(U: Float[Tensor, "k p O"], by: Float[Tensor, "k"]) -> BFloat16[Tensor, "k p O"]:
    """A basis times a number for each group, which is free here and would be a pass over all squares afterwards."""
    return torch.mul(U, by.view(-1, 1, 1), out=torch.empty(U.shape, dtype=torch.bfloat16, device=U.device))


def _rows(layer: Recorded, part: slice) -> tuple[Float[Tensor, "n s p"], Float[Tensor, "n s q"]]:
    """Output gradients and inputs of some examples, as they are."""
    io = layer.io
    if part.stop - part.start < io.examples:
        io = io.narrow(part.start, part.stop)
    call = io.calls[0]
    assert call.dy is not None
    a = call.inputs(io.examples, call.x.dtype)
    assert isinstance(a, Tensor)
    return call.outgrads(io.examples, call.dy.dtype)[0].squeeze(2), a.squeeze(2)


def _stacked(rows: Sequence[Float[Tensor, "n s w"]]) -> BFloat16[Tensor, "k n s w"]:
    """Of one layer that is in bfloat16 already, no copy."""
    return (rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(list(rows))).bfloat16()


def squares_of_rows(
    g: BFloat16[Tensor, "k n s p"],
    a: BFloat16[Tensor, "k n s q"],
    U_P: BFloat16[Tensor, "k p O"],
    U_Q: BFloat16[Tensor, "k I I"],
    sizes: Sizes,
    order: Order,
    out: Float32[Tensor, "k O I"],
) -> Float32[Tensor, "k O I"]:
    """In one of the orders; nothing of the size of rows or gradients is copied for it."""
    k, n = g.shape[:2]
    if order.left:
        g = (g.flatten(1, 2) @ U_P).view(k, n, sizes.s, sizes.O)
    if order.right:
        a = _turned_inputs(a, U_Q, sizes.bias)
    if all(order) and sizes.s == 1:  # the square of g aᵀ is that of g times that of a
        return torch.bmm(g.squeeze(2).float().square().mT, a.squeeze(2).float().square(), out=out)
    grads = _gradients(g.flatten(0, 1), a.flatten(0, 1), sizes, order)
    if not order.left:
        grads = U_P.mT @ grads.view(sizes.p, k, -1).transpose(0, 1)
    if not order.right:
        grads = grads.view(k, -1, sizes.columns) @ U_Q[:, : sizes.columns]
    grads = grads.view(k, n, sizes.O, sizes.I) if order.left else grads.view(k, sizes.O, n, sizes.I)
    # a norm adds squares up as it reads them: nothing of the size of all gradients is made in float32
    return torch.linalg.vector_norm(grads, dim=1 if order.left else 2, dtype=torch.float32, out=out).square_()


def _turned_inputs(
    a: BFloat16[Tensor, "k n s q"], U_Q: BFloat16[Tensor, "k I I"], bias: bool
) -> BFloat16[Tensor, "k n s I"]:
    """The bias's row of the basis, which ones would be multiplied by, is added."""
    k, n, s, q = a.shape
    rows, U = a.flatten(1, 2), U_Q[:, :q]
    if not bias:
        turned = rows @ U
    elif k == 1:  # by the product as it writes; several products begin with a copy of the row for each result
        turned = torch.addmm(U_Q[0, q], rows[0], U[0])
    else:
        turned = torch.baddbmm(U_Q[:, q : q + 1], rows, U)
    return turned.view(k, n, s, -1)


def _gradients(
    g: BFloat16[Tensor, "m s o"], a: BFloat16[Tensor, "m s i"], sizes: Sizes, order: Order
) -> BFloat16[Tensor, "_ _ columns"]:
    """``Σ_s g aᵀ`` of m examples, with a column for the bias if a has not been turned yet.

    ``[m, o, columns]``, where the rows of a layer's examples are one matrix, to be turned from the right; or, if the
    left side is to be turned, ``[o, m, columns]``, where their columns are one.
    """
    (m, _, o), own = g.shape, a.shape[-1]
    columns = sizes.I if order.right else sizes.columns
    grads = g.new_empty((m, o, columns) if order.left else (o, m, columns))
    by_example = grads if order.left else grads.transpose(0, 1)
    torch.bmm(g.mT, a, out=by_example[..., :own])
    if own < columns:
        by_example[..., own:] = 0
        by_example[..., own] = g.sum(1)
    return grads
