"""`batched_grad`: many vectors pulled back through one graph, each operation called once where it can be.

`torch.func.vmap` has rules for nearly all operations, and a few of these rules are wrong without a word (that of
`torch.cdist` is, in torch 2.13). So the first time that a graph is met, what comes out is compared with one
plain backward: pulling back is linear, so that a random mixture of the results is the result of the mixture. A way that
fails is left for the next.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.device import Readback, sent
from layerwise.foundations.random import stream
from layerwise.layers.capture.graph import Graph

MOST_KINDS = 4096
"""Of graphs whose verdict is remembered."""
TOLERANCE = {torch.float64: (1e-6, 1e-9), torch.complex128: (1e-6, 1e-9), torch.float32: (2e-2, 1e-4)}
"""Of a gradient's own size, and of the largest: TF32 and other orders of sums differ, a wrong rule by as much as there
is. Other precisions: as below."""
COARSE = (1e-1, 1e-2)

_verdicts: dict[object, bool] = {}


def batched_grad(
    f: Tensor, inputs: Sequence[Any], v: Float[Tensor, "V *out"], retain_graph: bool = False
) -> list[Tensor | None]:
    """``[V, *input]`` for each input: vectorised where every operation allows it, else one backward a vector.

    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> batched_grad(x.square(), [x], torch.eye(2))
    [tensor([[2., 0.],
            [0., 4.]])]
    """
    if not inputs:
        return []
    if v.shape[0] == 1:
        grads = torch.autograd.grad(f, inputs, v[0], retain_graph=retain_graph, allow_unused=True)
        return [None if g is None else dense(g).unsqueeze(0) for g in grads]
    kind = Graph.of(f).key({}), v.shape, v.dtype, v.device, len(inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns where it loops over a batching rule it lacks
        for vectorised in (_mapped_grad, _batched_grad):
            if _verdicts.get((vectorised, kind)) is False:
                continue
            try:
                found = vectorised(f, inputs, v)
            except RuntimeError:  # an operation that it cannot vectorise
                continue
            if _is_right(vectorised, kind, f, inputs, v, found):
                return found
    rows = [torch.autograd.grad(f, inputs, row, retain_graph=True, allow_unused=True) for row in v]
    return [
        None if column[0] is None else torch.stack([dense(g) for g in column]) for column in zip(*rows, strict=True)
    ]


def _mapped_grad(f: Tensor, inputs: Sequence[Any], v: Float[Tensor, "V *out"]) -> list[Tensor | None]:
    """By `torch.func.vmap`, which has rules for convolutions and norms: one call each, whatever V is."""
    reached: list[bool] = []

    def pull(row: Tensor) -> tuple[Tensor, ...]:
        grads = torch.autograd.grad(f, inputs, row, retain_graph=True, allow_unused=True)
        reached[:] = [g is not None for g in grads]
        return tuple(g for g in grads if g is not None)

    found = iter(torch.func.vmap(pull)(v))
    return [next(found) if there else None for there in reached]


def _batched_grad(f: Tensor, inputs: Sequence[Any], v: Float[Tensor, "V *out"]) -> list[Tensor | None]:
    """By autograd's own, older way, which also runs what a checkpoint runs again; it loops over convolutions."""
    return list(torch.autograd.grad(f, inputs, v, retain_graph=True, is_grads_batched=True, allow_unused=True))


def dense(g: Tensor) -> Tensor:
    """A gradient without gaps: an embedding may give a sparse one."""
    return g.to_dense() if g.is_sparse else g


# --- whether it is right -------------------------------------------------------------------------------------------


def _is_right(
    way: object, kind: object, f: Tensor, inputs: Sequence[Any], v: Tensor, found: Sequence[Tensor | None]
) -> bool:
    """By what is known of this graph, else by a mixture: one synchronization for each new graph."""
    if (way, kind) in _verdicts:
        return _verdicts[way, kind]
    right, certain = _adds_up(f, inputs, v, found)
    if certain:
        if len(_verdicts) >= MOST_KINDS:
            _verdicts.clear()
        _verdicts[way, kind] = right
    return right


def mixture_of(v: Float[Tensor, "V *out"], axes: int = 1, number: int = 0) -> Float[Tensor, "..."]:
    """Random numbers, one for each entry of the first axes, the same at every call.

    >>> mixture_of(torch.ones(3, 2)).shape
    torch.Size([3])
    """
    generator = stream(0, "mixture", number)
    return sent(torch.randn(v.shape[:axes], generator=generator, dtype=torch.float64), v.device).to(v.dtype)


def tolerance(dtype: torch.dtype, device: torch.device | None = None) -> float:
    """Of gradients that are computed in two ways; on a GPU convolutions may be rounded to TF32."""
    exact = device is not None and device.type == "cpu"
    return {torch.float64: 1e-6, torch.float32: 1e-3 if exact else 1e-2}.get(dtype, 0.2)


def share_of_largest(dtype: torch.dtype) -> float:
    """Of the largest of several gradients, by which another may be off in a backward that rounds otherwise."""
    return TOLERANCE.get(dtype, COARSE)[1]


def _adds_up(f: Tensor, inputs: Sequence[Any], v: Tensor, found: Sequence[Tensor | None]) -> tuple[bool, bool]:
    """Whether the results are right, and whether they are so for other values too: zero and NaN tell nothing."""
    mixture = mixture_of(v)
    mixed = torch.tensordot(mixture, v, 1)
    plain = torch.autograd.grad(f, inputs, mixed, retain_graph=True, allow_unused=True)
    if any((g is None) != (G is None) for g, G in zip(plain, found, strict=True)):
        return False, True
    pairs = [(dense(g), G) for g, G in zip(plain, found, strict=True) if g is not None and G is not None]
    if not pairs:
        return True, True
    sizes = torch.stack([g.norm() for g, _ in pairs]).abs()
    off = torch.stack([(torch.tensordot(mixture.to(G.dtype), dense(G), 1) - g).norm() for g, G in pairs]).abs()
    own, largest = TOLERANCE.get(f.dtype, COARSE)[0], share_of_largest(f.dtype)
    close = (off <= own * sizes + largest * sizes.max()).all()
    finite, lively = (sizes.isfinite() & off.isfinite()).all(), (sizes > 0).all()
    right, finite, lively = Readback(torch.stack([close, finite, lively])).read()
    return (bool(right), bool(lively)) if finite else (True, False)
