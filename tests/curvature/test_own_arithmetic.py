"""Matrices compute in their own dtype under ``torch.autocast``; a model that they run still sees it."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import layerwise as lw
from layerwise.curvature.implicit import Implicit
from layerwise.curvature.matrix import DenseMatrix, ParamMatrix

SEEN: list[bool] = []
"""Whether autocast was on, whenever the model was run."""


class Watched(nn.Module):
    """Says whether it was called under autocast, and computes in float32 all the same: results can be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(2, 3, 2), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(torch.is_autocast_enabled("cpu"))
        with torch.autocast("cpu", enabled=False):
            return self.head(self.conv(x).tanh().flatten(1))


@cache
def _problem() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Watched(), (torch.randn(40, 2, 5), torch.randint(3, (40,)))


def _fisher(structure: Any, **options: Any) -> Callable[[], ParamMatrix]:
    return lambda: lw.fisher(*_problem(), structure=structure, estimator="exact", **options)


MATRICES: dict[str, Callable[[], ParamMatrix]] = {
    "dense": _fisher("dense"),
    "block": _fisher("block"),
    "diag": _fisher("diag"),
    "quasidiag": _fisher("quasidiag"),
    "kfac": _fisher("kfac"),
    "kfac-sua": _fisher("kfac", conv="sua"),
    "ekfac": _fisher("ekfac"),
    "ekfac-sua": _fisher("ekfac", conv="sua"),
    "lowrank": _fisher("lowrank"),
    "sum": lambda: _fisher("kfac")() + 0.5 * _fisher("dense")(),
    "implicit": _fisher("implicit"),
    "hessian": lambda: lw.hessian(*_problem(), loss=F.cross_entropy, structure="implicit"),
    "restricted": lambda: _fisher("implicit")().layer("head"),
}
RUNS_THE_MODEL = ("implicit", "hessian", "restricted")


def _of(M: ParamMatrix) -> Tensor:
    return torch.randn(M.numel(), generator=torch.Generator().manual_seed(1))


def _flat(v: lw.ParamVector) -> Tensor:
    return v.flat()


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "__matmul__": lambda M: M @ _of(M),
    "__add__": lambda M: (M + M) @ _of(M),
    "__sub__": lambda M: (M - 0.5 * M) @ _of(M),
    "__mul__": lambda M: (M * 2.0) @ _of(M),
    "__rmul__": lambda M: (2.0 * M) @ _of(M),
    "__truediv__": lambda M: (M / 2.0) @ _of(M),
    "quad": lambda M: M.quad(_of(M)),
    "solve": lambda M: M.solve(_of(M), 0.3),
    "power": lambda M: M.power(_of(M), -0.5, 0.3),
    "sample": lambda M: torch.stack([_flat(v) for v in M.sample(2, 0.3, 0)]),
    "trace": lambda M: M.trace(),
    "frobenius": lambda M: M.frobenius(),
    "diagonal": lambda M: _flat(M.diagonal()),
    "logdet": lambda M: M.logdet(0.3),
    "eigenvalues": lambda M: M.eigenvalues(),
    "eigh": lambda M: M.eigh(3)[0],
    "to_dense": lambda M: M.to_dense(),
    "layer": lambda M: M.layer("head").to_dense(),
    "plus": lambda M: None if (both := M.plus(M)) is None else both.to_dense(),
    "to_scipy": lambda M: torch.as_tensor(M.to_scipy() @ _of(M).numpy()),
}
WITHOUT_NUMBERS = {"numel", "parameters", "to", "save"}


def test_every_operation_is_listed():
    public = {k for k, f in vars(ParamMatrix).items() if callable(f) and not k.startswith("_")}
    assert public - WITHOUT_NUMBERS <= OPERATIONS.keys()


def test_operations_of_structures_are_those_of_the_base_class():
    """A method that a structure adds must be looked at here too."""
    for structure in (DenseMatrix, Implicit, type(MATRICES["lowrank"]()), type(MATRICES["kfac"]())):
        added = {k for k, f in vars(structure).items() if callable(f) and not k.startswith("_")} - set(dir(ParamMatrix))
        assert added <= {"merge", "to_low_rank"}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", MATRICES)
def test_the_same_under_autocast(kind: str, operation: str, untyped: None):
    if kind == "hessian" and operation in ("solve", "power", "sample", "logdet"):
        pytest.skip("needs a positive definite matrix")
    if (kind, operation) == ("restricted", "layer"):
        pytest.skip("one layer has no other")
    ask = OPERATIONS[operation]
    expected = ask(MATRICES[kind]())  # a new one each time: decompositions are kept
    fresh = MATRICES[kind]()
    SEEN.clear()
    with torch.autocast("cpu", torch.bfloat16):
        found = ask(fresh)
        assert torch.is_autocast_enabled("cpu")
    assert (expected is None and found is None) or torch.equal(torch.as_tensor(found), torch.as_tensor(expected))
    assert all(SEEN), "the model was run outside of the caller's autocast"
    assert bool(SEEN) == (kind in RUNS_THE_MODEL and operation != "plus")


@pytest.mark.parametrize("kind", ["dense", "lowrank", "kfac", "diag"])
def test_merging_is_the_same_under_autocast(kind: str):
    a, b = MATRICES[kind](), MATRICES[kind]()
    expected = a.merge(b).to_dense()  # type: ignore[attr-defined]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(a.merge(b).to_dense(), expected)  # type: ignore[attr-defined]
        assert torch.equal(_fisher("implicit")().to_low_rank().to_dense(), MATRICES["lowrank"]().to_dense())  # type: ignore[attr-defined]


def test_a_large_matrix_without_closed_form(monkeypatch: pytest.MonkeyPatch, untyped: None):
    """Conjugate gradients, Lanczos and random probes."""
    for module in ("matrix", "restricted"):
        monkeypatch.setattr(f"layerwise.curvature.{module}.SMALL", 1)
    M = 0.01 * MATRICES["kfac"]() + 0.5 * MATRICES["dense"]()
    asked = {k: OPERATIONS[k] for k in ("power", "trace", "frobenius", "diagonal", "logdet", "eigh", "sample")}
    asked["solve"] = lambda M: M.solve(_of(M), 0.3, tol=1e-5)
    for operation, ask in asked.items():
        expected = ask(M)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(ask(M), expected), operation


def test_solves_of_what_a_rounded_model_gives():
    """The model of an implicit matrix runs in bfloat16, the solve does not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    M = lw.fisher(model, (torch.randn(20, 4), torch.randint(3, (20,))), structure="implicit", estimator="exact")
    plain = M.to_dense()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = M.to_dense()
        found = M.solve(_of(M), 0.3)
    assert 1e-5 < float((rounded - plain).norm() / plain.norm()) < 5e-2
    assert torch.equal(found, DenseMatrix(rounded, M.shapes).solve(_of(M), 0.3))


@pytest.mark.parametrize("kind", ["block", "diag", "quasidiag", "kfac", "kfac-sua", "ekfac"])
def test_operators_of_layers(kind: str):
    op = MATRICES[kind]().operators["conv"]  # type: ignore[attr-defined]
    X = torch.randn(2, *op.shape)

    def answers(op: Any) -> list[Tensor]:
        draws = op.sample(2, 0.3, torch.Generator().manual_seed(0))
        numbers = [op.trace(), op.frobenius_squared(), op.logdet(0.3), op.diagonal(), op.eigenvalues()]
        vectors = op.eigenvectors(torch.tensor([0, 1]))
        scaled = op.scaled(2.0).mv(X)
        return [op.mv(X), op.solve(X, 0.3), op.power(X, 0.5, 0.3), draws, vectors, op.as_matrix(), scaled, *numbers]

    expected = answers(op.to())
    with torch.autocast("cpu", torch.bfloat16):
        found = answers(op.to())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_inference_mode_and_autocast_together():
    M = MATRICES["implicit"]()
    v = _of(M)
    expected = M.solve(v, 0.3)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(M.solve(v.clone(), 0.3), expected)
