"""Frobenius norms of float32 matrices whose squared entries float32 cannot hold."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import layerwise as lw
from layerwise.curvature.matrix import ParamMatrix
from layerwise.kernel.kernel import MatrixKernel

SCALES = (1e26, 1e-26)
STRUCTURES = ("dense", "block", "diag", "quasidiag", "quasidiag-psd", "kfac", "ekfac", "lowrank", "sum")


def _matrix(structure: str, dtype: torch.dtype = torch.float32) -> ParamMatrix:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    batch = torch.randn(10, 3).to(dtype), torch.randint(2, (10,))
    if structure == "sum":
        return _matrix("kfac", dtype) + _matrix("dense", dtype)
    options: dict[str, Any] = {"completion": "psd"} if structure.endswith("-psd") else {}
    return lw.fisher(model, batch, structure=structure.split("-")[0], estimator="exact", **options)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_entries_far_from_one(structure: str, scale: float):
    found = (scale * _matrix(structure)).frobenius()
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(scale * float(_matrix(structure, torch.float64).frobenius()), rel=1e-5)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("samples", [8, 64])
def test_an_estimate_of_it(scale: float, samples: int, monkeypatch: pytest.MonkeyPatch):
    """With fewer probes than parameters, and with the identity."""
    monkeypatch.setattr("layerwise.curvature.matrix.SMALL", 1)
    expected = _matrix("sum").frobenius(samples)
    found = (scale * _matrix("sum")).frobenius(samples)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(scale * float(expected), rel=1e-5)
    assert found.standard_error == pytest.approx(scale * expected.standard_error, rel=1e-4)  # type: ignore[attr-defined]


KERNELS: dict[str, Callable[[MatrixKernel], Any]] = {
    "itself": lambda K: K,
    "centered": lambda K: K.centered(),
    "normalized": lambda K: K.normalized(),
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", KERNELS)
def test_kernels(kind: str, scale: float):
    rows = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    K = rows @ rows.mT
    unscaled = 1.0 if kind == "normalized" else scale
    found = KERNELS[kind](MatrixKernel(scale * K)).frobenius()
    assert float(found) == pytest.approx(
        unscaled * float(KERNELS[kind](MatrixKernel(K.double())).frobenius()), rel=1e-5
    )


@pytest.mark.parametrize("scale", SCALES)
def test_vectors(scale: float):
    v = lw.ParamVector({"w": torch.full((2, 2), 3 * scale), "b": torch.full((4,), 4 * scale)})
    assert v.norm().dtype == torch.float32
    assert float(v.norm()) == pytest.approx(10 * scale, rel=1e-6)


def test_large_matrices_are_summed_in_parts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("layerwise.foundations.linalg.norms.PART", 7)
    M = _matrix("dense")
    assert float(M.frobenius()) == pytest.approx(float(M.to_dense().norm()), rel=1e-6)
