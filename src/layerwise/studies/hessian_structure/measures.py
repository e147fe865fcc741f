"""What is measured of the layer Hessians of a network, by `lw.structure`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from layerwise import structure
from layerwise.structure.decoupling import spectral_norm
from layerwise.studies.hessian_structure.networks import CLASSES, Task, trained
from layerwise.theory import is_led_by_one_input

OUTLIERS = CLASSES - 1
DENSE = 500
"""Entries of a layer up to which its Hessian is formed; else what is needed comes by products with it."""
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-5}
"""Residuals of eigenvectors, relative to the largest eigenvalue."""
AT_ONCE = 5000
"""Images whose layers are recorded at a time."""
COUNTED = 0.05
"""Of the largest eigenvalue: those above it are counted."""


class Layer(NamedTuple):
    """Of one layer of one network."""

    values: dict[str, float | int]
    """By the names of `NAMES`."""
    spectra: dict[str, list[float]]
    """Over the leading eigenvectors: eigenvalues "hessian", "decoupled", "outputs", "inputs" (each over its largest),
    "overlap" of the spaces of H and its approximation, "rank_one", and "along_mean", the part of each matricized
    eigenvector along the leading input."""
    vectors: Tensor
    """The leading eigenvectors of H, as columns."""
    direction: Tensor
    """The leading eigenvector of E[xxᵀ]."""


NAMES = {
    "alignment": "squared cosine of the mean input and the leading eigenvector of E[xxᵀ]",
    "ratio": "γ₁/γ₂ of E[xxᵀ]",
    "bound": "its lower bound ‖Ex‖²/‖Cov x‖",
    "spectral": "relative error of the Kronecker product, spectral norm",
    "frobenius": "relative error of the Kronecker product, Frobenius norm (small layers)",
    "overlap@1": "overlap of the first eigenvectors of H and of the Kronecker product",
    "overlap@c-1": "overlap of the c − 1 first",
    "outputs/fraction": "part of tr E[M] in its c − 1 largest eigenvalues",
    "outputs/gap": "λ_{c−1}/λ_c of E[M]",
    "outputs/count": "eigenvalues of E[M] above 5 % of the largest",
    "fraction": "part of tr H in its c − 1 largest eigenvalues",
    "gap": "λ_{c−1}/λ_c of H",
    "rank_one@4": "least ‖Mat h‖₂/‖Mat h‖_F of the 4 first eigenvectors",
    "rank_one": "its mean over the c − 1 first",
    "along_mean": "mean ‖Mat(h) v₁‖² of the c − 1 first eigenvectors",
    "condition": "τ_m γ₁ / τ₁ γ₂",
}


def measure(
    model: nn.Module,
    batch: Any,
    layer: str,
    *,
    classes: int = CLASSES,
    leading: int = 60,
    gauss_newton: bool | None = None,
    dtype: torch.dtype | None = None,
) -> Layer:
    """All measures of one layer.

    Args:
        model: in eval mode.
        batch: examples and labels, or an iterable of such.
        layer: by its name.
        classes: c; H has c − 1 outliers.
        leading: eigenvectors that are computed, if there are so many; c at least.
        gauss_newton: as for `lw.structure.layer_hessian`.
        dtype: of products with H.
    """
    kronecker = structure.decoupled(model, batch, layer)
    hessian = structure.layer_hessian(model, batch, layer, gauss_newton=gauss_newton, dtype=dtype)
    m, n = hessian.matrix_shape
    k, few = min(max(leading, classes), m * n), min(classes - 1, m * n - 1)
    small = m * n <= DENSE
    found = hessian.eigenpairs(k, method="dense" if small else "lanczos", tol=TOLERANCE[hessian.dtype])
    approximated = kronecker.eigenpairs(k)
    h = found.vectors.double()
    inputs = structure.mean_alignment(model, batch, layer)
    assert isinstance(inputs, structure.MeanAlignment), "a layer of one group"
    tau, gamma = kronecker.output_eigh[0][0], kronecker.input_eigh[0][0]
    overlaps = structure.overlap_curve(h, approximated.vectors.to(h))
    rank_one = structure.rank_one_ness(h, (m, n))
    along = structure.correspondence(h, kronecker.V.to(h))[0]
    values: dict[str, float | int] = {
        "alignment": inputs.alignment,
        "ratio": inputs.ratio,
        "bound": inputs.bound,
        "spectral": _spectral_error(hessian, kronecker),
        "overlap@1": float(overlaps[0]),
        "overlap@c-1": float(overlaps[few - 1]),
        "rank_one@4": float(rank_one[: min(4, k)].min()),
        "rank_one": float(rank_one[:few].mean()),
        "along_mean": float(along[:few].mean()),
        "condition": float(tau[-1] * gamma[0] / (tau[0] * gamma[1])) if len(gamma) > 1 else math.inf,
    }
    if small:
        values["frobenius"] = structure.relative_error(hessian, kronecker).frobenius
    if few + 1 <= k:
        of_hessian = structure.outliers(found.values, few + 1, trace=float(hessian.trace()), threshold=COUNTED)
        values |= {"fraction": of_hessian.trace_fraction, "gap": of_hessian.ratio}
    if classes <= m:
        of_outputs = structure.outliers(tau, classes, threshold=COUNTED)
        values |= {"outputs/fraction": of_outputs.trace_fraction, "outputs/count": of_outputs.count}
        if math.isfinite(of_outputs.ratio):
            values["outputs/gap"] = of_outputs.ratio
    spectra = {
        "hessian": (found.values / found.values[0]).tolist(),
        "decoupled": (approximated.values / found.values[0]).tolist(),
        "outputs": (tau / tau[0]).tolist(),
        "inputs": (gamma / gamma[0]).tolist(),
        "overlap": overlaps.tolist(),
        "rank_one": rank_one.tolist(),
        "along_mean": along.tolist(),
    }
    return Layer(values, spectra, h, kronecker.V[:, 0])


def _spectral_error(hessian: structure.LayerOperator, kronecker: structure.Decoupled) -> float:
    """‖Ĥ − H‖ / ‖H‖ in spectral norms, by Lanczos."""
    like = torch.zeros((), dtype=hessian.dtype, device=hessian.device)

    def difference(X: Tensor) -> Tensor:
        return kronecker @ X - hessian @ X

    norms = [
        spectral_norm(product, hessian.numel(), like, tol=1e-6, max_steps=200, seed=0)[0]
        for product in (difference, hessian.__matmul__)
    ]
    return norms[0] / norms[1]


def is_led_by_one(layer: Layer, k: int) -> bool:
    """Whether theorem C.7.1 speaks of the k first eigenvectors: all with the leading input."""
    tau, gamma = (torch.tensor(layer.spectra[name], dtype=torch.float64).numpy() for name in ("outputs", "inputs"))
    return is_led_by_one_input(tau, gamma, k)


@lru_cache(maxsize=64)  # experiments about one network share it, when they run in one process
def measured(task: Task, seed: int, layer: str, at_start: bool = False, leading: int = 60) -> Layer:
    """A layer of the network of a seed, after its training or before."""
    model = task.model(seed).eval() if at_start else trained(task, [seed])[0]
    return measure(model, batches(task, seed), layer, leading=leading, dtype=torch.float64)


def batches(task: Task, seed: int) -> list[tuple[Tensor, Tensor]]:
    """All images of a training, some thousand at a time, so that convolutions need not hold all their windows."""
    split = task.split(seed)
    return list(zip(split.x.split(AT_ONCE), split.y.split(AT_ONCE), strict=True))


def columns(spectra: Mapping[str, list[float]], names: Sequence[str]) -> dict[str, list[float]]:
    """Some spectra as series of one length, with their index from 1."""
    length = min(len(spectra[name]) for name in names)
    return {"index": [float(k) for k in range(1, length + 1)]} | {name: spectra[name][:length] for name in names}
