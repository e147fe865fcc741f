"""Squares of per-example gradients in a basis, EKFAC's scalings, for all layers of a stack at once.

Of half precision, as the layers computed: errors of single products average out over examples.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import BFloat16, Float
from torch import Tensor

from layerwise.optim.rows import has_plain_rows
from layerwise.optim.rule import Recorded

MOST_BYTES = 2**31
"""Of what is made of some layers at a time."""


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
) -> Float[Tensor, "K O I"]:
    """``Σ_n (U_Pᵀ (Σ_s g aᵀ) U_Q)²`` of layers that are `alike`; a basis may be wider than they are.

    P and Q are bases times a number for each group, and these numbers.
    """
    layers, (U_P, scale_P), (U_Q, scale_Q) = [call for (call,) in recorded], P, Q
    O, I = U_P.shape[-1], U_Q.shape[-1]
    found = [
        _squares(_outgrads(layers[some], O), _inputs(layers[some], I), U_P[some].bfloat16(), U_Q[some].bfloat16())
        for some in _shares(layers, O, I)
    ]
    by = (layers[0].factor / scale_P / scale_Q).square().view(-1, 1, 1)
    # the transposed layout of some ways would be refused by the running means
    return (found[0].contiguous() if len(found) == 1 else torch.cat(found)).mul_(by)


def _shares(layers: Sequence[Recorded], O: int, I: int) -> Iterator[slice]:
    """Neighbours whose tensors fit into the memory: rows and gradients, each twice."""
    call = layers[0].io.calls[0]
    rows, examples = call.x.numel() // call.x.shape[-1], layers[0].io.examples
    count = max(1, MOST_BYTES // (4 * (rows * (O + I) + examples * O * I)))
    return (slice(start, start + count) for start in range(0, len(layers), count))


def _inputs(layers: Sequence[Recorded], width: int) -> BFloat16[Tensor, "k N S I"]:
    """Inputs, ones where there is a bias, and zeros up to the width: tensor cores want widths of 8 or more."""
    rows = [_rows(layer.io.calls[0].inputs(layer.io.examples, layer.io.calls[0].x.dtype)) for layer in layers]
    own = rows[0].shape[-1]
    found = rows[0].new_empty(len(rows), *rows[0].shape[:-1], width, dtype=torch.bfloat16)
    for place, x in zip(found, rows, strict=True):
        place[..., :own].copy_(x)  # rounds on its way
    found[..., own:] = 0
    if layers[0].io.spec.form.bias is not None:
        found[..., own] = 1
    return found


def _outgrads(layers: Sequence[Recorded], width: int) -> BFloat16[Tensor, "k N S O"]:
    rows = []
    for layer in layers:
        dy = layer.io.calls[0].dy
        assert dy is not None
        rows.append(_rows(layer.io.calls[0].outgrads(layer.io.examples, dy.dtype)[0]))
    g = torch.stack(rows).bfloat16()
    return g if g.shape[-1] == width else torch.nn.functional.pad(g, (0, width - g.shape[-1]))


def _rows(X: object) -> Float[Tensor, "N S n"]:
    assert isinstance(X, Tensor)
    return X.squeeze(2)


def _squares(g: Tensor, a: Tensor, U_P: Tensor, U_Q: Tensor) -> Float[Tensor, "k O I"]:
    """Each side is turned where that is cheaper: rows before, or the gradients of examples after.

    Rows of g cost S O² an example, its gradient O² I (and a transposed copy); rows of a cost S I², the gradient O I².
    """
    k, n, s, o = g.shape
    i = a.shape[-1]
    left_first, right_first = s <= 2 * i, s <= o
    if left_first:
        g = (g.flatten(1, 2) @ U_P).view(k, n, s, o)
    if right_first:
        a = (a.flatten(1, 2) @ U_Q).view(k, n, s, i)
    grads = g.mT @ a
    if not right_first:
        grads = (grads.flatten(1, 2) @ U_Q).view(k, n, o, i)
    if not left_first:
        grads = (grads.mT.reshape(k, n * i, o) @ U_P).view(k, n, i, o)
    # a norm adds squares up as it reads them: nothing of the size of all gradients is made in float32
    squares = torch.linalg.vector_norm(grads, dim=1, dtype=torch.float32).square()
    return squares if left_first else squares.mT
