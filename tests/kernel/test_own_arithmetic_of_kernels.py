"""Kernels and Jacobians compute in their own dtype under ``torch.autocast``; the model that they run still sees it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_tools import gaussian
from torch import Tensor, nn

import layerwise as lw
from layerwise.kernel.kernel import Kernel, MatrixKernel

SEEN: list[bool] = []
"""Whether autocast was on, whenever the model was run."""


class Watched(nn.Module):
    """Says whether it was called under autocast, and computes in float32 all the same: results can be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(torch.is_autocast_enabled("cpu"))
        with torch.autocast("cpu", enabled=False):
            return self.head(self.body(x).tanh())


with torch.random.fork_rng(devices=[]):
    torch.manual_seed(0)
    MODEL = Watched()
N, P = 7, 2
X, NEW = gaussian(N, 4).float(), gaussian(3, 4).float()
U = gaussian(N * P).float()
LABELS = torch.arange(N) % P

KERNELS: dict[str, Callable[[], Kernel]] = {
    "tangent": lambda: lw.ntk(MODEL, X),
    "formed": lambda: _formed(lw.ntk(MODEL, X)),
    "matrix": lambda: MatrixKernel(lw.ntk(MODEL, X).matrix(), (P,)),
    "layer": lambda: lw.ntk(MODEL, X).per_layer()["head"],
    "centered": lambda: lw.ntk(MODEL, X).centered(),
    "centered-formed": lambda: _formed(lw.ntk(MODEL, X)).centered("global"),
    "normalized": lambda: lw.ntk(MODEL, X).normalized(),
}
WITH_MODEL = ("tangent", "centered", "normalized")
ALGEBRA: dict[str, Callable[[Any], Any]] = {
    "__matmul__": lambda K: K @ U,
    "apply": lambda K: K.apply(U.unsqueeze(0)),
    "matrix": lambda K: K.matrix(),
    "diag": lambda K: K.diag(),
    "diagonals": lambda K: K.diagonals()[0],
    "trace": lambda K: K.trace(),
    "frobenius": lambda K: K.frobenius(),
    "eigenvalues": lambda K: K.eigenvalues(),
    "eigh": lambda K: K.eigh(3)[1],
    "solve": lambda K: K.solve(U, 0.3),
    "solve by cg": lambda K: K.solve(U, 0.3, method="cg", tol=1e-4),
    "to_scipy": lambda K: torch.as_tensor(K.to_scipy() @ U.numpy()),
    "centered": lambda K: K.centered().matrix(),
    "normalized": lambda K: K.normalized().matrix(),
    "kernel_pca": lambda K: K.kernel_pca(2).coordinates,
    "eigenfunctions": lambda K: K.eigenfunctions(2).at_examples(),
    "alignment": lambda K: lw.alignment(K, LABELS),
    "cka": lambda K: lw.cka(K, K),
    "effective_rank": lambda K: lw.effective_rank(K),
    "trace_ratio": lambda K: lw.trace_ratio(K, 2),
    "spectrum": lambda K: lw.spectrum(K).values,
}
AT_NEW_POINTS: dict[str, Callable[[Any], Any]] = {
    "cross": lambda K: K.cross(NEW).matrix(),
    "predict": lambda K: K.predict(NEW, U),
    "eigenfunctions": lambda K: K.eigenfunctions(2)(NEW),
    "kernel_pca": lambda K: K.kernel_pca(2).project(NEW),
}
WITHOUT_NUMBERS = {"has_matrix", "require_square", "plan"}
JACOBIAN: dict[str, Callable[[lw.Jacobian], Tensor]] = {
    "__matmul__": lambda J: J @ gaussian(J.shape[1]).float(),
    "T": lambda J: J.T @ U,
    "to_dense": lambda J: J.to_dense(),
    "blocks": lambda J: torch.cat(list(J.blocks())),
    "layer": lambda J: J.layer("head").to_dense(),
    "per_layer": lambda J: J.per_layer()["body"] @ gaussian(30).float(),
}


def _formed(K: Kernel) -> Kernel:
    K.matrix()
    return K


def _same_under_autocast(make: Callable[[], Any], ask: Callable[[Any], Tensor], runs: bool) -> None:
    expected = ask(make())
    fresh = make()
    SEEN.clear()
    with torch.autocast("cpu", torch.bfloat16):
        found = ask(fresh)
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(found, expected)
    assert bool(SEEN) == runs
    assert all(SEEN), "the model was run outside of the caller's autocast"


def test_every_operation_is_listed():
    public = {k for k, f in vars(Kernel).items() if callable(f) and not k.startswith("_")}
    assert public - WITHOUT_NUMBERS - {"per_layer"} <= ALGEBRA.keys() | AT_NEW_POINTS.keys()


@pytest.mark.parametrize("operation", ALGEBRA)
@pytest.mark.parametrize("kind", KERNELS)
def test_the_same_under_autocast(kind: str, operation: str, untyped: None):
    _same_under_autocast(KERNELS[kind], ALGEBRA[operation], kind in WITH_MODEL)


@pytest.mark.parametrize("operation", AT_NEW_POINTS)
@pytest.mark.parametrize("kind", ["tangent", "formed", "centered", "normalized"])
def test_new_points_under_autocast(kind: str, operation: str, untyped: None):
    _same_under_autocast(KERNELS[kind], AT_NEW_POINTS[operation], True)


@pytest.mark.parametrize("operation", JACOBIAN)
def test_jacobians_under_autocast(operation: str, untyped: None):
    _same_under_autocast(lambda: lw.jacobian(MODEL, X), JACOBIAN[operation], True)


def test_layers_under_autocast():
    _same_under_autocast(lambda: lw.ntk(MODEL, X), lambda K: K.per_layer()["body"].matrix(), True)


def test_a_rounded_models_kernel_is_solved_in_single_precision():
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    plain = lw.ntk(model, X).matrix()
    with torch.autocast("cpu", torch.bfloat16):
        K = lw.ntk(model, X)
        rounded, found = K.matrix(), K.solve(U, 0.3)
    assert 1e-5 < float((rounded - plain).norm() / plain.norm()) < 5e-2
    assert torch.equal(found, MatrixKernel(rounded, (P,)).solve(U, 0.3))
