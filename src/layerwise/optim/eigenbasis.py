"""Second moments of per-example gradients in an eigenbasis ``U_P ⊗ U_Q``: what EKFAC divides by."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.layers.io.one_hot import OneHot
from layerwise.layers.io.standard import Standard
from layerwise.optim.channels import times_inputs
from layerwise.optim.rule import Recorded

Matrices = tuple[Tensor | None, Tensor | None, Tensor | None]
"""U_P, U_Q and, under SUA, the bias's block of some groups."""


def squares_of_layer(
    basis: Matrices,
    calls: Iterable[Recorded],
    dtype: torch.dtype,
    chunks: Callable[[Any], Iterable[Any]] = lambda io: io.chunks(),
) -> Float[Tensor, "k O I"] | None:
    """``Σ_n (U_Pᵀ (Σ_s g aᵀ) U_Q)²`` of one layer's examples, over all its backwards; None where there was none."""
    total = None
    for io, factor, _ in calls:
        for chunk in chunks(io):
            squares = factor**2 * _squares(basis, chunk).to(dtype)
            total = squares if total is None else total.add_(squares)
    return None if total is None else total.contiguous()


def _squares(basis: Matrices, chunk: Standard) -> Float[Tensor, "k O I"]:
    """Of some examples; a basis on channels turns the gradients, or the inputs where they are fewer."""
    U_P, U_Q, bias = basis
    assert U_P is not None
    if U_Q is None or isinstance(chunk.a, OneHot) or chunk.a.shape[-1] == U_Q.shape[-2]:
        return chunk.rotated_squared_sum(U_Q, U_P)
    if chunk.a.shape[1] < chunk.g.shape[-1]:
        a = times_inputs(chunk.a.transpose(1, 2), U_Q, bias).transpose(1, 2)
        return Standard(a, chunk.g).rotated_squared_sum(None, U_P)
    return times_inputs(U_P.mT @ chunk.per_example_grads(), U_Q, bias).square().sum((0, 1))
