"""`layer_hessian`: the Hessian of the loss in the weight of one layer, as an operator.

For piecewise-linear networks it is the Gauss–Newton matrix, ``H = E[M_x ⊗ x xᵀ]`` with ``M_x = Gᵀ A G``: outputs are
linear in the weight of a single layer (Wu 2023, (4.1), (C.6), (C.13)). With smooth activations the two differ.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.curvature.hessian import HessianProducts
from layerwise.foundations.cotangents import OutputBasis
from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.likelihoods import Likelihood
from layerwise.foundations.random import stream
from layerwise.foundations.types import HALF
from layerwise.layers.capture.model_call import autocast_of_the_caller, in_own_arithmetic
from layerwise.layers.capture.source import Source
from layerwise.layers.capture.vectorised import tolerance
from layerwise.structure.autograd import AutogradHessian, autograd_hessian, loss_of
from layerwise.structure.gauss_newton import GaussNewton
from layerwise.structure.one_layer import OneLayer, one_layer
from layerwise.structure.operator import LayerOperator
from layerwise.structure.rows import LayerRows


@in_own_arithmetic
def layer_hessian(
    model: nn.Module,
    data: Any,
    layer: str,
    likelihood: str | Likelihood = "categorical",
    *,
    gauss_newton: bool | None = None,
    bias: bool = False,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> LayerOperator:
    """The Hessian of the mean loss in the weight of one layer, row-major ``vec(W)``, W being m × n.

        H = 1/N Σ_n Σ_v r_nv r_nvᵀ,    r_nv = Σ_s g_vns ⊗ a_ns,    Σ_v g gᵀ = M_x

    which for a layer with one input x an example is ``E[M_x ⊗ x xᵀ]``. Positions that share the weight (pixels, tokens,
    repeated calls) are added up before they are squared: all terms between positions are in it.

    >>> import torch, layerwise as lw
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    >>> batch = torch.randn(20, 4), torch.randint(3, (20,))
    >>> H = lw.structure.layer_hessian(net, batch, "0")
    >>> values, vectors, residuals = H.eigenpairs(2)
    >>> H.matrix_shape, vectors.shape, bool((residuals < 1e-5).all())
    ((6, 4), torch.Size([24, 2]), True)

    Args:
        model: any module. In eval mode; dropout in train mode draws the same at every pass, from `seed`, and batch norm
            in train mode is an error.
        data: a batch ``(x, y)`` or any iterable of batches, which is gone over once where its rows fit in half of
            `memory`, and at every product otherwise.
        layer: the layer's name as `lw.layers` shows it, a parameter's, or a pattern that matches one layer.
        likelihood: what the output means; options as further arguments.
        gauss_newton: True for the Gauss–Newton matrix, False for the Hessian by autograd. None is for networks on which
            both are the same (piecewise-linear activations, no weight used twice): that is looked at on some examples
            of the first batch, and where it does not hold a choice is asked for.
        bias: whether the bias takes part, as the last column of W.
        dtype: what products of the Gauss–Newton matrix are made in; default that of the model, float32 at least.
        options: `normalize`, `example_axis`, `seed`, `memory`, `progress`, `check`, `matrices` and those of the
            likelihood, as for `lw.fisher`.
    """
    if gauss_newton not in (None, True, False):
        raise InputError(describe(f"gauss_newton={gauss_newton!r}", "True, False or None", "choose one of them"))
    if dtype is not None and not dtype.is_floating_point:
        raise InputError(describe(f"dtype={dtype}", "a floating type", "pass e.g. torch.float64"))
    chosen = one_layer(model, data, layer, likelihood, bias=bias, **options)
    if gauss_newton is False:
        return autograd_hessian(chosen)
    rows = LayerRows.gather(chosen, dtype or chosen.dtype)
    if gauss_newton:
        return GaussNewton(rows)
    # without rows the layer takes no part, and both matrices are zero
    return GaussNewton(rows, require_agreement(chosen, rows) if rows.few else 0.0)


def require_agreement(layer: OneLayer, rows: LayerRows) -> float:
    """Compare Gauss–Newton and Hessian products on a few examples; the relative difference, or an error.

    To the loss a random linear function of the outputs is added. It leaves the Gauss–Newton matrix as it is, and shows
    second derivatives of the outputs also where the loss is at its minimum, whose gradient hides them. The difference
    is relative to a product with ``JᵀJ``, to which both matrices are rounded: where examples are fitted, the curvature
    of the loss is the small difference of large numbers, and so is the Gauss–Newton matrix.
    """
    sweep, few = layer.sweep, rows.few
    recorder = sweep.recorder
    batches = [(batch.x, batch.y, batch.mask) for batch in few]
    small = replace(layer, sweep=replace(sweep, source=Source(batches, model=recorder.model)))
    signs = stream(0, "agreement")

    def added(f: Tensor) -> Tensor:
        return (torch.randint(0, 2, f.shape, generator=signs).to(f) * 2 - 1).mul(f).sum()

    hessian = AutogradHessian(
        small, HessianProducts(recorder.model, recorder, small.sweep.source, loss_of(small, added))
    )
    v = torch.randn(hessian.numel(), 2, generator=stream(0, "direction"), dtype=torch.float64).to(layer.dtype)
    v = v.to(layer.device)
    own = LayerRows.gather(small, layer.dtype)
    expected = own.times(v) * (own.count / own.examples if few[0].y is not None else 0.0)
    exact = hessian @ v
    plain = LayerRows.gather(replace(small, sweep=replace(small.sweep, cotangent=OutputBasis())), layer.dtype).times(v)
    scale = float(torch.linalg.vector_norm(plain.double()))
    gap = float(torch.linalg.vector_norm((exact - expected).double()))
    found = gap / scale if scale else float("inf")
    if found <= agreement_tolerance(layer) or (scale == gap == rows.square == 0):
        return min(found, gap)
    why = (
        f"whose Hessian and Gauss–Newton matrix differ by {found:.2g}, relatively: the outputs are not linear in its "
        "weight (a smooth activation, attention, a weight used twice)"
        if scale
        else "on which the outputs of the examples that were looked at do not depend"
    )
    raise InputError(
        describe(
            f"layer {layer.spec.name!r}, {why}", "a choice of matrix", "pass gauss_newton=True or gauss_newton=False"
        )
    )


def agreement_tolerance(layer: OneLayer) -> float:
    """How far two ways to one product may be apart, by what the model computes in."""
    half = autocast_of_the_caller() or any(p.dtype in HALF for p in layer.sweep.recorder.model.parameters())
    return 0.03 if half else tolerance(layer.dtype, layer.device)
