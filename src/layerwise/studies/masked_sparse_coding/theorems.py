"""Theorems 2.3.2 and 2.3.6 of Wu (2023) on drawn problems: a wrong dictionary that wins, and an oracle to compare."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from layerwise.foundations.random import stream
from layerwise.selfsup.sparse_coding.data import sample_sparse_data
from layerwise.selfsup.sparse_coding.guarantees import incoherence, missed_support, oracle_prediction
from layerwise.selfsup.sparse_coding.losses import masked_omp_loss, reconstruction_loss, represented
from layerwise.selfsup.sparse_coding.omp import omp
from layerwise.selfsup.sparse_coding.overfitting import exhaustive_loss, pair_dictionary
from layerwise.selfsup.sparse_coding.recovery import recovery_error


def wrong_dictionary(
    seed: int, *, d: int, p: int, k: int, sigma: float, directions: int, samples: int, masks: int, hidden: int
) -> dict[str, float]:
    """Losses of the truth A and of `pair_dictionary`, B, on the same samples; masked ones on the same masks."""
    data = sample_sparse_data(d, p, k, samples, sigma, generator=stream(seed, "wrong dictionary"))
    B = pair_dictionary(data.A, directions)
    random = stream(seed, "masks")
    masked: dict[str, list[float]] = {"A": [], "B": []}
    for _ in range(masks):
        visible = torch.ones(d, dtype=torch.bool)
        visible[torch.randperm(d, generator=random)[:hidden]] = False
        for name, dictionary in (("A", data.A), ("B", B)):
            masked[name].append(float(masked_omp_loss(data.Y, dictionary, k, visible)))
    return {
        "columns": float(B.shape[1]),
        "distance/cosine": float(recovery_error(data.A, B)),
        "distance/squared": float(recovery_error(data.A, B, "sqeuclidean")),
        "A, exhaustive": float(exhaustive_loss(data.Y, data.A, k)),
        "A": float(reconstruction_loss(data.Y, data.A, k)),
        "A, 2k": float(reconstruction_loss(data.Y, data.A, 2 * k)),
        "B": float(reconstruction_loss(data.Y, B, k)),
        "masked/A": sum(masked["A"]) / masks,
        "masked/B": sum(masked["B"]) / masks,
        "floor": hidden * sigma**2,
    }


def masking_theorem(
    seed: int, *, d: int, visible: int, p: int, k: int, sigma: float, samples: int, signals: Sequence[float]
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """For each strength of the signal: how often OMP on the truth has the support, and its risk above the oracle's.

    Noise, supports and directions of z are the same for all strengths, and both predictions are of the same samples, so
    that differences have small errors ("error" is one standard error of the mean).
    """
    random = stream(seed, "masking theorem")
    seen = torch.arange(d) < visible
    A = torch.randn(d, p, generator=random, dtype=torch.float64)
    A = A / A[seen].norm(dim=0)  # what is seen of the columns has norm 1
    drawn = sample_sparse_data(d, p, k, samples, 0.0, signal=1.0, A=A, generator=random)
    noise = sigma * torch.randn(samples, d, generator=random, dtype=torch.float64)
    series: dict[str, list[float]] = {"signal": list(signals), "recovered": [], "excess": [], "error": [], "bound": []}
    mu = incoherence(A[seen])
    for signal in signals:
        clean = signal * drawn.Y
        excess, recovered = _paired(clean, clean + noise, A, drawn.codes.indices, seen, sigma, signal)
        series["recovered"].append(float(recovered.double().mean()))
        series["excess"].append(float(excess.mean()))
        series["error"].append(float(excess.std()) / samples**0.5)
        series["bound"].append(missed_support(sigma, signal, k, p, mu) if mu < 1 / (2 * k - 1) else 1.0)
    return {"incoherence": mu}, series


def _paired(
    clean: Tensor, Y: Tensor, A: Tensor, supports: Tensor, seen: Tensor, sigma: float, signal: float
) -> tuple[Tensor, Tensor]:
    """Of each sample: the squared error of OMP on the truth minus that of the oracle, and whether the support is right.

    Noise of hidden coordinates adds the same to both, and is left out.
    """
    code = omp(Y[:, seen], A[seen], supports.shape[1])
    truth = clean[:, ~seen]
    risk = (represented(code, A[~seen]) - truth).square().sum(1)
    oracle = (oracle_prediction(Y, A, supports, seen, sigma=sigma, signal=signal) - truth).square().sum(1)
    return risk - oracle, (code.indices.sort(1).values == supports.sort(1).values).all(1)
