"""Precision: factors in float32 or better whatever the model computes in; decompositions fail with the layer's name."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layerwise as lw
from layerwise.foundations.errors import NumericalError

KEPT = ("kfac", "ekfac", "diag", "block", "quasidiag", "dense", "lowrank")
HALF = (torch.bfloat16, torch.float16)


class Net(nn.Module):
    """A convolution, a norm, a linear layer and bare parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv1d(1, 2, 2), nn.LayerNorm(3), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.full((3,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).tanh().flatten(1)) * self.scale


def _net(dtype: torch.dtype) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def _batch(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(6, 1, 4).to(dtype), torch.randint(3, (6,))


def _tensors(matrix: Any) -> list[Tensor]:
    if hasattr(matrix, "operators"):
        return [t for op in matrix.operators.values() for t in op.tensors().values()]
    return [matrix.matrix if matrix.structure == "dense" else matrix.R]


@pytest.mark.parametrize(("dtype", "estimator"), [(HALF[0], "exact"), (HALF[0], "empirical"), (HALF[1], "sampled")])
@pytest.mark.parametrize("structure", KEPT)
def test_factors_of_a_half_precision_model_are_float32_and_finite(dtype: torch.dtype, structure: str, estimator: str):
    model = _net(dtype)
    matrix = lw.fisher(model, _batch(dtype), structure=structure, estimator=estimator)
    assert matrix.dtype == torch.float32
    assert all(t.dtype == torch.float32 and bool(t.isfinite().all()) for t in _tensors(matrix))
    v = lw.ParamVector.randn(model, 0)
    assert all(t.dtype == dtype and bool(t.isfinite().all()) for t in matrix.solve(v, damping=1e-2).values())


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_gives_nearly_the_same_numbers(dtype: torch.dtype):
    expected = lw.fisher(_net(torch.float32), _batch(torch.float32), structure="diag", estimator="exact")
    expected_v = lw.fisher(_net(torch.float32), _batch(torch.float32), structure="implicit", estimator="exact")
    model = _net(dtype)
    for structure in ("diag", "ekfac"):
        found = lw.fisher(model, _batch(dtype), structure=structure, estimator="exact")
        assert float(found.trace()) == pytest.approx(float(expected.trace()), rel=0.05)
    v = torch.ones(expected.numel())
    product = lw.fisher(model, _batch(dtype), structure="implicit", estimator="exact") @ v
    assert product.dtype == torch.float32
    torch.testing.assert_close(product, expected_v @ v, rtol=0.1, atol=0.02)


@pytest.mark.parametrize("structure", [*KEPT, "implicit"])
def test_a_float64_model_stays_float64(structure: str):
    matrix = lw.fisher(_net(torch.float64), _batch(torch.float64), structure=structure)
    assert matrix.dtype == torch.float64
    if structure != "implicit":
        assert all(t.dtype == torch.float64 for t in _tensors(matrix))


@pytest.mark.parametrize("structure", ["dense", "diag", "block", "implicit"])
@pytest.mark.parametrize(("dtype", "kept"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_the_hessian_too(structure: str, dtype: torch.dtype, kept: torch.dtype):
    def loss(f: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(f.float() if dtype == torch.bfloat16 else f, y)

    H = lw.hessian(_net(dtype), _batch(dtype), loss=loss, structure=structure)
    assert H.dtype == kept
    assert bool(H.diagonal().flat().isfinite().all())


@pytest.mark.parametrize("structure", KEPT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_saved_and_loaded_bit_for_bit(structure: str, dtype: torch.dtype, tmp_path: Path):
    matrix = lw.fisher(_net(dtype), _batch(dtype), structure=structure)
    matrix.save(tmp_path / "F")
    loaded = lw.load(tmp_path / "F")
    assert loaded.dtype == matrix.dtype
    assert loaded.structure == matrix.structure
    for before, after in zip(_tensors(matrix), _tensors(loaded), strict=True):
        assert before.dtype == after.dtype
        assert torch.equal(before, after)
    torch.testing.assert_close(loaded.to_dense(), matrix.to_dense())
    merged = loaded.merge(matrix)
    torch.testing.assert_close(merged.to_dense(), matrix.to_dense())


@pytest.mark.parametrize("structure", KEPT)
def test_to_another_dtype(structure: str):
    matrix = lw.fisher(_net(torch.float32), _batch(torch.float32), structure=structure)
    wide = matrix.to(dtype=torch.float64)
    assert wide.dtype == torch.float64
    assert matrix.dtype == torch.float32
    assert all(t.dtype == torch.float64 for t in _tensors(wide))
    torch.testing.assert_close(wide.to_dense().float(), matrix.to_dense())
    v = torch.ones(matrix.numel())
    assert (wide @ v).dtype == torch.float32  # the answer comes as the question did
    assert (matrix @ v.double()).dtype == torch.float64
    assert (wide.to(dtype=torch.float32)).dtype == torch.float32


@pytest.mark.parametrize("structure", [*KEPT, "implicit"])
def test_autocast_is_for_the_model_and_not_for_the_statistics(structure: str):
    model, batch = _net(torch.float32), _batch(torch.float32)
    seen = set()
    model.head.register_forward_hook(lambda module, args, out: seen.add(out.dtype))
    plain = float(lw.fisher(model, batch, structure=structure, estimator="exact").trace())
    assert seen == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        cast = lw.fisher(model, batch, structure=structure, estimator="exact")
        trace = cast.trace()
        assert torch.is_autocast_enabled("cpu")
    assert seen == {torch.float32, torch.bfloat16}
    assert cast.dtype == torch.float32
    assert float(trace) == pytest.approx(plain, rel=0.05)


def test_statistics_under_autocast_are_not_rounded_to_half_precision():
    """The input factor is that of inputs as the layer saw them, multiplied and summed in single precision."""
    model, (x, y) = _net(torch.float32), _batch(torch.float32)
    batch = x.bfloat16().float(), y
    model.requires_grad_(False)
    model.conv.requires_grad_(True)
    plain = lw.fisher(model, batch).operators["conv"].A.values
    with torch.autocast("cpu", torch.bfloat16):
        cast = lw.fisher(model, batch).operators["conv"].A.values
    torch.testing.assert_close(cast, plain, rtol=1e-6, atol=1e-7)


# --- decompositions that fail --------------------------------------------------------------------------------


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise torch.linalg.LinAlgError("linalg.eigh: the algorithm failed to converge")

    monkeypatch.setattr(torch.linalg, "eigh", fail)


@pytest.mark.parametrize("ask", ["power", "logdet", "sample", "eigenvalues", "eigh"])
@pytest.mark.parametrize("structure", ["kfac", "block"])
def test_a_decomposition_that_fails_names_the_layer(structure: str, ask: str, failing: None):
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
    matrix = lw.fisher(model, (torch.randn(6, 4), torch.randint(3, (6,))), structure=structure)
    asked = {
        "power": lambda: matrix.power(lw.ParamVector.randn(model, 0), -0.5, damping=0.1),
        "logdet": lambda: matrix.logdet(damping=0.1),
        "sample": lambda: matrix.sample(1, damping=0.1),
        "eigenvalues": lambda: matrix.eigenvalues(),
        "eigh": lambda: matrix.eigh(k=1),
    }
    with pytest.raises(NumericalError, match=r"Layer '0'.* Got .*failed to converge.*\. Expected .*\. "):
        asked[ask]()


def test_a_decomposition_that_fails_between_the_passes_names_the_layer(failing: None):
    model = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(NumericalError, match=r"[Ll]ayer '0'.*failed to converge.*\. Expected .*\. "):
        lw.fisher(model, (torch.randn(6, 4), torch.randint(3, (6,))), structure="ekfac")


def test_a_decomposition_that_fails_in_float32_is_made_in_float64(monkeypatch: pytest.MonkeyPatch):
    model = nn.Sequential(nn.Linear(4, 3))
    batch = torch.randn(6, 4), torch.randint(3, (6,))
    expected = lw.fisher(model, batch).eigenvalues()
    eigh = torch.linalg.eigh

    def picky(M: Tensor) -> Any:
        if M.dtype == torch.float32:
            raise torch.linalg.LinAlgError("not in float32")
        return eigh(M)

    monkeypatch.setattr(torch.linalg, "eigh", picky)
    found = lw.fisher(model, batch).eigenvalues()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)
