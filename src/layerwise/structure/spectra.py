"""What spectra say: outliers of a Hessian, and inputs whose moment is nearly of rank one (Wu 2023, section 4.3)."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.likelihoods import Likelihood
from layerwise.foundations.linalg import guarded_eigh
from layerwise.layers.capture.model_call import in_own_arithmetic
from layerwise.layers.capture.recorder import RecordedBatch
from layerwise.layers.capture.source import Source
from layerwise.layers.io.layer_io import LayerIO
from layerwise.layers.io.standard import Standard
from layerwise.structure.factors import Decoupled, gather
from layerwise.structure.one_layer import Observe, OneLayer, one_layer


@dataclass(frozen=True)
class Outliers:
    """How far the first c − 1 eigenvalues stand out."""

    ratio: float
    """``λ_{c−1} / λ_c``; infinite where λ_c is zero up to rounding."""
    trace_fraction: float
    """The part of the trace in the first c − 1."""
    count: int
    """Eigenvalues above `threshold` times the largest."""
    threshold: float


def outliers(
    values: Float[Tensor, "k"],
    classes: int,
    trace: float | int | Tensor | None = None,
    threshold: float = 0.02,
) -> Outliers:
    """Ratio, trace fraction and number of the outliers among eigenvalues.

    >>> import torch
    >>> outliers(torch.tensor([4.0, 3.0, 0.5, 0.5]), classes=3)
    Outliers(ratio=6.0, trace_fraction=0.875, count=4, threshold=0.02)

    Args:
        values: eigenvalues in any order: all of them, or the leading ones with `trace`. No more are counted than given.
        classes: c, of which c − 1 outliers are expected.
        trace: of the whole matrix; None: the sum of `values`.
        threshold: what counts, as a part of the largest.
    """
    values = torch.as_tensor(values).double().sort(descending=True).values
    if values.ndim != 1 or not torch.isfinite(values).all():
        raise InputError(describe(f"eigenvalues of shape {tuple(values.shape)}", "finite numbers [k]", "check them"))
    if not 2 <= classes <= len(values):
        raise InputError(
            describe(
                f"classes={classes} with {len(values)} eigenvalues",
                f"2 ≤ classes ≤ {len(values)}: λ_c must be among them",
                "compute as many eigenvalues as there are classes",
            )
        )
    total = float(values.sum()) if trace is None else float(trace)
    last, first = float(values[classes - 2]), float(values[0])
    after = float(values[classes - 1])
    # E[M] of the last layer has an exact zero there, which rounding makes a small number of either sign.
    ratio = float("inf") if after <= 1e-12 * first else last / after
    return Outliers(
        ratio,
        float(values[: classes - 1].sum()) / total if total else 0.0,
        int((values > threshold * first).sum()),
        float(threshold),
    )


@dataclass(frozen=True)
class MeanAlignment:
    """How nearly the inputs' second moment is that of their mean alone."""

    alignment: float
    """``(v_1 · E x / ‖E x‖)²``, v_1 the leading eigenvector of ``S = E[x xᵀ]``."""
    ratio: float
    """``γ_1 / γ_2`` of S; infinite where γ_2 is zero."""
    bound: float
    """``‖E x‖² / ‖Cov x‖ ≤ γ_1 / γ_2``."""
    mean_norm: float
    """``‖E x‖``."""


@in_own_arithmetic
def mean_alignment(
    model: nn.Module, data: Any, layer: str, likelihood: str | Likelihood = "categorical", **options: Any
) -> MeanAlignment | list[MeanAlignment]:
    """Alignment of the inputs' leading direction with their mean, and the ratio of their first two eigenvalues.

    The ratio is bounded by ``γ_1/γ_2 ≥ ‖E x‖² / ‖Cov x‖``: S ≥ E x E xᵀ gives ``γ_1 ≥ ‖E x‖²``, and by Weyl's
    inequality ``γ_2 ≤ ‖Cov x‖``. (The thesis' (C.257) has one less.) With P positions an example, the mean direction is
    the first left singular vector of ``E[X]`` [n, P], as the thesis has it for convolutions; ratio and bound are those
    of single positions. A grouped layer has one answer a group.

    >>> import torch, layerwise as lw
    >>> net = torch.nn.Linear(4, 3)
    >>> found = lw.structure.mean_alignment(net, (1 + 0.1 * torch.randn(200, 4), torch.randint(3, (200,))), "Linear")
    >>> found.alignment > 0.99, found.ratio >= found.bound
    (True, True)

    Args:
        model: as for `layer_hessian`.
        data: gone over once; twice where positions share the weight.
        layer: as for `layer_hessian`.
        likelihood: as for `layer_hessian`.
        options: as for `decoupled`.
    """
    sharing = options.pop("sharing", "expand")
    chosen = one_layer(model, data, layer, likelihood, **options)
    factors = gather(chosen, sharing)
    directions = factors.input_means
    if factors.positions > 1 and sharing == "expand" and not chosen.spec.form.one_hot:
        by_position = position_means(chosen)
        # positions that do not count (padding, ignored labels) are in these means, and not in the moments
        if by_position is not None and torch.allclose(by_position.mean(-1), factors.input_means.to(by_position)):
            directions = torch.linalg.svd(by_position, full_matrices=False).U[..., 0]
    found = [_aligned(factors, group, direction) for group, direction in enumerate(directions)]
    return found[0] if len(found) == 1 else found


def _aligned(factors: Decoupled, group: int, direction: Tensor) -> MeanAlignment:
    S = factors.input_factors[group] / factors.positions  # of one position: its mean and covariance are the bound's
    mean = factors.input_means[group]
    gamma, V = guarded_eigh(S, name="input moment")
    size = float(torch.linalg.vector_norm(direction))
    alignment = float(V[:, -1] @ direction / size) ** 2 if size else 0.0
    second = float(gamma[-2]) if len(gamma) > 1 else 0.0
    spread = float(guarded_eigh(S - torch.outer(mean, mean), name="input covariance")[0][-1])
    square = float(mean @ mean)
    return MeanAlignment(
        alignment,
        float(gamma[-1]) / second if second > 0 else float("inf"),
        square / spread if spread > 0 else (float("inf") if square else 0.0),
        square**0.5,
    )


def position_means(layer: OneLayer) -> Float[Tensor, "K I P"] | None:
    """``E[X]``: the mean input of every position; None where examples have different numbers of positions."""
    sums: list[Tensor] = []
    source = layer.sweep.source
    source.require_passes(2, "the mean input of every position")
    layer = replace(layer, sweep=replace(layer.sweep, source=Source(source.data, source.progress, source.model)))

    def begin() -> Observe:
        sums.clear()

        def observe(io: LayerIO, first: bool, recorded: RecordedBatch) -> None:
            for chunk in layer.chunks(io, gradients=False):
                if first and isinstance(chunk, Standard) and isinstance(chunk.a, Tensor):
                    sums.append(chunk.a.sum(0, dtype=torch.float64))

        return observe

    totals = layer.each(begin, "means of inputs")
    if len({t.shape for t in sums}) != 1:
        return None
    return (torch.stack(sums).sum(0) / totals.examples).permute(1, 2, 0)
