"""What operators take and return: a `ParamVector`, a dict, a flat vector, or a matrix of columns.

Inside, several vectors at once are one dictionary ``{parameter: [B, *shape]}``.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.vectors import ParamVector

Params = dict[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]


def check_dtype(dtype: torch.dtype | None) -> None:
    """A matrix holds real numbers."""
    if dtype is not None and not dtype.is_floating_point:
        raise InputError(describe(f"dtype={dtype}", "a floating-point dtype", "pass e.g. torch.float64"))


def numel(shapes: Shapes) -> int:
    """Number of entries of a vector."""
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def as_rows(t: Tensor) -> Tensor:
    """``[B, entries]``; a parameter may be a single number, so that t is ``[B]``."""
    return t.reshape(t.shape[0], -1)


def to_flat(params: Mapping[str, Tensor], shapes: Shapes) -> Tensor:
    """``[B, d]``."""
    return torch.cat([as_rows(params[name]) for name in shapes], dim=1)


def from_flat(flat: Tensor, shapes: Shapes) -> Params:
    """``[B, d]`` cut into parameters."""
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    pieces = flat.split(sizes, dim=1)
    return {
        name: piece.reshape(flat.shape[0], *shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
    }


def read(v: Any, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> tuple[Params, Callable[[Params], Any]]:
    """A vector in any accepted form, as columns, and the way to write a result in the same form."""
    if isinstance(v, ParamVector):
        params, before = _named(v.dict(), shapes, dtype, device)
        return params, lambda out: ParamVector({k: out[k][0].to(before) for k in v})
    if isinstance(v, Mapping):
        params, before = _named(v, shapes, dtype, device)
        return params, lambda out: {k: out[k][0].to(before) for k in v}
    if isinstance(v, Tensor) and v.ndim in (1, 2) and v.shape[0] == numel(shapes):
        columns = v.detach().to(device=device, dtype=dtype)
        params = from_flat(columns.unsqueeze(0) if v.ndim == 1 else columns.mT, shapes)

        def write(out: Params) -> Tensor:
            flat = to_flat(out, shapes).to(v.dtype)
            return flat[0] if v.ndim == 1 else flat.mT

        return params, write
    given = f"a tensor of shape {tuple(v.shape)}" if isinstance(v, Tensor) else f"a {type(v).__name__}"
    raise InputError(
        describe(
            given,
            f"a ParamVector, a dict of tensors, or a tensor of shape ({numel(shapes)},) or ({numel(shapes)}, columns)",
            "see lw.ParamVector; only parameters that take part are counted",
        )
    )


def _named(
    v: Mapping[str, Tensor], shapes: Shapes, dtype: torch.dtype, device: torch.device
) -> tuple[Params, torch.dtype]:
    odd = sorted(set(v) ^ set(shapes))
    if odd:
        raise InputError(
            describe(
                f"a vector that differs from the matrix in the parameters {', '.join(odd[:4])}",
                f"exactly these {len(shapes)}: {', '.join(list(shapes)[:4])}{', …' if len(shapes) > 4 else ''}",
                "use v.restrict(F.parameters())",
            )
        )
    for name, shape in shapes.items():
        if tuple(v[name].shape) != tuple(shape):
            raise InputError(
                describe(f"{name!r} of shape {tuple(v[name].shape)}", f"shape {tuple(shape)}", "reshape it")
            )
    before = next(iter(v.values())).dtype
    return {k: v[k].detach().to(device=device, dtype=dtype).unsqueeze(0) for k in shapes}, before
